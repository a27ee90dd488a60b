"""From a wrong tensor to the mistake behind it.

Checks of collectives draw whole numbers as inputs, so a wrong result still says where it came from: which chunk it is,
whose contributions are in it and how often. `say_sum` and `say_parts` look for that and put it in a sentence. `expect`
and its like refuse a result of a wrong kind, `forbidding` a call that the exercise is to do without.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from typing import Any
from unittest.mock import patch

import torch

from course.kit.exercises import CheckFailed

_KINDS = {int: Integral, float: Real}  # NumPy's numbers count, too
LARGEST = 60_000  # sums of ten of these are exact in float32


def whole_numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random whole numbers from 1 to 60,000 as float32."""
    return torch.randint(1, LARGEST + 1, shape, generator=generator).float()


def expect(fits: bool, found: Any, asked: str, who: str = "you") -> None:
    """CheckFailed unless `fits`: what `who` returned is not of the kind that the exercise asks for."""
    if not fits:
        got = "nothing (None): is there a return?" if found is None else f"{found!r:.80}"
        raise CheckFailed(f"{who} returned {got}; the exercise asks for {asked}")


def expect_list(found: Any, asked: str, who: str = "you", *, count: int | None = None, of: Any = object) -> list:
    """The values of a list or tuple; CheckFailed unless it is one, of `count` values, all of them of type `of`."""
    fits = (
        isinstance(found, list | tuple)
        and count in (None, len(found))
        and all(isinstance(x, _KINDS.get(of, of)) for x in found)
    )
    expect(fits, found, asked, who)
    return list(found)


def expect_whole(what: str, values: Any, asked: str) -> list[int]:
    """The numbers; CheckFailed unless they are whole. asked: what the exercise asks for."""
    try:
        return [operator.index(each) for each in values]
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"a tensor {_kind(values)}" if isinstance(values, torch.Tensor) else f"{values!r:.60}"
        raise CheckFailed(f"{what} is {got}; the exercise asks for whole numbers: {asked}") from error


def expect_tensor(what: str, found: Any, shape: Sequence[int]) -> None:
    """CheckFailed unless `found` is a tensor of this shape."""
    if not isinstance(found, torch.Tensor) or list(found.shape) != list(shape):
        got = list(found.shape) if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        raise CheckFailed(f"{what} is {got}; the exercise asks for a tensor {list(shape)}")


def expect_like(who: str, result: Any, expected: torch.Tensor, returns: str) -> None:
    """CheckFailed unless `result` is a tensor of the expected size and dtype; `returns` says what is asked for."""
    if not isinstance(result, torch.Tensor):
        got = "nothing (None): is there a return?" if result is None else f"a {type(result).__name__}"
        raise CheckFailed(f"{who} returned {got}; the exercise asks for {returns}")
    if result.numel() != expected.numel() or result.dtype != expected.dtype:
        raise CheckFailed(
            f"{who} returned {_kind(result)}, but the exercise asks for {returns}, here {_kind(expected)}"
        )


def expect_number(value: Any, returns: str) -> float:
    """The number, out of a one-element tensor too; CheckFailed unless `value` is one, and finite.

    returns: what is asked for.
    """
    number = value.item() if getattr(value, "shape", None) in ((), (1,)) else value
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        raise CheckFailed(f"you returned {value!r}; the exercise asks for {returns}")
    return number


@contextmanager
def forbidding(calls: Sequence[tuple[Any, str]], sentence: str) -> Iterator[None]:
    """CheckFailed with this sentence as soon as one of the calls (owner, name) is made inside the block."""

    def refuse(*_: Any, **__: Any) -> None:
        raise CheckFailed(sentence)

    with ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(patch.object(owner, name, refuse))
        yield


def say_sum(result: torch.Tensor, inputs: Sequence[torch.Tensor], chunk: int, parts: int) -> str:
    """What `result` is, if not chunk number `chunk` of the sum of `inputs` cut into `parts` equal chunks."""
    for place in sorted(range(parts), key=lambda place: place != chunk):
        pieces = torch.stack([x.flatten().chunk(parts)[place] for x in inputs]).double()
        for scale, how in ((1, ""), (len(inputs), f", divided by the {len(inputs)} ranks")):
            counts = _counts(result.double() * scale, pieces)
            if counts is None and scale > 1:  # a sum that was rounded when it was divided
                close = torch.allclose(result.double() * scale, pieces.sum(0), rtol=1e-5)
                counts = [1] * len(inputs) if close else None
            if counts is not None:
                return _in_words(counts, place, chunk, parts) + how
    return "it is no sum of the ranks' inputs at all: is a buffer read before it is filled, or a chunk overwritten?"


def say_rounded(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """A sentence if `found` is right, but in float32's precision where the input is float64; else ""."""
    rounded = found.dtype == wanted.dtype == torch.float64 and found.numel() == wanted.numel()
    if rounded and torch.allclose(found.flatten(), wanted.flatten(), rtol=1e-4, atol=1e-3):
        return "it is right to float32's digits only: the input is float64, and something on the way is not"
    return ""


def say_parts(result: torch.Tensor, wanted: Sequence[torch.Tensor], known: dict[str, torch.Tensor]) -> str:
    """The first part of `result` that is not as wanted, and which of the `known` tensors it is instead."""
    for place, (part, right) in enumerate(zip(result.flatten().chunk(len(wanted)), wanted, strict=True)):
        if not torch.equal(part, right.flatten()):
            names = [name for name, tensor in known.items() if torch.equal(part, tensor.flatten())]
            return f"place {place} of it holds " + (names[0] if names else "something that no rank ever had")
    return "it differs"


def _counts(result: torch.Tensor, pieces: torch.Tensor) -> list[int] | None:
    """How often each row of `pieces` is in the sum `result`, if 0 to 2 times each explains it."""
    ways = torch.tensor(list(itertools.product(range(3), repeat=len(pieces))), dtype=torch.float64)
    ways = ways[(ways - 1).abs().sum(1).argsort()]  # the likely ones first
    found = ((ways @ pieces) == result).all(dim=1).nonzero()
    return [int(count) for count in ways[found[0, 0]]] if len(found) else None


def _in_words(counts: list[int], place: int, chunk: int, parts: int) -> str:
    what = f"chunk {place} (its own is chunk {chunk})" if place != chunk else f"chunk {place}"
    what = what if parts > 1 else "the tensor"
    if all(count == 1 for count in counts):
        return f"it is the sum over all ranks of {what}" + (": off by one?" if place != chunk else "")
    if sum(counts) == 1:
        return f"it is just rank {counts.index(1)}'s own {what.removeprefix('the ')}: nothing was added"
    missing, twice = ([r for r, c in enumerate(counts) if c == k] for k in (0, 2))
    told = [f"without {_ranks(missing)}"] if missing else []
    told += [f"with {_ranks(twice)} twice"] if twice else []
    return f"it is a sum of {what} " + " and ".join(told)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _kind(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
