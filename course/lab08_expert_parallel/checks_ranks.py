"""Lab 08, on several ranks: rows that travel to their experts and back, and the average of their gradients.

An exchange is held to its values and to its bytes: rows that nobody needs must not travel. Gradients are compared with
one process that has all tokens and all experts, in float64, and with the groups over which they may be summed.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab08_expert_parallel.rank_programs import (
    Averaged,
    ExchangeRecord,
    Layer,
    Rows,
    one_process,
    run_exchange,
    run_gradients,
)
from course.shared.diagnose import expect_tensor, whole_numbers
from course.shared.trials import run
from minillm.predict import comms
from minillm.predict.training import moe

HIDDEN, RANKS = 4, 4


@exercise(
    "tokens-to-experts",
    minutes=20,
    difficulty=4,
    hints=(
        "Before any row can be received, its rank has to know how many come, from whom and for which of its experts. "
        "That is one small all-to-all of the counts.",
        "received = group.all_to_all(counts) as a table [from, own expert]. Rows to each rank: sums over its experts; "
        "rows from each rank: sums over a row of the table. What arrives is sorted by source, then by expert: sort it "
        "by expert, stably, and keep that order to undo it.",
    ),
)
def check_exchange(learner: tuple[Callable, Callable]) -> Receipt:
    tokens = 8
    cases = [
        _case(4, 8, [random.randint(3, 9) for _ in range(4)], "random"),
        _case(4, 8, [tokens] * 4, "each as often"),
        _case(3, 6, [5, 0, 7], "random"),
        _case(4, 4, [3, 5, 2, 4], "one expert"),
        _case(1, 3, [4], "random"),
        _case(2, 4, [60, 45], "random", hidden=random.choice((3, 5, 7)), dtype=torch.float64),  # an unstable sort shows
    ]
    alone = _case(4, 8, [tokens] * 4, "one expert")
    # Rank 0's counts are those of cases[1], and what it gets is not: a plan belongs to its call.
    cases.append(Rows(8, [cases[1].chosen[0], *alone.chosen[1:]], alone.values))
    ranks = run(run_exchange, RANKS, learner, cases)
    rows = []
    for index, case in enumerate(cases):
        found = [ranks[rank][index] for rank in range(case.world_size)]
        rows += _judge_exchange(case, found)
    even = [ranks[rank][1] for rank in range(RANKS)]
    due = moe.all_to_all_bytes(tokens, 1, HIDDEN, 4, RANKS)
    rows.insert(0, row("all experts equally often: sent each way, T·k·h·b·(N-1)/N", (due, due), even[0].payload, "B"))
    return receipt("rows to their experts and back", rows)


def _case(
    n: int,
    num_experts: int,
    sizes: Sequence[int],
    routing: str,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.float32,
) -> Rows:
    """Rows of whole numbers; in float64 with fractions that float32 would lose."""
    draw = torch.Generator().manual_seed(random.randrange(2**32))
    chosen = []
    for size in sizes:
        every = range(num_experts)
        ids = random.choices(every, k=size) if routing == "random" else [num_experts // 2] * size
        chosen.append(sorted([place % num_experts for place in range(size)] if routing == "each as often" else ids))
    values = [whole_numbers(draw, size, hidden).to(dtype) for size in sizes]
    if dtype == torch.float64:
        values = [each + each.flip(0) / 2**20 for each in values]
    return Rows(num_experts, chosen, values)


def _judge_exchange(case: Rows, found: Sequence[ExchangeRecord]) -> list:
    n, each = case.world_size, case.num_experts // case.world_size
    evidence = [[did.rows.tolist(), did.counts, did.home.tolist()] for did in found]
    for rank, did in enumerate(found):
        name, own = f"rank {rank} of {n}", range(each * rank, each * (rank + 1))
        picked = [
            values[place]
            for expert in own
            for ids, values in zip(case.chosen, case.values, strict=True)
            for place, chosen in enumerate(ids)
            if chosen == expert
        ]
        right = torch.stack(picked) if picked else case.values[rank][:0]
        loads = [sum(ids.count(expert) for ids in case.chosen) for expert in own]
        _expect(f"{name}: to_experts", did.rows, right, evidence, "the rows of its experts, by expert, then by source")
        if did.counts != loads:
            raise CheckFailed(f"{name}: its experts have {loads} rows, your counts say otherwise", evidence=evidence)
    for rank, did in enumerate(found):
        ids = torch.tensor(case.chosen[rank], dtype=case.values[rank].dtype)
        right = case.values[rank] + 1e5 * ids[:, None]
        _expect(
            f"rank {rank} of {n}: from_experts", did.home, right, evidence, "its own rows, in the order it had them"
        )
    return _judge_bytes(case, found)


def _expect(name: str, mine: Tensor, right: Tensor, evidence: list, asked: str) -> None:
    if mine.shape != right.shape or mine.dtype != right.dtype:
        kinds = [f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (mine, right)]
        raise CheckFailed(f"{name} gave {kinds[0]}, where {kinds[1]} belong", evidence=evidence)
    if not torch.equal(mine, right):
        held = sorted(mine.tolist()) == sorted(right.tolist())
        what = "the right rows in a wrong order" if held else "rows that are not those"
        raise CheckFailed(f"{name} gave {what}; the exercise asks for {asked}", evidence=evidence)


def _judge_bytes(case: Rows, found: Sequence[ExchangeRecord]) -> list:
    n, each, values = case.world_size, case.num_experts // case.world_size, case.values[0]
    row_bytes = values.element_size() * values.shape[1]
    table = [[sum(expert // each == to for expert in ids) for to in range(n)] for ids in case.chosen]
    there = moe.all_to_all(table, row_bytes).sent_per_rank
    back = moe.all_to_all(list(map(list, zip(*table, strict=True))), row_bytes).sent_per_rank
    rows = []
    for rank, did in enumerate(found):
        due = (there[rank], back[rank])
        name = f"{sum(map(sum, table))} rows on {n} ranks, rank {rank}"
        rows.append(row(f"{name}: sent there and back", due, did.payload, "B"))
        if sum(did.payload) > sum(due):
            raise CheckFailed(
                f"right, but rank {rank} of {n} sends {sum(did.payload):,} bytes of rows where {sum(due):,} are "
                "enough: only rows that another rank's expert needs have to travel, without padding",
                rows,
            )
        # A table of all counts, summed over all ranks, and an expert's number beside each row that leaves.
        room = 16 * case.num_experts * (n - 1) + 8 * (sum(table[rank]) - table[rank][rank])
        if did.beside > room:
            raise CheckFailed(
                f"right, but rank {rank} of {n} sends {did.beside:,} bytes of whole numbers; "
                f"{8 * case.num_experts * (n - 1):,} are enough (an int64 per expert, to every other rank)",
                rows,
            )
    return rows


# Gradients.


@exercise(
    "expert-gradients",
    changes=("experts", "router"),
    minutes=15,
    difficulty=4,
    hints=(
        "Whose tokens has the gradient of an expert on this rank already seen, before anything is reduced?",
        "The tokens of all ranks of its expert group: their rows came here, and so did the gradients of each rank's "
        "own mean. What is missing are the other replicas' tokens. What is it to be divided by, so that every token "
        "of the batch counts 1 / all tokens?",
        "Each rank's loss is a mean over its own tokens, so a sum over all ranks is data.world_size times the mean: "
        "return data.all_reduce(router) / data.world_size, replicas.all_reduce(experts) / data.world_size.",
    ),
)
def check_gradients(learner: Callable) -> Receipt:
    num_experts, hidden = random.choice((8, 12)), random.randint(3, 24)
    cases = [_layer(ep, num_experts, hidden) for ep in (1, 2, 4)]
    # Two batches side by side: neither is shared by all ranks that there are.
    cases += [_layer(2, num_experts, hidden, ranks=range(at, at + 2), dtype=torch.float32) for at in (0, 2)]
    ranks = run(run_gradients, RANKS, learner, cases)
    rows = []
    for index, case in enumerate(cases):
        judged = _judge_gradients(case, [rank[index] for rank in ranks if rank[index] is not None])
        rows += judged if len(case.tokens) == RANKS else []
    return receipt("4 ranks against one process", rows)


def _layer(
    ep: int, num_experts: int, hidden: int, ranks: range = range(RANKS), dtype: torch.dtype = torch.float64
) -> Layer:
    draw = lambda *shape: torch.randn(*shape, dtype=dtype)  # noqa: E731
    router, experts = draw(num_experts, hidden), draw(num_experts, hidden, hidden)
    tokens, targets = ([draw(5, hidden) for _ in ranks] for _ in range(2))
    return Layer(ep, router, experts, tokens, targets, ranks.start)


def _judge_gradients(case: Layer, found: Sequence[Averaged]) -> list:
    of_router, of_experts = one_process(case)
    each = len(of_experts) // case.ep
    evidence = [[did.router.tolist(), did.experts.tolist()] for did in found]
    worst, close = (
        0.0,
        {"rtol": 1e-9, "atol": 1e-12} if of_router.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5},
    )
    for rank, did in enumerate(found):
        own = of_experts[each * (rank % case.ep) :][:each]
        for name, mine, wanted in (("router", did.router, of_router), ("experts", did.experts, own)):
            where = f"ep {case.ep}, rank {rank} of {len(found)}: the gradient of the {name}"
            expect_tensor(where, mine, wanted.shape)
            if mine.dtype != wanted.dtype:
                raise CheckFailed(f"{where} is {mine.dtype}, where you were given {wanted.dtype}: keep its dtype")
            if not torch.allclose(mine, wanted, **close):
                raise CheckFailed(f"{where} is not that of one process{_times(mine, wanted, close)}", evidence=evidence)
            worst = max(worst, (mine - wanted).abs().max().item())
    if any(did.pickled or not did.sent["data"] for did in found):
        raise CheckFailed(
            f"right, but for ep {case.ep} the gradients did not all travel in collectives of `data` and `replicas`: "
            "gather_objects pickles what it sends, and calls beside the groups are not counted"
        )
    due = comms.ring_all_reduce(of_router.numel(), of_router.element_size(), len(found)).sent_per_rank[0]
    sent = found[0].sent
    rows = [
        row(f"ep {case.ep}: router and experts differ from one process by less than 1e-12", True, worst < 1e-12),
        row("    sent over all ranks, over the replicas", None, (sent["data"], sent["replicas"]), "B"),
    ]
    if sent["data"] > due + of_experts.nbytes:  # room for another way to reduce the router
        raise CheckFailed(
            f"right, but ep {case.ep} sends {sent['data']:,} bytes over all ranks where the router takes {due:,}: "
            "gradients of experts are of use to their replicas alone",
            rows,
        )
    return rows


def _times(mine: Tensor, wanted: Tensor, close: dict[str, float]) -> str:
    """ ", but 2 times as large", if one factor explains it."""
    factor = (mine * wanted).sum() / wanted.square().sum()
    if torch.allclose(mine, factor * wanted, **close):
        return f", but {factor:g} times as large"
    return ""
