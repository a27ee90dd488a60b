"""Which bytes of a model's weights and of its cache a computation touches: counted by torch operation.

    with MemoryTraffic(weights=model.parameters(), cache=(keys, values)) as traffic:
        model(tokens, positions, attention=cache)
    traffic.read["weights"], traffic.read["cache"], traffic.written["cache"]      # bytes

A view moves nothing. An operation that takes a watched tensor, or a view of one, reads the view's distinct elements
once; one that writes into it in place writes as many. A look-up by indices reads, and a write by indices writes, only
the rows that it names. Nothing is timed: these are the bytes that have to come from memory when the tensors do not fit
a cache.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from minillm.measure.watch import Watch

_ATEN = torch.ops.aten
_LOOKUPS = {  # read as much as they give
    _ATEN.embedding.default,
    _ATEN.index_select.default,
    _ATEN.index.Tensor,
    _ATEN.gather.default,
}
_PLACED = {  # write as much as this argument holds
    _ATEN.index_put_.default: 2,
    _ATEN.index_copy_.default: 3,
    _ATEN.scatter_.src: 2,
}


class MemoryTraffic(Watch):
    """Bytes `read` and `written` by name of the watched group of tensors."""

    def __init__(self, **watched: Iterable[Tensor]):
        super().__init__()
        self.read, self.written = Counter(), Counter()
        self._names = {t.untyped_storage().data_ptr(): name for name, group in watched.items() for t in group}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = func._schema.arguments
        if not any(a.alias_info and not a.alias_info.is_write for a in given):  # not a view
            if func in _LOOKUPS and (name := self._name(args[0])):
                self.read[name] += result.numel() * result.element_size()
                return result
            if func in _PLACED and (name := self._name(args[0])):
                self.written[name] += args[_PLACED[func]].numel() * args[0].element_size()
                return result
            named = {a.name: value for a, value in zip(given, args, strict=False)} | kwargs
            for argument in given:
                self._note(named.get(argument.name), bool(argument.alias_info and argument.alias_info.is_write))
        return result

    def _note(self, value: Any, writes: bool) -> None:
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor) and (name := self._name(tensor)):
                (self.written if writes else self.read)[name] += _distinct(tensor) * tensor.element_size()

    def _name(self, tensor: Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage().data_ptr())


def _distinct(tensor: Tensor) -> int:
    """Elements of the storage that a view covers; an expanded dimension is one."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
