"""Every collective against its definition, against torch.distributed and against an enumeration of its messages."""

import comm_cases
import pytest
import torch
from comm_cases import EVEN, NAMES, ROOTED, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm.comm import launch
from minillm.predict import comms

pytestmark = pytest.mark.drawn(2)

REDUCIBLE = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
SIZES = [0, 1, 2, 3, 5, 7, 8, 12, 17, 64, 97, 257, 1021]
LAYOUTS = ["contiguous", "transposed", "strided", "offset"]


@st.composite
def cases(draw, world_size: int, async_op: bool | None = None) -> Case:
    name = draw(st.sampled_from(NAMES))
    one = st.sampled_from(SIZES).map(lambda n: (n,))
    many = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), min_size=2, max_size=4).map(tuple)
    shape = draw(st.one_of(one, many, st.just(())))
    if name in EVEN:
        shape = (world_size * (shape[0] if shape else 1), *shape[1:])
    reduces = "reduce" in name
    dtype = draw(st.sampled_from(REDUCIBLE if reduces else [*REDUCIBLE, torch.bool, torch.complex64]))
    op = draw(st.sampled_from(["sum", "max", "min", *["avg"] * dtype.is_floating_point])) if reduces else "sum"
    uneven = name.endswith("all_gather") and async_op is None and draw(st.booleans())
    shape = draw(one) if uneven else shape
    layout, asynchronous = draw(st.sampled_from(LAYOUTS)), draw(st.booleans()) if async_op is None else async_op
    root = draw(st.integers(0, world_size - 1)) if name in ROOTED else 0
    ranks_per_node = draw(st.sampled_from(_divisors(world_size)))
    seed = draw(st.integers(0, 99))
    return Case(name, shape, layout, dtype, op, root, ranks_per_node, asynchronous, uneven, seed)


def _divisors(n: int) -> list[int]:
    return [g for g in range(1, n + 1) if n % g == 0]


def drawn(strategy: st.SearchStrategy, count: int) -> list[Case]:
    """`count` examples of a strategy: ranks start once and run them all."""
    found = []

    @settings(max_examples=count, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(strategy)
    def collect(example: Case) -> None:
        found.append(example)

    collect()
    return found


def no_problem(results: list[list[str]]) -> None:
    problems = [problem for rank in results for problem in rank]
    assert not problems, "\n".join(problems[:5])


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4)), 5])
def test_collectives_agree_with_torch(world_size: int) -> None:
    """Values, dtype, shape, in place or not, bytes and messages of a few hundred drawn calls."""
    todo = drawn(cases(world_size), 120)
    todo += [Case("ring_all_reduce", (3_000_001,), "contiguous", torch.float16, seed=3)]  # several segments
    todo += [Case("hierarchical_all_reduce", (1_000_003,), "offset", torch.int64, "max", 0, world_size, seed=4)]
    no_problem(launch(comm_cases.run_cases, world_size, todo))


@pytest.mark.parametrize("world_size", [2, 5])
def test_handles_in_flight_on_three_groups(world_size: int) -> None:
    """Started in one order, waited for in another, different on every rank."""
    alike = [case for case in drawn(cases(1, async_op=True), 300) if case.name not in (*EVEN, *ROOTED)]
    alike += [Case("Group.all_to_all", (60, 2), "transposed", torch.float32, async_op=True, seed=9)] * 3
    no_problem(launch(comm_cases.run_in_flight, world_size, [alike[i : i + 7] for i in range(0, 84, 7)], 5))


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_in_flight(world_size: int) -> None:
    no_problem(launch(comm_cases.run_messages, world_size, 6, 11))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("numel", [0, 1, 7, 64, 1021])
def test_enumeration_agrees_with_prediction(world_size: int, numel: int) -> None:
    """What the ledger is compared with above, against the closed forms of minillm.predict."""
    for name in NAMES:
        if name.startswith("Group.") or (name == "pairwise_all_to_all" and numel % world_size):
            continue
        for root in range(world_size) if name in ROOTED else [0]:
            for g in _divisors(world_size) if name == "hierarchical_all_reduce" else [1]:
                case = Case(name, (numel,), "contiguous", torch.float64, root=root, ranks_per_node=g)
                extra = {"root": root} if name in ROOTED else {}
                extra |= {"ranks_per_node": g} if name == "hierarchical_all_reduce" else {}
                whole = numel * world_size if name == "ring_all_gather" else numel
                cost = getattr(comms, name)(whole, 8, world_size, **extra)
                cost = cost.total if name == "hierarchical_all_reduce" else cost
                sent, messages = comm_cases.sent(case, world_size)
                assert tuple(sent) == cost.sent_per_rank, case
                if numel >= world_size**2 and name.startswith(("ring", "hier", "pairwise")):
                    assert messages == [cost.rounds] * world_size, case
