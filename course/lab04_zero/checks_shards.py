"""Lab 04, ZeRO: what else a step does with shards: clip by the norm of all of them, save them whole, offload them."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, row
from course.lab04_zero import rank_programs
from course.lab04_zero.rank_programs import Flat, Stream
from course.shared import sharding
from course.shared.diagnose import expect_like, expect_number
from course.shared.sharding import RankRecord
from course.shared.trials import run
from minillm.predict import comms

CHUNKS = "is every chunk treated once, the last and shorter one too, with its own gradient?"
FORMULA = (
    "compare each line with Adam's: m = b1·m + (1 - b1)·g, v = b2·v + (1 - b2)·g², both stored; then "
    "weights -= lr · m/(1 - b1^step) / (√(v/(1 - b2^step)) + eps)"
)

# What they are held to.


@exercise(
    "clip-across-shards",
    changes=("gradient",),
    minutes=10,
    difficulty=2,
    hints=(
        "The norm of the whole gradient is the root of a sum of squares. Which part of that sum can each rank know?",
        "Add up the squares of your real elements (what follows element numel of the flat gradient is padding and "
        "can be anything), all-reduce that one number, take the root, scale by min(1, max_norm / norm).",
    ),
)
def check_clip(learner: Callable) -> Receipt:
    cases = [_draw_flat(4, share=0.4), _draw_flat(3, share=0.4), _draw_flat(4, share=2.0), _draw_flat(4, numel=5)]
    cases += [_draw_flat(4, numel=17, garbage=math.nan), _draw_flat(2, share=0.3, dtype=torch.float64)]
    cases += [Flat(torch.zeros(12), 11, 4, 1.0), Flat(1e-8 * torch.randn(12), 12, 4, 1.0)]
    broken = {value: _draw_flat(4, share=0.4) for value in ("inf", "-inf", "nan")}
    for value, case in broken.items():
        case.padded[random.randrange(case.numel)] = float(value)
    everything = [*cases, *broken.values()]
    trials = sharding.by_case(run(rank_programs.run_clip, 4, learner, everything), everything)
    for case, ranks in zip(cases, trials, strict=False):
        _judge_clip(case, ranks)
    finite = 0
    for value, ranks in zip(broken, trials[-len(broken) :], strict=True):
        found = [float(did.results[0]) for did in ranks]
        finite += sum(map(math.isfinite, found))
        if finite:
            raise CheckFailed(
                f"one element of the gradient is {value}, and the ranks find the norms {found}: none may be finite, so "
                "that all skip the step"
            )
    rows = []
    for case, ranks in zip(cases[:2], trials, strict=False):
        n, calls = case.world_size, ranks[0].calls
        sent = sum(did.bytes[0] for did in ranks)
        rows += [
            row(f"numbers in the largest collective of a rank, N={n}", None, max(did.held["numbers"] for did in ranks)),
            row("    collectives", None, sum(calls.values())),
            row("    bytes sent by all ranks", None, sent, "B"),
        ]
        if "gather_objects" in calls:
            raise CheckFailed(
                "right norm, but gather_objects pickles, and nobody counts its bytes: all_reduce a tensor"
            )
        if sent > 4 * comms.ring_all_reduce(1, 8, n).total_bytes:  # a flag beside the sum, or a largest element first
            raise CheckFailed(
                f"right norm, but {sent:,} bytes for it on {n} ranks ({', '.join(calls)}): a shard's sum of squares is "
                "one number, and nothing else has to travel",
                rows,
            )
    rows.append(row(f"one element {', '.join(broken)}: ranks with a finite norm", 0, finite))
    return Receipt("one norm, N shards", tuple(rows))


def _draw_flat(
    world: int, share: float = 1.0, numel: int = 0, garbage: float = 100.0, dtype: torch.dtype = torch.float32
) -> Flat:
    """A flat gradient with `garbage` for padding, and max_norm = share of its norm."""
    numel = numel or world * random.randint(10, 20) + random.randint(1, world - 1)
    padded = torch.randn(numel + -numel % world, dtype=dtype)
    padded[numel:] = garbage
    return Flat(padded, numel, world, share * padded[:numel].norm().item())


def _judge_clip(case: Flat, ranks: Sequence[RankRecord]) -> None:
    n, norm, everything = case.world_size, case.padded[: case.numel].norm().item(), case.padded.norm().item()
    locals_ = []
    for rank in range(n):
        locals_.append(case.shard(rank)[: max(0, case.numel - rank * (len(case.padded) // n))].norm().item())
    slips = {
        "the padding is in it: the last rank's shard is longer than its share of the gradient": everything,
        "norms do not add up, their squares do": sum(locals_),
        "the root is missing": norm**2,
        "the squares are averaged over the ranks, not added": norm / math.sqrt(n),
        "that is the norm after scaling": min(norm, case.max_norm),
    }
    for rank, did in enumerate(ranks):
        name, found = f"rank {rank} of {n}", did.results[0]
        if not isinstance(found, Tensor | Real):
            raise CheckFailed(f"{name} returned {found!r}; the exercise asks for the norm of the whole gradient")
        found = float(found)
        if not abs(found - norm) <= 1e-4 * norm:  # NaN too
            said = [text for text, value in slips.items() if abs(found - value) <= 1e-4 * value]
            if abs(found - locals_[rank]) <= 1e-4 * locals_[rank]:
                said = ["that is its own shard's norm; the ranks have to add up their squares"]
            if math.isnan(found):
                said = ["the padding holds NaN here, and NaN times 0 is NaN: cut the padding off"]
            raise CheckFailed(
                f"{name} finds the norm {found:.4f}, but the whole gradient of {case.numel} elements has {norm:.4f}"
                + (f": {said[0]}" if said else "")
            )
    factor = min(1.0, case.max_norm / norm) if norm else 1.0
    for rank, did in enumerate(ranks):
        first = rank * len(did.results[1])
        after, before = (x[: max(0, case.numel - first)] for x in (did.results[1], case.shard(rank)))
        if not norm and after.any():
            raise CheckFailed(f"{case.numel} zeros become {after.tolist()} on rank {rank} of {n}: that is 0 / 0")
        if not torch.allclose(after, factor * before, rtol=1e-3, atol=1e-6):
            raise CheckFailed(
                f"rank {rank} of {n} has the right norm {norm:.3f}, but max_norm={case.max_norm:.3f} asks to multiply "
                f"the shard by {factor:.3f}" + (", in place" if torch.equal(after, before) else "")
            )


@exercise(
    "whole-state",
    minutes=5,
    difficulty=1,
    hints=(
        "If rank 0 saved what its optimizer holds, how much of Adam's state would be in the file?",
        "All-gather each moment and cut off the padding. `step` is one number, the same on every rank.",
    ),
)
def check_whole_state(learner: Callable) -> Receipt:
    cases = [_draw_flat(4), _draw_flat(3), _draw_flat(4, numel=5), _draw_flat(2, numel=14, dtype=torch.float64)]
    trials = sharding.by_case(run(rank_programs.run_whole_state, 4, learner, cases), cases)
    rows = []
    for case, ranks in zip(cases, trials, strict=True):
        n, each = case.world_size, case.padded.itemsize
        for rank, did in enumerate(ranks):
            resumed = _resume(case, did.results, f"rank {rank} of {n}")
        enough = 2 * comms.ring_all_gather(len(case.padded), each, n).sent_per_rank[0]
        sent = max(did.bytes[0] for did in ranks)
        if used := {"gather_objects"} & set(ranks[0].calls):
            raise CheckFailed(f"you called {', '.join(used)}: it pickles, for a few small things; all_gather tensors")
        rows += [
            row(f"elements of each moment saved, N={n}", case.numel, len(ranks[0].results["exp_avg"])),
            row("    one process resumes from it as if it had never been sharded", True, resumed),
            row("    bytes sent per rank: two moments gathered", enough, sent, "B"),
        ]
    return Receipt("Adam's state, whole again", tuple(rows))


def _resume(case: Flat, state: Any, name: str) -> bool:
    """Whether one process goes on from `state` as if it had made all steps itself; CheckFailed with the reason."""
    weight = nn.Parameter(case.padded[: case.numel].clone())
    adam = sharding.make_adam([weight])
    gradient = weight.detach().sin()
    for step in range(3):
        weight.grad = gradient * (step + 1)
        adam.step()
    own = adam.state[weight]
    if not isinstance(state, dict) or set(state) != set(own):
        raise CheckFailed(f"{name} returned {state!r:.60}; the exercise asks for a dict with {', '.join(own)}")
    for key, wanted in own.items():
        found, what = state[key], f"{name}: {key}"
        if key == "step":
            if expect_number(found, "a step that is the number which came in") != wanted:
                raise CheckFailed(f"{what} is {float(found):g}, not {wanted:g}: it counts steps, on every rank alike")
            continue
        if isinstance(found, Tensor) and found.numel() != case.numel:
            size, shard = found.numel(), len(case.padded) // case.world_size
            said = f"1/{case.world_size} of it, this rank's shard only" if size == shard else "gather whole shards"
            raise CheckFailed(
                f"{what} has {size} elements where the model has {case.numel}: "
                + ("cut off the padding" if size > case.numel else said)
            )
        expect_like(what, found, wanted, "the moment of all elements")
        if found.shape != wanted.shape:
            raise CheckFailed(f"{what} has the shape {list(found.shape)}; the exercise asks for {list(wanted.shape)}")
        if not torch.allclose(found, wanted, rtol=1e-5):
            raise CheckFailed(f"{what} is not that of one process: is it this moment, with the shards in rank order?")
    return True


@exercise(
    "offload-adam",
    changes=("weights",),
    minutes=15,
    difficulty=2,
    hints=(
        "Adam treats every element alone, so it does not need all moments at the same time.",
        "For each chunk: read its two moments, update them with the chunk's gradient, write them back, then move the "
        "weights. `step` counts from 1 and corrects the bias of both moments.",
    ),
)
def check_stream(learner: Callable) -> Receipt:
    chunk = random.randint(24, 40)
    case = _draw_stream(2, 3, chunk, 8 * chunk + random.randint(1, chunk - 1))
    rates = dict(lr=random.uniform(0.02, 0.05), betas=(random.uniform(0.7, 0.85), 0.97), eps=0.01)
    sizes = (2, 9, 45), (1, 20, 20), (2, 50, random.randint(8, 20))  # chunks that divide it, and one larger than it
    cases = [case, *(replace(_draw_stream(world, 2, chunk, size), **rates) for world, chunk, size in sizes)]
    trials = sharding.by_case(run(rank_programs.run_stream, 2, learner, cases), cases)
    for each, ranks in zip(cases, trials, strict=True):
        for rank, did in enumerate(ranks):
            _judge_stream(each, rank, did)
    rows = [row for each, ranks in zip(cases, trials, strict=True) for row in _judge_memory(each, ranks)]
    return Receipt("Adam with its moments in files", tuple(rows))


def _draw_stream(world: int, steps: int, chunk: int, size: int) -> Stream:
    drawn = torch.randn(1 + steps, world, size)
    return Stream(list(drawn[0]), [list(ranks) for ranks in drawn[1:]], chunk)


def _judge_memory(case: Stream, ranks: Sequence[RankRecord]) -> list[Row]:
    """The rows of a case; CheckFailed unless all moments came from the store, a chunk at a time."""
    steps, size = len(case.gradients), len(case.weights[0])
    once, limit = 2 * 4 * size * steps, 4 * 4 * case.chunk
    read, written, most = (max(did.held[key] for did in ranks) for key in ("read", "written", "moments"))
    rows = [
        row(f"bytes read in {steps} steps: two moments of {size} elements", once, read, "B"),
        row("    bytes written", once, written, "B"),
        row("    moments in memory, at most 4 chunks", True, most <= limit),
        row("    bytes of them at the fullest moment", None, most, "B"),
        row("    bytes sent to other ranks", 0, sum(did.bytes[0] for did in ranks), "B"),
    ]
    if most > limit:
        raise CheckFailed(
            f"right weights, but {most:,} bytes of moments lie in memory at once, where chunks of {case.chunk} "
            f"elements take {2 * 4 * case.chunk:,}: read, use and write one chunk before the next",
            rows,
        )
    if read < once or written < once:
        raise CheckFailed(
            f"right weights, but only {read:,} bytes were read and {written:,} written where two moments take "
            f"{once:,}: they are kept somewhere else, in memory",
            rows,
        )
    return rows


def _judge_stream(case: Stream, rank: int, did: RankRecord) -> None:
    gradients = [ranks[rank] for ranks in case.gradients]
    wanted = _adam(case, rank, gradients)
    slips = {
        "the bias correction is missing: divide the moments by 1 - beta**step": _adam(
            case, rank, gradients, corrected=False
        ),
        "the moments begin at zero in every step: write them back": _adam(case, rank, gradients, keep=False),
    }
    for step, (found, right) in enumerate(zip(did.results, wanted, strict=True)):
        if torch.allclose(found, right, rtol=1e-4, atol=1e-5):
            continue
        said = [text for text, run in slips.items() if _all_close(did.results, run)]
        if torch.equal(found, case.weights[rank]):
            said = ["nothing moved: change the weights in place"]
        first = next(i for i in range(len(found)) if not torch.isclose(found[i], right[i], rtol=1e-4, atol=1e-5))
        raise CheckFailed(
            f"rank {rank}: wrong weights after step {step + 1}, from element {first} on: "
            + (said[0] if said else CHUNKS if first else FORMULA)
        )


def _all_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.allclose(*both, rtol=1e-4, atol=1e-5) for both in zip(found, wanted, strict=True))


def _adam(
    case: Stream, rank: int, gradients: Sequence[Tensor], corrected: bool = True, keep: bool = True
) -> list[Tensor]:
    """Adam in one go (Kingma & Ba 2015), and two ways to get it wrong."""
    (b1, b2), weights, found = case.betas, case.weights[rank].clone(), []
    m, v = torch.zeros_like(weights), torch.zeros_like(weights)
    for step, g in enumerate(gradients, start=1):
        m, v = (x if keep else torch.zeros_like(x) for x in (m, v))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        by = [1 - beta**step if corrected else 1.0 for beta in (b1, b2)]
        weights -= case.lr * (m / by[0]) / ((v / by[1]).sqrt() + case.eps)
        found.append(weights.clone())
    return found
