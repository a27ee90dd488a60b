"""Spoilers of lab 10, state: bytes too many or in the wrong place, and what a resume can forget."""

import copy
import random

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("10_fault_tolerance")

# Another number of ranks.


def _load(read, parts, numel, itemsize, rank, world_size, *, bounds=None, order=True, offset=True, size=None):
    """The reference with its parts exchangeable."""
    first, last = bounds or (numel * rank // world_size, numel * (rank + 1) // world_size)
    found = []
    for part in sorted(parts, key=lambda part: part.start) if order else parts:
        begin, end = max(first, part.start), min(last, part.stop)
        if begin < end:
            skipped = (begin - part.start) * (itemsize if size is None else size)
            found.append(read(part.file, (part.offset if offset else 0) + skipped, (end - begin) * itemsize))
    return b"".join(found)


@mistake("reshard", "reads whole parts and cuts", expect="read its bytes only")
def whole_parts(read, parts, numel, itemsize, rank, world_size):
    first, last = numel * rank // world_size, numel * (rank + 1) // world_size
    found = []
    for part in sorted(parts, key=lambda part: part.start):
        begin, end = max(first, part.start), min(last, part.stop)
        if begin < end:
            data = read(part.file, part.offset, (part.stop - part.start) * itemsize)
            found.append(data[(begin - part.start) * itemsize : (end - part.start) * itemsize])
    return b"".join(found)


@mistake(
    "reshard",
    "parts in the order of the list",
    says="The parts were joined in the order in which the manifest lists them. Their place in the tensor is `start`.",
)
def unordered(*given):
    return _load(*given, order=False)


@mistake(
    "reshard",
    "parts in the order of the files",
    says="The parts were joined in the order of the files. A file may hold any part: its place in the tensor is "
    "`start`.",
)
def by_file(read, parts, *given):
    order = sorted(parts, key=lambda part: part.file)
    return _load(read, order, *given, order=False)


@mistake(
    "reshard",
    "elements counted as bytes",
    says="Elements were skipped as if each had one byte: the distance in the file is (begin - part.start) · itemsize.",
)
def as_bytes(*given):
    return _load(*given, size=1)


@mistake(
    "reshard",
    "without the part's offset",
    says="The tensor does not begin where the file does: other things lie in front of it. Add part.offset.",
)
def no_offset(*given):
    return _load(*given, offset=False)


@mistake("reshard", "equal parts, rounded down", expect="but it holds")
def rounded_down(read, parts, numel, itemsize, rank, world_size):
    size = numel // world_size
    return _load(read, parts, numel, itemsize, rank, world_size, bounds=(rank * size, (rank + 1) * size))


@mistake(
    "reshard",
    "the part of the same rank",
    says="Rank r took what rank r had saved. With another number of ranks its elements begin elsewhere.",
)
def same_rank(read, parts, numel, itemsize, rank, world_size):
    mine = [part for part in parts if part.file == rank]
    count = (numel * (rank + 1) // world_size - numel * rank // world_size) * itemsize
    return b"".join(read(p.file, p.offset, min(count, (p.stop - p.start) * itemsize)) for p in mine)


@mistake("reshard", "one element at a time", expect="one range per part")
def one_by_one(read, parts, numel, itemsize, rank, world_size):
    first, last = numel * rank // world_size, numel * (rank + 1) // world_size
    places = {i: (p.file, p.offset + (i - p.start) * itemsize) for p in parts for i in range(p.start, p.stop)}
    return b"".join(read(*places[i], itemsize) for i in range(first, last))


@alternative("reshard", "into a buffer of the right size")
def into_a_buffer(read, parts, numel, itemsize, rank, world_size):
    first, last = numel * rank // world_size, numel * (rank + 1) // world_size
    own = bytearray((last - first) * itemsize)
    for part in parts:
        begin, end = max(first, part.start), min(last, part.stop)
        nbytes = max(0, end - begin) * itemsize
        if nbytes:
            at = (begin - first) * itemsize
            own[at : at + nbytes] = read(part.file, part.offset + (begin - part.start) * itemsize, nbytes)
    return own


@alternative("reshard", "following the tensor from part to part")
def from_part_to_part(read, parts, numel, itemsize, rank, world_size):
    at, last = numel * rank // world_size, numel * (rank + 1) // world_size
    found = b""
    while at < last:
        part = next(part for part in parts if part.start <= at < part.stop)
        count = min(last, part.stop) - at
        found += read(part.file, part.offset + (at - part.start) * itemsize, count * itemsize)
        at += count
    return found


# Resume.


def _without(part):
    """(capture, restore) that leave one part of the state out."""

    def capture(loop):
        state = right.capture(loop)
        return {name: value for name, value in state.items() if name != part}

    def restore(loop, state):
        own = copy.deepcopy(right.capture(loop))
        right.restore(loop, own | state)

    return capture, restore


for _name, _says in (
    ("model", "weights"),
    ("optimizer", "optimizer"),
    ("scheduler", "scheduler"),
    ("order", "order of the data"),
    ("torch", "torch's generator"),
    ("python", "Python's generator"),
):
    mistake("resume-state", f"without {_name}", expect=_says)(_without(_name))


def _references(loop):
    return {
        "model": loop.model.state_dict(),
        "optimizer": loop.optimizer.state_dict(),
        "scheduler": loop.scheduler.state_dict(),
        "order": dict(vars(loop.order)),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }


mistake("resume-state", "refers to what training changes", expect="Take a copy")((_references, right.restore))


def _gives_away(loop, state):
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    loop.scheduler.load_state_dict(state["scheduler"])
    loop.order.__dict__ = state["order"]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])


mistake("resume-state", "trains into the saved state", expect="put copies into the loop")((right.capture, _gives_away))


def _position_only(loop):
    state = right.capture(loop)
    state["order"] = {"position": state["order"]["position"]}
    return state


mistake("resume-state", "the position without the epoch and the seed", expect="order of the data")(
    (_position_only, right.restore)
)


def _seeds_again(loop, state):
    right.restore(loop, state)
    torch.manual_seed(0)
    random.seed(0)


mistake("resume-state", "seeds again instead", expect="torch's generator, Python's generator")(
    (right.capture, _seeds_again)
)

mistake("resume-state", "keeps the objects", expect="not only tensors")(
    (lambda loop: {"loop": copy.deepcopy(loop)}, lambda loop, state: vars(loop).update(vars(state["loop"])))
)


def _new_optimizer(loop, state):
    right.restore(loop, state)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.02)
    loop.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


mistake("resume-state", "an optimizer that the scheduler does not know", expect="another optimizer than the loop's")(
    (right.capture, _new_optimizer)
)


def _as_lists(loop):
    state = {f"model/{name}": each.clone() for name, each in loop.model.state_dict().items()}
    moments = copy.deepcopy(loop.optimizer.state_dict())
    numbers = (loop.order.seed, loop.order.epoch, loop.order.position)
    generators = (torch.get_rng_state().clone(), random.getstate())
    return [state, moments, dict(loop.scheduler.state_dict()), numbers, generators]


def _from_lists(loop, state):
    weights, moments, scheduler, numbers, (own, python) = state
    loop.model.load_state_dict({name.removeprefix("model/"): each for name, each in weights.items()})
    loop.optimizer.load_state_dict(copy.deepcopy(moments))
    loop.scheduler.load_state_dict(scheduler)
    loop.order.seed, loop.order.epoch, loop.order.position = numbers
    torch.random.set_rng_state(own)
    random.setstate(python)


alternative("resume-state", "in a list of its own")((_as_lists, _from_lists))
