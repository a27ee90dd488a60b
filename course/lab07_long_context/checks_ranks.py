"""Lab 07, on several ranks: who holds which positions, keys and values in a ring, heads exchanged for sequence.

Rings are held to their bytes, to whom they send, and to computing while a message is under way.
"""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab07_long_context.rank_programs import RingCase, RingRecord, run_exchange, run_ring
from course.shared.diagnose import expect_like, expect_tensor, whole_numbers
from course.shared.trials import run
from minillm.model import dense
from minillm.predict.training import context

DIM = 4


@exercise(
    "zigzag-order",
    minutes=10,
    difficulty=2,
    hints=(
        "Which part of the sequence has as little work as the last part has much? A rank can hold both.",
        "Cut the sequence into 2N parts. Their work rises evenly from the first to the last, so part i and part 2N-1-i "
        "together are the same for every i.",
    ),
)
def check_order(learner: Callable) -> Receipt:
    rows = []
    for n, size in ((4, random.randint(2, 5)), (3, random.randint(2, 5)), (1, 3), (8, random.randint(1, 4))):
        seq = 2 * n * size
        held = [_positions(learner(seq, rank, n), seq, f"rank {rank} of {n}, {seq} positions") for rank in range(n)]
        work = [sum(p + 1 for p in positions) for positions in held]
        _judge_order(held, work, seq, n)
        rows.append(row(f"{n} ranks: keys seen by each rank's queries", seq * (seq + 1) // 2 // n, max(work)))
    return receipt("positions by rank", rows)


def _positions(found: Any, seq: int, where: str) -> list[int]:
    try:
        positions = [int(p) for p in found]
    except (TypeError, ValueError) as error:
        raise CheckFailed(
            f"{where}: you returned {found!r:.60}; the exercise asks for positions, in a list or a tensor"
        ) from error
    if bad := [p for p in positions if not 0 <= p < seq]:
        raise CheckFailed(f"{where}: there is no position {bad[0]}", evidence=positions)
    return positions


def _judge_order(held: Sequence[list[int]], work: Sequence[int], seq: int, n: int) -> None:
    everything = sorted(p for positions in held for p in positions)
    if everything != list(range(seq)):
        lost = sorted(set(range(seq)) - set(everything))
        twice = sorted({p for p in everything if everything.count(p) > 1})
        what = f"nobody holds {lost[0]}" if lost else f"more than one rank holds {twice[0]}"
        raise CheckFailed(f"{n} ranks, {seq} positions: {what}", evidence=held)
    if len(set(work)) > 1:
        raise CheckFailed(
            f"{n} ranks, {seq} positions: their queries see {list(work)} keys, and the layer is done when the last "
            "rank is",
            evidence=held,
        )
    for rank, positions in enumerate(held):
        stretches = 1 + sum(b - a != 1 for a, b in pairwise(positions))
        if stretches > 2 or positions != sorted(positions):
            raise CheckFailed(
                f"rank {rank} of {n} holds {positions}: equal work, but the exercise asks for at most two stretches, "
                "ascending",
                evidence=held,
            )


@exercise(
    "ring-attention",
    minutes=25,
    difficulty=4,
    hints=(
        "In each step you hold one block: attend to it, and meanwhile pass it on. How often does it have to move until "
        "everybody has seen everything?",
        "For each of N steps: unless it is the last, post exchange(send=(block, right), recv=(arriving, left), "
        "async_op=True) first; attend to the block you hold, which began at rank (rank - step) % N; merge; then wait, "
        "and go on with what has arrived.",
        "block = torch.stack((k, v)) travels as one message. arriving = torch.empty_like(block), new in every step. "
        "part, part_lse = attend(q, *block, (rank - step) % n); out, lse = (part, part_lse) if step == 0 else "
        "merge(out, lse, part, part_lse); work.wait(); block = arriving.",
    ),
)
def check_ring(learner: Callable) -> Receipt:
    cases = [_case(4, "zigzag"), _case(4, "contiguous"), _case(3, "zigzag"), _case(1, "contiguous")]
    ranks = run(run_ring, 4, learner, cases)
    rows = []
    for index, case in enumerate(cases):
        found = [ranks[rank][index] for rank in range(case.world_size)]
        rows += _judge_ring(case, found)
    return receipt("keys and values in a ring", rows)


def _case(n: int, order: str) -> RingCase:
    seq = 2 * n * random.randint(2, 4)
    positions = [torch.cat([torch.arange(*span) for span in context.spans(seq, rank, n, order)]) for rank in range(n)]
    return RingCase(*torch.randn(3, seq, DIM, dtype=torch.float64), positions)


def _judge_ring(case: RingCase, found: Sequence[RingRecord]) -> list:
    n, right = case.world_size, dense(case.q[None, None], case.k[None, None], case.v[None, None])[0, 0]
    if ready := sorted(set().union(*(did.calls for did in found)) - {"exchange", "send", "recv"}):
        raise CheckFailed(f"you called {', '.join(ready)}: here blocks travel from neighbour to neighbour")
    for rank, did in enumerate(found):
        name, wanted = f"rank {rank} of {n}", right[case.positions[rank]]
        expect_like(name, did.result, wanted, "its output [seq / N, head_dim]")
        expect_tensor(f"{name}: the output", did.result, wanted.shape)
        if strange := [source for source in did.attended if source not in range(n)]:
            raise CheckFailed(
                f"{name} attends to the block of rank {strange[0]}: ranks are 0 to {n - 1}, so take it modulo N"
            )
        if did.raced:
            raise CheckFailed(f"{name} {did.raced}")
        if len(did.attended) != len(set(did.attended)):
            raise CheckFailed(f"{name} attends to the blocks {list(did.attended)}: each is needed once")
        if not torch.allclose(did.result, wanted, rtol=1e-9, atol=1e-9):
            raise CheckFailed(f"{name} has a wrong output", evidence=[each.result for each in found])
    if n == 1:
        return [row("one rank: messages", 0, len(found[0].peers))]
    block, held = 2 * case.k[case.positions[0]].nbytes, max(did.held for did in found)
    everything = n > 3 and held >= (n - 1) * block  # of three ranks' two received blocks both may be in use
    sent, hidden = max(did.bytes for did in found), min(did.hidden for did in found)
    rows = [
        row(f"bytes sent per rank, N={n}: (N-1) blocks", (n - 1) * block, sent, "B"),
        row("    blocks attended to while a message was under way", n - 1, hidden),
        row("    all received blocks held at once", False, everything),
    ]
    strangers = [(rank, to) for rank, did in enumerate(found) for to in did.peers if to != (rank + 1) % n]
    leftwards = [(rank, to) for rank, did in enumerate(found) for to in did.peers if to != (rank - 1) % n]
    if strangers and leftwards:
        rank, to = strangers[0]
        raise CheckFailed(
            f"right, but rank {rank} of {n} sends to rank {to}: in a ring all send to one neighbour", rows
        )
    if sent > (n - 1) * block:
        raise CheckFailed(
            f"right, but a rank sends {sent:,} bytes where {n - 1} blocks of {block:,} are enough: after the last step "
            "nobody needs a block any more",
            rows,
        )
    if hidden < n - 1:
        raise CheckFailed(
            f"right, but {hidden} of {n} blocks were attended to while a message was under way, where {n - 1} can be: "
            "post the exchange before you attend, with async_op=True, and wait afterwards",
            rows,
        )
    if everything:
        raise CheckFailed(
            f"right, but a rank holds {held / block:g} received blocks at once, as a gather would: two are enough, the "
            "one at work and the one that arrives. Let go of the others, and of their handles",
            rows,
        )
    return rows


@exercise(
    "ulysses-exchange",
    minutes=15,
    difficulty=3,
    hints=(
        "all_to_all cuts dimension 0 into N parts. Which dimension has to be cut for each of the two ways, and what "
        "does dimension 0 of the result count?",
        "To heads: heads lie in front, so x can go as it is; what comes back are N parts, one per rank, each [heads / "
        "N, seq / N, d], which have to stand side by side along the sequence. To sequence: cut the sequence into N "
        "parts, bring that dimension to the front, and what comes back are groups of heads in order.",
    ),
)
def check_exchange(learner: tuple[Callable, Callable]) -> Receipt:
    cases = [_parts(4, 8), _parts(4, 4), _parts(3, 6), _parts(1, 2)]
    ranks = run(run_exchange, 4, learner, cases)
    rows = []
    for index, case in enumerate(cases):
        found = [ranks[rank][index] for rank in range(len(case))]
        rows += _judge_exchange(case, found)
    return receipt("heads for sequence, and back", rows)


def _parts(n: int, heads: int) -> list[Tensor]:
    seq, draw = random.randint(2, 4), torch.Generator().manual_seed(random.randrange(2**32))
    return [whole_numbers(draw, heads, seq, DIM) for _ in range(n)]


def _judge_exchange(case: Sequence[Tensor], found: Sequence[Sequence[RingRecord]]) -> list:
    n, groups = len(case), torch.cat(list(case), 1).chunk(len(case), 0)
    for rank, dids in enumerate(found):
        for name, did, wanted in zip(("to_heads", "to_sequence"), dids, (groups[rank], case[rank]), strict=True):
            expect_like(f"{name}, rank {rank} of {n}", did.result, wanted, f"a tensor {list(wanted.shape)}")
            if did.result.shape != wanted.shape:
                shape = list(did.result.shape)
                raise CheckFailed(
                    f"{name}, rank {rank} of {n}: shape {shape}, the exercise asks for {list(wanted.shape)}"
                )
            if not torch.equal(did.result, wanted):
                if torch.allclose(did.result, wanted, rtol=1e-2):
                    raise CheckFailed(f"{name}, rank {rank} of {n}: numbers are rounded on their way: keep x's dtype")
                raise CheckFailed(
                    f"{name}, rank {rank} of {n}: right numbers in wrong places, or others' numbers",
                    evidence=[each.result for each in dids],
                )
    needed = case[0].nbytes * (n - 1) // n
    sent = max(did.bytes for dids in found for did in dids)
    rows = [row(f"bytes sent per rank and exchange, N={n}: x · (N-1)/N", needed, sent, "B")]
    if sent > needed:
        raise CheckFailed(
            f"right, but a rank sends {sent:,} bytes where {needed:,} are enough (N={n}): each rank needs 1/N of your "
            "heads",
            rows,
        )
    return rows
