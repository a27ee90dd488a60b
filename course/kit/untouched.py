"""A learner's function may change only those of its arguments that the exercise asks it to change.

    @exercise("ring-all-reduce", ..., changes=("x",))        # replaced in place; `group` and all others stay

Whoever calls a function still needs what was handed in: gradients of a batch that comes again, a prompt, a table of
blocks. So every function is called through a watch that compares tensors, lists and dicts before and after.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any


def watched(candidate: Any, reference: Any, changes: Iterable[str], error: type[Exception]) -> Any:
    """The candidate, or each function of a tuple, with a watch around it; what is no plain function stays as it is.

    changes: names of the reference's parameters that may be changed. error: raised with the name of another that was.
    """
    if isinstance(candidate, tuple) and isinstance(reference, tuple) and len(candidate) == len(reference):
        pairs = zip(candidate, reference, strict=True)
        return tuple(watched(one, right, changes, error) for one, right in pairs)
    if not inspect.isfunction(candidate) or not inspect.isfunction(reference):
        return candidate
    return _watch(candidate, inspect.signature(reference), frozenset(changes), error)


def _watch(function: Callable, signature: inspect.Signature, changes: frozenset, error: type[Exception]) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself will say so
            given = {}
        kept = {name: value for name, value in given.items() if name not in changes}
        with _uncounted():
            before = {name: _copied(value) for name, value in kept.items()}
        result = function(*args, **kwargs)
        with _uncounted():
            for name, value in kept.items():
                if not _same(value, before[name]):
                    raise error(
                        f"`{function.__name__}` changed its input `{name}`, which its caller still needs as it was: "
                        "work on a clone, or put the result into something new"
                    )
        return result

    return call


def _uncounted() -> contextlib.AbstractContextManager:
    """A block whose work on tensors no check counts, such as the bytes that are read."""
    if "torch" not in sys.modules:  # then there are no tensors, either
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def _copied(value: Any) -> Any:
    if _is_tensor(value):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return [_copied(each) for each in value]
    return {key: _copied(each) for key, each in value.items()} if type(value) is dict else value


def _same(value: Any, before: Any) -> bool:
    """Whether a value is as its copy says; NaN equals NaN, and other objects are not looked into."""
    if _is_tensor(value):
        return value.dtype == before.dtype and value.shape == before.shape and _same_numbers(value.detach(), before)
    if type(value) in (list, tuple):
        return len(value) == len(before) and all(map(_same, value, before))
    if type(value) is dict:
        return list(value) == list(before) and all(_same(each, before[key]) for key, each in value.items())
    return value is before


def _same_numbers(value: Any, before: Any) -> bool:
    if value.equal(before):
        return True
    return value.is_floating_point() and bool(((value == before) | (value.isnan() & before.isnan())).all())
