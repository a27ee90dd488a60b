"""Spoilers of lab 10, state: bytes too many or in the wrong place, and what a resume can forget."""

import copy
import pickle
import random

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("10_fault_tolerance")

# Another number of ranks.

reshard = KnownAnswers("reshard")

reshard.mistake(
    "reads whole parts and cuts",
    {
        "part.offset + (begin - part.start) * itemsize": "part.offset",
        "(end - begin) * itemsize,\n                )": (
            "(part.stop - part.start) * itemsize,\n"
            "                )[(begin - part.start) * itemsize : (end - part.start) * itemsize]"
        ),
    },
    expect="read its bytes only",
)
reshard.mistake(
    "parts in the order of the list",
    {"sorted(parts, key=lambda part: part.start)": "parts"},
    says="The parts were joined in the order in which the manifest lists them. Their place in the tensor is `start`.",
)
reshard.mistake(
    "parts in the order of the files",
    {"lambda part: part.start": "lambda part: part.file"},
    says="The parts were joined in the order of the files. A file may hold any part: its place in the tensor is "
    "`start`.",
)
reshard.mistake(
    "elements counted as bytes",
    {"(begin - part.start) * itemsize": "(begin - part.start)"},
    says="Elements were skipped as if each had one byte: the distance in the file is (begin - part.start) · itemsize.",
)
reshard.mistake(
    "without the part's offset",
    {"part.offset + ": ""},
    says="The tensor does not begin where the file does: other things lie in front of it. Add part.offset.",
)
reshard.mistake(
    "equal parts, rounded down",
    {
        "numel * rank // world_size": "numel // world_size * rank",
        "numel * (rank + 1) // world_size": "numel // world_size * (rank + 1)",
    },
    expect="but it holds",
)


@reshard.mistake(
    "the part of the same rank",
    says="Rank r took what rank r had saved. With another number of ranks its elements begin elsewhere.",
)
def same_rank(read, parts, numel, itemsize, rank, world_size):
    mine = [part for part in parts if part.file == rank]
    count = (numel * (rank + 1) // world_size - numel * rank // world_size) * itemsize
    return b"".join(read(p.file, p.offset, min(count, (p.stop - p.start) * itemsize)) for p in mine)


@reshard.mistake("one element at a time", expect="one range per part")
def one_by_one(read, parts, numel, itemsize, rank, world_size):
    first, last = numel * rank // world_size, numel * (rank + 1) // world_size
    places = {i: (p.file, p.offset + (i - p.start) * itemsize) for p in parts for i in range(p.start, p.stop)}
    return b"".join(read(*places[i], itemsize) for i in range(first, last))


@reshard.alternative("into a buffer of the right size")
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


@reshard.alternative("following the tensor from part to part")
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

resume_state = KnownAnswers("resume-state")

for _name, _restores, _says in (
    ("model", 'loop.model.load_state_dict(state["model"])', "weights"),
    ("optimizer", 'loop.optimizer.load_state_dict(state["optimizer"])', "optimizer"),
    ("scheduler", 'loop.scheduler.load_state_dict(state["scheduler"])', "scheduler"),
    ("order", 'vars(loop.order).update(state["order"])', "order of the data"),
    ("torch", 'torch.set_rng_state(state["torch"])', "torch's generator"),
    ("python", 'random.setstate(state["python"])', "Python's generator"),
):
    resume_state.mistake(f"without {_name}", {_restores: "pass"}, expect=_says)


resume_state.mistake(
    "refers to what training changes", {"return copy.deepcopy(state)": "return state"}, expect="Take a copy"
)
resume_state.mistake(
    "trains into the saved state", {"    state = copy.deepcopy(state)\n": ""}, expect="put copies into the loop"
)
resume_state.mistake(
    "the position without the epoch and the seed",
    {"vars(loop.order),": '{"position": loop.order.position},'},
    expect="order of the data",
)
resume_state.mistake(
    "seeds again instead",
    {
        'torch.set_rng_state(state["torch"])': "torch.manual_seed(0)",
        'random.setstate(state["python"])': "random.seed(0)",
    },
    expect="torch's generator, Python's generator",
)
resume_state.mistake("a pickle as numbers", expect="pickled objects, as bytes")(
    (
        lambda loop: torch.frombuffer(bytearray(pickle.dumps(loop.__dict__)), dtype=torch.uint8),
        lambda loop, state: vars(loop).update(pickle.loads(state.numpy().tobytes())),
    )
)
KEPT = {}


def _keep(loop):
    KEPT["state"] = right.capture(loop)
    return {"id": 1}


resume_state.mistake("kept in a global", expect="not in another one")(
    (_keep, lambda loop, state: right.restore(loop, KEPT["state"]))
)
resume_state.mistake("keeps the objects", expect="not only tensors")(
    (lambda loop: {"loop": copy.deepcopy(loop)}, lambda loop, state: vars(loop).update(vars(state["loop"])))
)
resume_state.mistake(
    "an optimizer that the scheduler does not know",
    {
        "loop.optimizer.load": (
            "loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.02)\n    loop.optimizer.load"
        )
    },
    expect="another optimizer than the loop's",
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


resume_state.alternative("in a list of its own")((_as_lists, _from_lists))
