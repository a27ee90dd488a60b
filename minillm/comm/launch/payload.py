"""Functions as bytes, which ranks can load even if they come from a notebook cell: cloudpickle, with file names.

cloudpickle 3.1.3 and newer replace a code object's file name by "<dynamic-code>". A rank could then neither show the
line at which it failed nor find the text of a cell.
"""

import io
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


def to_bytes(content: Any) -> bytes:
    """Bytes for `cloudpickle.loads`. Raises whatever pickling the content raises."""
    written = io.BytesIO()
    _Pickler(written).dump(content)
    return written.getvalue()


def _reduce_code(code: CodeType) -> tuple[Callable, tuple]:
    return _code_of_file, (code.co_filename, *cloudpickle.Pickler.dispatch_table[CodeType](code))


def _code_of_file(file: str, build: Callable[..., CodeType], parts: tuple) -> CodeType:
    return build(*parts).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce_code})
