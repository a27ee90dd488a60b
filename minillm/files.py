"""Files that a reader finds whole or not at all, whoever writes them and is killed at any moment.

.NAME.1f3a9c07.tmp ── written, and on the disk if that is asked for ── renamed ──▶ NAME
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, content: str | bytes, on_disk: bool = False) -> None:
    """A reader finds what was there before or all of `content`, never a part. on_disk: before this returns."""
    with draft_of(path, on_disk) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def draft_of(path: Path, on_disk: bool = False) -> Iterator[Path]:
    """A name beside `path`; what the block writes to it becomes `path`, or nothing has changed if the block raises."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        if on_disk:
            flush(draft)
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def flush(path: Path) -> None:
    """A file's content, or a folder's list of names, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
