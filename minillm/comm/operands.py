"""What all collectives share: recording the call, tensors of any layout, scratch memory, and checks of the input."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minillm.comm.world import World

SCRATCH_BYTES = 2 << 20  # the largest piece of memory that is kept
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Communicator(Protocol):
    """What algorithms and backends need of a `Group`."""

    rank: int
    world_size: int
    ranks: Sequence[int]
    name: str
    ordinal: int
    device: torch.device
    world: World
    process_group: dist.ProcessGroup
    scratch: "Scratch"
    cuts_messages: bool

    def exchange(self, send: Any = (), recv: Any = ()) -> Any: ...
    def run(self, op: str, x: torch.Tensor, body: Callable[[], Any], async_op: bool = ...) -> Any: ...
    def check_rank(self, what: str, rank: int) -> None: ...


def collective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the call one operation of its group, with an `async_op` argument. `__wrapped__` is the function itself."""

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(x: torch.Tensor, group: Communicator, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        given = signature.bind(x, group, *args, **kwargs).arguments
        uneven = given.get("out") is not None  # then `out` fixes the sizes
        how = [f"{k}={v}" for k, v in list(given.items())[2:] if k != "out" and v != signature.parameters[k].default]
        body = functools.partial(function, x, group, *args, **kwargs)
        return group.run(function.__name__, x, body, async_op, same_shape=not uneven, how=", ".join(how))

    return call


def part_shape(x: torch.Tensor, world_size: int, op: str) -> tuple[int, ...]:
    """Shape of one rank's part of x, cut along dimension 0."""
    shape = tuple(x.shape)
    if not shape or shape[0] % world_size:
        raise ValueError(
            f"{op} cuts dimension 0 of a {list(x.shape)} tensor into {world_size} equal parts, which does not "
            f"work out: pad it, or use ring_{op} for any size"
        )
    return shape[0] // world_size, *shape[1:]


def checked_splits(
    x: torch.Tensor, world_size: int, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
) -> tuple[list[int] | None, list[int] | None]:
    """Both as lists; ValueError unless an all-to-all of x can have these splits."""
    if output_splits is None or input_splits is None:
        part_shape(x, world_size, "all_to_all")
    if output_splits is None and input_splits is None:
        return None, None
    for what, sizes in (("output_splits", output_splits), ("input_splits", input_splits)):
        if sizes is not None and (len(sizes) != world_size or min(sizes) < 0):
            raise ValueError(f"{what} {list(sizes)} must be the rows, 0 or more, of each of {world_size} ranks")
    if input_splits is not None and sum(input_splits) != len(x):
        raise ValueError(f"input_splits {list(input_splits)} make {sum(input_splits)} rows, but x has {len(x)}")
    rows_from = None if output_splits is None else list(output_splits)
    return rows_from, None if input_splits is None else list(input_splits)


def gather_output(x: torch.Tensor, world_size: int, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, checked, or a new tensor for N tensors like x."""
    if out is None:
        return x.new_empty((world_size * x.shape[0], *x.shape[1:]) if x.dim() else (world_size,))
    return checked_output(out, x)


def checked_output(out: torch.Tensor, x: torch.Tensor, numel: int | None = None) -> torch.Tensor:
    """`out`, if a result of x's dtype (and `numel` elements) can be written straight into it."""
    if not out.is_contiguous():
        raise ValueError(
            f"out {list(out.shape)} is not contiguous: pass a contiguous tensor, for example torch.empty(...)"
        )
    if out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype} but x is {x.dtype}: they must have the same dtype")
    if numel not in (None, out.numel()):
        raise ValueError(f"out {list(out.shape)} has {out.numel()} elements, but the result has {numel}")
    return out


def all_to_all_output(x: torch.Tensor, output_splits: Sequence[int] | None) -> torch.Tensor:
    """A new tensor for the rows that this rank receives."""
    return torch.empty_like(x) if output_splits is None else x.new_empty((sum(output_splits), *x.shape[1:]))


def check_op(op: str, x: torch.Tensor) -> None:
    """ValueError unless `op` reduces tensors of x's dtype."""
    if op not in _COMBINE:
        raise ValueError(f"op={op!r} is not a reduction: choose one of {', '.join(_COMBINE)}")
    if op in ("max", "min") and x.is_complex():
        raise ValueError(f"op={op!r} needs numbers that have an order, not {x.dtype}: use 'sum' or 'avg'")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"op='avg' needs a floating-point tensor, not {x.dtype}: use 'sum'")


def combiner(op: str, x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """combine(a, b, out=): adds, or takes the larger or smaller of, two partial results."""
    check_op(op, x)
    return _COMBINE[op]


def divide(x: torch.Tensor, world_size: int, op: str) -> torch.Tensor:
    """x, which is a sum: divided in place where op is "avg"."""
    return x.div_(world_size) if op == "avg" else x


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and unknown to autograd: x itself if it is both, as most are."""
    return x.detach().contiguous() if x.requires_grad or not x.is_contiguous() else x


def flatten(x: torch.Tensor) -> torch.Tensor:
    """x in one dimension: a view where x is contiguous, else a copy that `write_back` copies into x."""
    return dense(x).flatten()


def write_back(x: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """x, with the contents of `flat`, which `flatten(x)` returned."""
    if not x.is_contiguous():
        x.detach().copy_(flat.view(x.shape))
    elif x.data_ptr() != flat.data_ptr():
        x.detach().flatten().copy_(flat)
    return x


def dtype_name(x: torch.Tensor) -> str:
    """The dtype without its module: "float32"."""
    return str(x.dtype).removeprefix("torch.")


class Scratch:
    """Memory for partial sums that arrive, kept from call to call: fresh memory takes longer than adding does.

    On a GPU it is given back when the host has queued its last use, so only the stream that it was used on, whose work
    comes in order, may use it again: an asynchronous collective on its side stream has memory of its own."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}  # by stream

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """At least as many bytes as x has, on its device, with anything in them."""
        free = self._free.get(stream_of(x))
        memory = free.pop() if free else x.new_empty(0, dtype=torch.uint8)
        fits = memory.numel() >= x.nbytes and memory.device == x.device
        return memory if fits else x.new_empty(x.nbytes, dtype=torch.uint8)

    def give(self, memory: Sequence[torch.Tensor]) -> None:
        """Hand back for the next call; large pieces go back to the system."""
        for piece in memory:
            if piece.numel() <= SCRATCH_BYTES:
                self._free.setdefault(stream_of(piece), []).append(piece)


def stream_of(x: torch.Tensor) -> int:
    """The number of the current stream of x's device; 0 on a CPU."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
