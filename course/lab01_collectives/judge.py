"""What the checks of collectives ask, and how they put the answer to a learner.

Values first (a wrong one is traced to its mistake by `diagnose`), then the messages: did they carry the data, how many
bytes did they carry, in how many rounds. Every function either returns rows for the receipt or raises CheckFailed.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from course.kit.exercises import CheckFailed
from course.kit.receipts import Row, row
from course.shared.diagnose import expect_like, forbidding, say_rounded, say_sum, whole_numbers
from course.shared.trials import CollectiveCall, Trial, one_trial, rounds, run, try_on_ranks
from minillm.comm import Group
from minillm.predict import comms

WORLDS = (4, 3, 5, 2, 1)  # in the order in which a mistake is reported
LARGER = (6, 7, 8)  # one of them is drawn, so that no number of ranks can be taken for the largest
Layout = tuple[int, int]  # nodes, ranks per node
LAYOUTS = ((3, 2), (2, 3))  # whose receipt is shown
READY_MADE = [
    (dist, name)
    for name in dir(dist)
    for kind in ("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather", "scatter")
    if name in (kind, f"{kind}_single", f"{kind}_tensor", f"{kind}_into_tensor")
]


def draw_cases(
    arguments: tuple[Any, ...] = (), worlds: Sequence[int] = WORLDS, divisible: bool = True
) -> list[CollectiveCall]:
    """Fresh whole-number inputs for each world size; `divisible`: the length is a multiple of the world size."""
    draw, cases = torch.Generator().manual_seed(random.randrange(2**32)), []
    for world in worlds:
        size = random.randint(3, 9) * (world if divisible else 1)
        cases.append(CollectiveCall([whole_numbers(draw, size) for _ in range(world)], arguments))
    return cases


def draw_larger(
    arguments: tuple[Any, ...] = (), worlds: Sequence[int] = LARGER, divisible: bool = True
) -> list[CollectiveCall]:
    """One case more of a number of ranks that no receipt shows: judged, but without rows. In float64, with fractions
    that float32 would lose and that sums of so few keep."""
    return list(map(_in_float64, draw_cases(arguments, (random.choice(worlds),), divisible)))


def draw_layouts() -> tuple[list[Layout], list[CollectiveCall]]:
    """Nodes and inputs for each: those that the receipt shows, then a drawn corner, with one node or one rank on each,
    and a drawn layout in float64."""
    layouts = [*LAYOUTS, random.choice(((2, 1), (1, 2))), random.choice(((2, 2), (4, 2), (2, 4)))]
    *cases, last = draw_cases(worlds=[nodes * per_node for nodes, per_node in layouts])
    return layouts, [*cases, _in_float64(last)]


def _in_float64(case: CollectiveCall) -> CollectiveCall:
    return CollectiveCall([x.double() + x.flip(0).double() / 2**20 for x in case.inputs], case.arguments)


def try_on_groups(learner: Callable, cases: Sequence[CollectiveCall]) -> list[list[Trial]]:
    """learner(x, group, *arguments) for every case; trials by case and rank."""
    return try_on_ranks(partial(_without_torch, learner), cases)


def _without_torch(learner: Callable, *args: Any) -> Any:
    """The ledger does not see torch's own collectives, so they are refused when they are called."""
    with forbidding(READY_MADE, "you called a collective of torch.distributed: let messages of `group` do the work"):
        return learner(*args)


def who(rank: int, case: CollectiveCall) -> str:
    return f"rank {rank} of {case.world_size}"


def in_place(
    name: str, trial: Trial, before: torch.Tensor, wanted: torch.Tensor, say: Callable[[torch.Tensor], str]
) -> None:
    """CheckFailed unless x became `wanted` (up to rounding of the last digit) and was returned; `say` names the mistake
    behind x."""
    if trial.result is not None:
        expect_like(name, trial.result, wanted, "x itself")
    if not _close(trial.after, wanted):
        if trial.result is not None and _close(trial.result.view_as(wanted), wanted):
            raise CheckFailed(f"{name} returned the right values but did not write them into x (x.copy_ does)")
        changed = "wrong values in x" if not torch.equal(trial.after, before) else "x unchanged"
        if trial.result is None and changed == "x unchanged":
            raise CheckFailed(f"{name} ended with x unchanged and returned nothing: x.copy_ writes a result into x")
        raise CheckFailed(f"{name} ended with {changed}: {say_rounded(trial.after, wanted) or say(trial.after)}")
    if trial.result is None:
        raise CheckFailed(f"{name} returned nothing (None): return x as well")
    if not trial.returned_input:
        raise CheckFailed(f"{name} wrote the right values into x but returned another tensor: return x itself")


def same_bits(case: CollectiveCall, ranks: Sequence[Trial]) -> None:
    """CheckFailed unless all ranks end with equal bits."""
    for rank, trial in enumerate(ranks):
        if not torch.equal(trial.after, ranks[0].after):
            raise CheckFailed(
                f"{who(rank, case)} has other last digits in x than rank 0, so replicas would drift apart: sum and "
                "divide each chunk on one rank, and give all others that result"
            )


def _close(x: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(x, wanted, rtol=1e-6 if wanted.dtype == torch.float32 else 1e-12)


def say_all_reduce(case: CollectiveCall, x: torch.Tensor) -> str:
    """What x holds instead of the sum (case.arguments empty) or the mean."""
    n, total, average = case.world_size, torch.stack(list(case.inputs)).sum(0), bool(case.arguments)
    for share, said in ((n, "the mean"), (n * n, "the mean divided by the number of ranks once more")):
        if not average and torch.allclose(x * share, total):
            return f"it is {said}, but op is 'sum': divide only for op='avg'"
    if average and torch.allclose(x, total):
        return f"it is the sum, {n} times the mean: divide by the number of ranks"
    if average and torch.allclose(x * n * n, total):
        return f"it is the mean divided by {n} once more: divide only once"
    for place in range(n):
        part = x.chunk(n)[place]
        if not torch.allclose(part * (n if average else 1), total.chunk(n)[place]):
            return f"in place {place}, {say_sum(part, case.inputs, place, n)}"
    return "it is not what it should be"


def say_broadcast(case: CollectiveCall, rank: int, x: torch.Tensor) -> str:
    """Whose tensor x is, if not the root's."""
    held = [r for r, given in enumerate(case.inputs) if torch.equal(given, x)]
    if held == [rank]:
        return "nothing arrived: is every place reached, also when the number of ranks is no power of two?"
    if held:
        return f"it holds what rank {held[0]} had: are places counted from the root?"
    return "it holds something that no rank ever had"


def judge_tree(case: CollectiveCall, ranks: Sequence[Trial]) -> list[Row]:
    """Rows for a broadcast; CheckFailed if it takes more messages or rounds than a tree."""
    n, (root,) = case.world_size, case.arguments
    cost = comms.tree_broadcast(case.inputs[0].numel(), case.inputs[0].element_size(), n)
    sent, needed = [trial.messages for trial in ranks], rounds([trial.steps for trial in ranks])
    rows = [
        row(f"bytes in all, {n} ranks, root {root}", cost.total_bytes, sum(trial.bytes for trial in ranks), "B"),
        row(f"rounds, {n} ranks, root {root}", cost.rounds, needed),
    ]
    if sum(sent) > n - 1:
        raise CheckFailed(
            f"right values, but {sum(sent)} messages for {n} ranks where {n - 1} are enough: tell each rank only once",
            rows,
        )
    if rows[0].measured > rows[0].predicted:
        head = f"right values, but {rows[0].measured:,} bytes for {n} ranks where {rows[0].predicted:,} are enough"
        raise CheckFailed(f"{head}: send x as it is", rows)
    if needed > cost.rounds:
        shape = "not the tree yet"
        if sent[root] == n - 1:
            shape = "a star: the root sends every message itself"
        elif n > 5 and max(sent) == 2:
            shape = "a tree of two children each, whose root stops sending after its second message"
        raise CheckFailed(
            f"right values, but {needed} rounds for {n} ranks where {cost.rounds} are enough; this is {shape}. "
            "In every round, let all ranks that have x send it on",
            rows,
        )
    return rows


def try_on_nodes(learner: Callable, layouts: Sequence[Layout], cases: Sequence[CollectiveCall]) -> list[list[Trial]]:
    """learner(x, group, node, across) once per layout; trials by layout and rank."""
    by_rank = run(_on_nodes, max(case.world_size for case in cases), learner, layouts, cases)
    return [[by_rank[rank][index] for rank in range(case.world_size)] for index, case in enumerate(cases)]


def say_two_level(case: CollectiveCall, rank: int, per_node: int, x: torch.Tensor) -> str:
    """What x holds instead of the sum over all nodes."""
    first = rank - rank % per_node
    if torch.equal(x, torch.stack(list(case.inputs[first : first + per_node])).sum(0)):
        return "it is the sum over its own node only: the nodes never met"
    return say_sum(x, case.inputs, 0, 1)


def judge_two_level(layout: Layout, case: CollectiveCall, ranks: Sequence[Trial]) -> list[Row]:
    """Rows for an all-reduce over nodes; CheckFailed if a rank takes more than its share to other nodes."""
    nodes, per_node = layout
    size, itemsize, world = case.inputs[0].numel(), case.inputs[0].element_size(), case.world_size
    cost = comms.hierarchical_all_reduce(size, itemsize, world, per_node)
    crossing = [_crossing(rank, trial, per_node) for rank, trial in enumerate(ranks)]
    inside = [trial.bytes - crosses for trial, crosses in zip(ranks, crossing, strict=True)]
    name, enough = f"{nodes} nodes of {per_node}", max(cost.inter.sent_per_rank)
    least = max(cost.intra.sent_per_rank)  # inside the node more is allowed
    rows = [
        row(f"bytes to other nodes per rank, {name}", enough, max(crossing), "B"),
        row(f"bytes to other nodes in all, {name}", cost.inter.total_bytes, sum(crossing), "B"),
        row(f"bytes inside the node per rank, {name}", least if max(inside) <= least else None, max(inside), "B"),
    ]
    if max(crossing) > enough:
        head = (
            f"right values on {name} ranks, but one rank sends {max(crossing):,} bytes to other nodes where "
            f"{enough:,} are enough"
        )
        idle = [rank for rank, crosses in enumerate(crossing) if not crosses]
        if idle and max(crossing) == max(comms.ring_all_reduce(size, itemsize, world).sent_per_rank):
            raise CheckFailed(f"{head}: that is one flat ring over all ranks. Reduce inside the node first", rows)
        if idle:
            raise CheckFailed(f"{head}, and ranks {idle} send nothing there: let all ranks of a node share", rows)
        raise CheckFailed(f"{head}: take only your own 1/{per_node} across, so reduce-scatter in the node first", rows)
    return [each for each in rows if layout in LAYOUTS or each.verdict == "off"]


def byte_rows(
    cases: Sequence[CollectiveCall], trials: Sequence[Sequence[Trial]], cost: Callable[..., comms.Cost], advice: str
) -> list[Row]:
    """Bytes sent per rank, smallest world first; CheckFailed with `advice` if a rank sends more than predicted."""
    rows, messages = {}, {}
    for case, ranks in zip(cases, trials, strict=True):
        x = case.inputs[0]
        messages[case.world_size] = max(trial.messages for trial in ranks)
        predicted = cost(x.numel(), x.element_size(), case.world_size).sent_per_rank
        most = max(trial.bytes for trial in ranks)
        rows[case.world_size] = row(f"bytes sent per rank, N={case.world_size}", max(predicted), most, "B")
    for n, found in reversed([(n, rows[n]) for n in sorted(rows) if n > 1]):
        if found.measured > found.predicted:
            if found.measured * (n - 1) == found.predicted * n and messages[n] % n == 0:  # P instead of P(N-1)/N
                advice = f"is that one round too many? {n - 1} rounds are enough to pass every chunk on"
            raise CheckFailed(
                f"right values, but a rank sent {found.measured:,} bytes (N={n}) where "
                f"{found.predicted:,} are enough, {found.measured / found.predicted:.2g} times as many: {advice}",
                _shown(rows),
            )
    return _shown(rows)


def _shown(rows: dict[int, Row]) -> list[Row]:
    """Rows by number of ranks, smallest first, without the one that was drawn."""
    return [rows[n] for n in sorted(rows) if n > 1 and n not in LARGER]


def neighbours_only(cases: Sequence[CollectiveCall], trials: Sequence[Sequence[Trial]]) -> None:
    """CheckFailed if a rank sends to another rank than the one before or after it on the ring."""
    for case, ranks in zip(cases, trials, strict=True):
        for rank, trial in enumerate(ranks):
            near = {(rank - 1) % case.world_size, (rank + 1) % case.world_size}
            far = [to for sends, _ in trial.steps for to, _ in sends if to not in near]
            if far:
                raise CheckFailed(
                    f"right values, but {who(rank, case)} sent to rank {far[0]}, which is not its neighbour. This is a "
                    "direct exchange: as many bytes, but every pair of ranks needs a connection, and messages of "
                    "different pairs share links. In a ring, rank r sends to ranks r+1 and r-1 only"
                )


def message_rows(cases: Sequence[CollectiveCall], trials: Sequence[Sequence[Trial]], laps: int = 1) -> list[Row]:
    """Messages and rounds of the largest world; CheckFailed if chunks travel in more than two pieces. No other verdict:
    taking turns is slower, and half of each chunk may go round the other way, but both are correct."""
    for case, ranks in zip(cases, trials, strict=True):
        enough, most = laps * (case.world_size - 1), max(trial.messages for trial in ranks)
        if most > 2 * enough:
            raise CheckFailed(
                f"right values and bytes, but a rank sent {most} messages (N={case.world_size}) where {enough} are "
                "enough: each costs a latency, so cut a chunk into two pieces at most"
            )
    shown = [pair for pair in zip(cases, trials, strict=True) if pair[0].world_size not in LARGER]
    case, ranks = max(shown, key=lambda pair: pair[0].world_size)
    least = laps * (case.world_size - 1)
    sent = max(trial.messages for trial in ranks)
    return [
        row(f"messages per rank, N={case.world_size}", least if sent <= least else None, sent),
        row(f"rounds, N={case.world_size} (at best {least})", None, rounds([t.steps for t in ranks])),
    ]


def say_culprit(name: str, table: dict[int, list[int]], found: Any, answer: int | None) -> str:
    """Why `found` is not the rank that holds up the others."""
    if answer is None:
        said = "the ranks that wait do so in a circle: no single rank is to blame, return None, not"
        return f"in {name}, {table}, {said} {found}"
    if found is None:
        return f"in {name}, {table}, rank {answer} is waited for and waits for nobody: that is the one, not None"
    if isinstance(found, bool) or not isinstance(found, int) or found not in table:
        return f"in {name}, you returned {found!r}, which is none of the ranks {list(table)}"
    if table[found]:
        return f"in {name}, {table}, rank {found} waits itself, for {table[found]}: go on from there"
    return f"in {name}, {table}, rank {found} has finished and nobody waits for it. Pick a rank that others wait for"


def _on_nodes(
    group: Group, learner: Callable, layouts: Sequence[Layout], cases: Sequence[CollectiveCall]
) -> list[Trial | None]:
    """One rank's trials; None where the layout has fewer ranks. Every rank helps to make every group."""
    trials: list[Trial | None] = []
    for (nodes, per_node), case in zip(layouts, cases, strict=True):
        world, rank = nodes * per_node, group.rank
        whole = group.subgroup(range(world), f"{world} ranks")
        node = [group.subgroup(range(i * per_node, (i + 1) * per_node), "node") for i in range(nodes)]
        across = [group.subgroup(range(i, world, per_node), "across") for i in range(per_node)]
        if rank >= world:
            trials.append(None)
            continue
        groups = [whole, node[rank // per_node], across[rank % per_node]]
        call = partial(_call_two_level, learner, *groups)
        trials.append(one_trial(case.inputs[rank].clone(), groups, call))
    return trials


def _call_two_level(learner: Callable, group: Group, node: Group, across: Group, x: torch.Tensor) -> Any:
    return _without_torch(learner, x, group, node, across)


def _crossing(rank: int, trial: Trial, per_node: int) -> int:
    return sum(size for sends, _ in trial.steps for to, size in sends if to // per_node != rank // per_node)
