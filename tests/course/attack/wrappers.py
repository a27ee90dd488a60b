"""What a cheating, hasty or merely unusual answer does around the right one; cheats.py and variants.py say where.

Each takes the right function and gives another. Ranks import this module by its name, so nothing here keeps state:
what a wrapper remembers lives in its own closure, which travels to each rank by value.
"""

import copy
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.course.attack.alterations import ALTERED, each_number, is_float_tensor


def recorded(function: Callable, path: str) -> Callable:
    """The same, and a line of JSON per call in the file: what came in, which of it was changed, what went out."""

    def call(*args, **kwargs):
        with _disable_current_modes():  # a check may count what is read
            before = [_frozen(value) for value in args]
        result = function(*args, **kwargs)
        with _disable_current_modes():
            kept = [_same(value, old) for value, old in zip(args, before, strict=True)]
        line = {
            "function": function.__name__,
            "arguments": [kind(value) for value in args],
            "changed": [place for place, same in enumerate(kept) if not same],
            "returned": next((f"argument {place}" for place, x in enumerate(args) if x is result), kind(result)),
            "signature": signature(args),
        }
        with Path(path).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return result

    return _named(call, function)


def kind(value: Any) -> str:
    """The sort of value, such as "float 2-d tensor" or "list of int"."""
    if isinstance(value, Tensor):
        what = "float" if value.dtype.is_floating_point else "bool" if value.dtype == torch.bool else "whole"
        return f"{what} {value.dim()}-d tensor"
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return f"{type(value).__name__} of {kind(value[0])}" if value else type(value).__name__
    return type(value).__name__


def signature(value: Any) -> str:
    """The sizes in a call's arguments: whole numbers, lengths and shapes."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(map(signature, value)) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{signature(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (int, str)) or value is None:
        return repr(value)
    size = getattr(value, "world_size", None)
    return f"{type(value).__name__}{f' of {size}' if isinstance(size, int) else ''}"


# Cheats: each must be refused.


def only_sizes(function: Callable, sizes: Sequence[str]) -> Callable:
    """Right for the sizes that it has seen in the check."""

    def call(*args, **kwargs):
        if signature(args) not in sizes:
            raise RuntimeError("an answer that knows only the sizes of the check's own cases")
        return function(*args, **kwargs)

    return _named(call, function)


def first_value(function: Callable, place: int) -> Callable:
    """An argument is taken as it was at the first call."""
    first: list = []

    def call(*args, **kwargs):
        first.append(copy.deepcopy(args[place]))
        return function(*args[:place], first[0], *args[place + 1 :], **kwargs)

    return _named(call, function)


def first_result(function: Callable) -> Callable:
    """Computes once, and returns that for ever."""
    first: list = []

    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        first.append(result)
        return first[0]

    return _named(call, function)


def changes_argument(function: Callable, place: int) -> Callable:
    """Leaves an argument changed that it should have left alone."""

    def call(*args, **kwargs):
        result = copy.copy(function(*args, **kwargs))
        _spoil(args[place])
        return result

    return _named(call, function)


def on_copies(function: Callable) -> Callable:
    """Works on copies of tensors, lists and dicts: a cheat where the exercise asks for a change in place."""

    def call(*args, **kwargs):
        plain = [_frozen(x) if isinstance(x, (Tensor, list, dict)) else x for x in args]
        return function(*plain, **kwargs)

    return _named(call, function)


def on_result(function: Callable, name: str) -> Callable:
    """The result, altered in the way of that name in alterations.py."""

    def call(*args, **kwargs):
        return ALTERED[name](function(*args, **kwargs))

    return _named(call, function)


def in_dtype(function: Callable, dtype: str) -> Callable:
    """Computes in another dtype, where all that comes in has the same one; the result has that one again."""
    other = getattr(torch, dtype)

    def call(*args, **kwargs):
        given = {x.dtype for x in args if is_float_tensor(x)}
        if len(given) != 1 or given == {torch.bfloat16}:
            return function(*args, **kwargs)
        result = function(*(_cast(x, other) for x in args), **kwargs)
        back = given.pop()
        return each_number(result, lambda x: x.to(back) if is_float_tensor(x) and x.dtype == other else x)

    return _named(call, function)


def without_gradient(function: Callable) -> Callable:
    """No graph: nothing flows back through the result."""

    def call(*args, **kwargs):
        with torch.no_grad():
            return function(*args, **kwargs)

    return _named(call, function)


def waited(handle: Any) -> Any:
    """A handle whose operation is waited for as soon as it has started: no overlap."""
    if hasattr(handle, "wait"):
        handle.wait()
    return handle


def swapped_sum(a: Any, b: Any) -> Any:
    """b + a where that is the same, else a + b."""
    plain = (int, float, Tensor)
    return b + a if isinstance(a, plain) and isinstance(b, plain) else a + b


def other_sum(x: Any, *args: Any, **kwargs: Any) -> Any:
    """x.sum(...) added up in float64."""
    if not is_float_tensor(x):
        return x.sum(*args, **kwargs)
    return x.double().sum(*args, **kwargs).to(x.dtype)


def other_matmul(a: Any, b: Any) -> Any:
    """a @ b as the transpose of what the transposes give."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor) and min(a.dim(), b.dim()) >= 2
    return (b.mT @ a.mT).mT if both else a @ b


def _named(call: Callable, function: Callable) -> Callable:
    functools.update_wrapper(call, function)
    call.__signature__ = inspect.signature(function)
    return call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return each_number(value, lambda x: x.to(dtype) if is_float_tensor(x) else x)


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.requires_grad else value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_frozen(x) for x in value)
    return {key: _frozen(x) for key, x in value.items()} if type(value) is dict else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is dict:
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    return one is other


def _spoil(value: Any) -> None:
    """Change a tensor, list or dict a little, in place."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(~value if value.dtype == torch.bool else value + 1)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        _spoil(value[0])
    elif isinstance(value, list):
        value.pop() if value else value.append(0)
    elif isinstance(value, dict) and value:
        value.pop(next(iter(value)))
