"""Which layouts the oracle compares: one of every axis by hand, and as many over all axes as are drawn from a seed."""

import contextlib
import random
from collections.abc import Iterator

from minillm.equivalence import CONTEXT_CASES, EVEN_EXPERT_CASES, SPLIT_CASES, Case, ParallelConfig, cases_of
from minillm.parallel.context_parallel import CONTEXTS
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from minillm.train.parallel_config import AXES as ORDER

AXES = ("dp_replicate", "dp", "pp", "cp", "tp")
Drawn = dict[ParallelConfig, dict[str, Case]]

DP, CP, EP = {"dp": 2, "accumulate": 2}, {"cp": 2, "pad": True}, {"dp": 2, "ep": 2}

# (layout, corner on the CPU's backend, corner under the rules of NCCL). To hold another layout, add a line.
ONE_PER_AXIS: list[tuple[ParallelConfig, str, str]] = [
    (ParallelConfig(**DP), "unequal", "plain"),
    (ParallelConfig(**DP, zero=1), "frozen tied", "clipped"),
    (ParallelConfig(dp=2, zero=2, accumulate=3), "unequal", "frozen tied"),
    (ParallelConfig(**DP, zero=3), "clipped", "frozen"),
    # More ranks than some tensors have elements.
    *((ParallelConfig(dp=3, zero=zero, accumulate=3), "size 1", "tied") for zero in range(4)),
    (ParallelConfig(dp=4, zero=3, dp_replicate=2, accumulate=2), "frozen tied", "unequal"),
    (ParallelConfig(tp=2), "frozen tied", "clipped"),
    (ParallelConfig(tp=2, sequence=True, accumulate=2), "tied", "unequal"),
    (ParallelConfig(tp=4, sequence=True), "clipped", "tied"),
    (ParallelConfig(pp=2, accumulate=1, schedule="gpipe"), "tied", "clipped"),
    (ParallelConfig(pp=2, accumulate=5, schedule="1f1b"), "frozen tied", "unequal"),
    (ParallelConfig(pp=2, accumulate=4, schedule="interleaved"), "unequal", "tied"),
    (ParallelConfig(pp=2, accumulate=2, schedule="zero_bubble"), "clipped", "frozen tied"),
    (ParallelConfig(pp=2, accumulate=4, schedule="zero_bubble_v"), "frozen tied", "plain"),
    (ParallelConfig(pp=2, accumulate=5, schedule="dualpipe"), "tied", "unequal"),
    (ParallelConfig(pp=4, accumulate=4), "unequal", "tied"),
    (ParallelConfig(**CP, context="ring"), "padded documents", "unequal"),
    (ParallelConfig(**CP, context="zigzag"), "documents", "padded"),
    (ParallelConfig(**CP, context="ulysses"), "windowed documents", "frozen tied"),
    (ParallelConfig(**CP, context="hybrid"), "unequal", "padded documents"),
    (ParallelConfig(**CP, context="gather"), "clipped", "windowed documents"),
    # Two ranks are neighbours on both sides: only four show which way a ring turns.
    (ParallelConfig(cp=4, pad=True, context="zigzag"), "frozen tied", "documents"),
    (ParallelConfig(cp=4, pad=True, context="hybrid"), "padded documents", "tied"),
    (ParallelConfig(**EP), "shared", "few tokens"),
    (ParallelConfig(**EP, zero=1), "capacity", "one expert"),
    (ParallelConfig(**EP, zero=2, accumulate=2), "one expert", "frozen experts"),
    (ParallelConfig(**EP, zero=3), "frozen experts", "clipped experts"),
    (ParallelConfig(dp=4, ep=2), "experts", "capacity"),  # experts have copies
    (ParallelConfig(dp=4, ep=4, ep_nodes=2), "few tokens", "shared"),
    # Routers that see whole sequences: losses and drops, experts that choose.
    (ParallelConfig(cp=2, context="zigzag"), "capacity", "experts choose"),
    (ParallelConfig(cp=2, context="gather"), "experts choose", "capacity"),
]

# Copies of a tied embedding on several stages once differed in their last bits. With three replicas a ring's sums
# depend on the order in which it adds, which differs along a bucket.
FAILED_ONCE: Drawn = {
    ParallelConfig(dp=3, pp=2, accumulate=2, zero=3): {"tied": CONTEXT_CASES["tied"]},
    ParallelConfig(dp=3, pp=2, accumulate=4, schedule="dualpipe"): {"tied": SPLIT_CASES["tied"]},
    ParallelConfig(dp=3, pp=2, accumulate=4, schedule="dualpipe", zero=1): {"tied": SPLIT_CASES["tied"]},
    ParallelConfig(cp=4, pp=2, accumulate=4, zero=3, pad=True): {"tied": CONTEXT_CASES["tied"]},
    # The command left out experts that see even sequences.
    ParallelConfig(**EP, tp=2, sequence=True, accumulate=2): {"shared": EVEN_EXPERT_CASES["shared"]},
}


def one_per_axis(which: int) -> Drawn:
    """The list by hand with its corners for one backend: 0 the CPU's, 1 that with the rules of NCCL."""
    chosen = {}
    for layout, *corners in ONE_PER_AXIS:
        name = corners[which]
        has_experts = layout.cp > 1 and not layout.pad
        chosen[layout] = {name: (EVEN_EXPERT_CASES if has_experts else cases_of(layout))[name]}
    return chosen


def draw(seed: int, count: int, sizes: tuple[int, ...]) -> Drawn:
    """`count` layouts, of `sizes` ranks in turn, each with a corner. Those of one size stand together.

    Of some at random it takes the one with most pairs of choices that no earlier one has, so that few layouts put
    every axis, schedule and corner beside every other.
    """
    rng, chosen, seen = random.Random(seed), {}, set()
    while len(chosen) < count:
        options = [_draw_one(rng, sizes[len(chosen) % len(sizes)]) for _ in range(4)]
        layout, corner = max(options, key=lambda option: len(_pairs(*option) - seen))
        case = cases_of(layout)[corner]
        with contextlib.suppress(ValueError):  # the model cannot be cut so
            layout.check(case.config, case.batch.tokens.shape[1])
            chosen[layout] = {corner: case}
            seen |= _pairs(layout, corner)
    return dict(sorted(chosen.items(), key=lambda pair: (pair[0].world_size, *pair[0].axes.values())))


def _draw_one(rng: random.Random, ranks: int) -> tuple[ParallelConfig, str]:
    """Draws again until the fields fit together."""
    while True:
        with contextlib.suppress(ValueError):
            layout = ParallelConfig(**_fields(rng, ranks))
            return layout, rng.choice(sorted(cases_of(layout)))


def _fields(rng: random.Random, ranks: int) -> dict[str, object]:
    sizes = dict.fromkeys(AXES, 1)
    factors = list(_prime_factors(ranks))
    for axis, factor in zip(rng.choice([rng.sample, rng.choices])(AXES, k=len(factors)), factors, strict=True):
        sizes[axis] *= factor
    shard, replicate = sizes.pop("dp"), sizes.pop("dp_replicate")
    ep = rng.choice(_divisors(shard))
    return {
        **sizes,
        "dp": shard * replicate,
        "dp_replicate": replicate,
        "ep": ep,
        "ep_nodes": rng.choice(_divisors(ep)),
        "zero": rng.randrange(4),
        "accumulate": rng.choice([1, 2, 3, 4, 8]),
        "schedule": rng.choice(sorted(SCHEDULES)) if sizes["pp"] > 1 else "1f1b",
        "context": rng.choice(CONTEXTS) if sizes["cp"] > 1 else "zigzag",
        "node": rng.choice(_divisors(sizes["cp"])),
        "sequence": sizes["tp"] > 1 and rng.random() < 0.5,
        "pad": sizes["cp"] > 1,
        "axis_order": tuple(rng.sample(ORDER, len(ORDER))),
    }


def _pairs(layout: ParallelConfig, corner: str) -> set[frozenset]:
    """Any two things that the layout puts beside each other."""
    fields = ("zero", "accumulate", "schedule", "context", "sequence", "dp_replicate", "ep", "ep_nodes", *ORDER)
    plain = ParallelConfig()
    values = [(name, getattr(layout, name)) for name in fields if getattr(layout, name) != getattr(plain, name)]
    values += [("zero", 0)] * (layout.zero == 0) + [("1f1b", 1)] * (layout.pp > 1 and layout.schedule == "1f1b")
    values += [("zigzag", 1)] * (layout.cp > 1 and layout.context == "zigzag") + [("corner", corner)]
    return {frozenset((a, b)) for a in values for b in values}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _prime_factors(number: int) -> Iterator[int]:
    for factor in range(2, number + 1):
        while number % factor == 0:
            yield factor
            number //= factor
