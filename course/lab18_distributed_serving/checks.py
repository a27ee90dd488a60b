"""Lab 18, an engine over ranks: one token through a cut layer, weights that a rank reads, batches of a pipeline.

checks.py            the decode layer, sharded loading, which batch may start
checks_handover.py   hand-overs with allocation first
checks_split.py      cards divided between prefill and decode
checks_breaks.py     which bug
"""

import random
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab18_distributed_serving import rank_programs
from course.lab18_distributed_serving.pipeline import Trace, play
from course.lab18_distributed_serving.rank_programs import Decoded, Token
from course.lab18_distributed_serving.weights_file import COLUMNS, KV, ROWS, WHOLE, WORDS, WeightsFile
from course.shared.diagnose import expect_tensor
from minillm.predict import comms

# One token through a layer.


@exercise(
    "decode-layer",
    minutes=20,
    difficulty=3,
    hints=(
        "A rank has whole heads, with their keys and values, and whole inner numbers. Where does it hold only a share "
        "of a sum over all of them?",
        "Attention of this rank's heads over its own cached keys, then its columns of o: a share, so one all-reduce. "
        "The MLP's inner numbers, then its columns of down: a share, so the other. Each residual is added after.",
    ),
)
def check_layer(learner: Callable) -> Receipt:
    cases = [Token.draw(world_size) for world_size in (4, 3, 1)]
    rows = []
    for case, ranks in zip(cases, rank_programs.try_cases(learner, cases), strict=True):
        for rank, decoded in enumerate(ranks):
            _judge_rank(case, rank, decoded)
        n, decoded = case.world_size, ranks[0]
        sent = 2 * comms.ring_all_reduce(case.x.numel(), case.x.itemsize, n).sent_per_rank[0]
        rows.append(row(f"{_count(n, 'rank')}, a token: bytes that rank 0 sent", sent, decoded.bytes, "B"))
        if n > 1:
            rows.append(row("    all-reduces", 2, len(decoded.sizes)))
        if rows[-1].verdict == "off" or rows[-2 if n > 1 else -1].verdict == "off":
            raise CheckFailed(
                f"{n} ranks: right values, but rank 0 sent {decoded.bytes:,} B in {decoded.calls or 'no call'}; two "
                f"all-reduces of {case.x.numel()} numbers are {sent:,} B",
                rows,
            )
    return receipt("one token through a cut layer", rows, open_rows=4)


def _judge_rank(case: Token, rank: int, decoded: Decoded) -> None:
    n, who = case.world_size, f"rank {rank} of {case.world_size}"
    if not isinstance(decoded.results, tuple | list) or len(decoded.results) != 3:
        raise CheckFailed(f"{who}: returned {decoded.results!r:.60}; the exercise asks for (y, keys, values)")
    if decoded.changed:
        raise CheckFailed(
            f"{who}: part.{decoded.changed[0]} is another after your call, and the next token reads the same weights: "
            "work on a copy"
        )
    y, keys, values = decoded.results
    right, right_keys, right_values = case.alone
    for name, cached, whole in (("keys", keys, right_keys), ("values", values, right_values)):
        wanted = whole.chunk(n)[rank]
        expect_tensor(f"{who}: {name}", cached, wanted.shape)
        if not (torch.equal(cached[:, :-1], wanted[:, :-1]) and close(cached[:, -1], wanted[:, -1])):
            raise CheckFailed(f"{who}: {name} are not those of before and the new token's behind them", evidence=cached)
    expect_tensor(f"{who}: y", y, right.shape)
    for name, found in (("y", y), ("keys", keys), ("values", values)):
        if found.dtype != right.dtype:
            raise CheckFailed(f"{who}: {name} is {found.dtype}, and x is {right.dtype}")
    if not close(y, right):
        said = "it is not the output of the whole layer"
        if not y.isfinite().all():
            said = "it is not finite: does exp get a score of which the largest was not subtracted?"
        if not decoded.sizes and n > 1:
            said = "nothing was added up, so it holds this rank's heads and inner numbers alone"
        raise CheckFailed(f"{who}: y is wrong: {said}", evidence=y)


def close(one: Tensor, other: Tensor) -> bool:
    """Within what another order of summation explains in float32, in which a softmax may be computed."""
    return bool((one - other).norm() <= 1e-4 * other.norm())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# A rank's own bytes.

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@exercise(
    "sharded-load",
    minutes=15,
    difficulty=2,
    hints=(
        "Say for each kind which rows or columns of the whole this rank holds, before anything is read.",
        "rows, columns: part rank of world_size equal ones. kv: rows of head rank · kv_heads // world_size, of one "
        "head or of kv_heads // world_size of them. words: ⌈rows / world_size⌉ each; what is beyond the end of the "
        "table is not in the file: fill up with zeros.",
    ),
)
def check_load(learner: Callable) -> Receipt:
    rows = []
    cases = [(8, random.choice((1, 2)), 17), (4, 8, None), (4, 2, None), (1, 2, None), (3, 3, None)]
    for (world_size, kv_heads, words), dtype in zip(cases, cycle(DTYPES), strict=False):
        file, cuts = WeightsFile.draw(world_size, kv_heads, dtype, words)
        name, parts = f"{_count(world_size, 'rank')}, {_count(kv_heads, 'kv head')}", []
        for rank in range(world_size):
            file.bytes_read = 0
            found = learner(file, cuts, kv_heads, rank, world_size)
            _judge_load(f"{name}, rank {rank}", file, cuts, kv_heads, rank, world_size, found)
            parts.append(found)
            wanted = file.held_bytes(cuts, kv_heads, rank, world_size)
            if file.bytes_read != wanted:
                raise CheckFailed(
                    f"{name}, rank {rank}: right tensors, but {file.bytes_read:,} B were read from the file, where "
                    f"this rank's own are {wanted:,} B: cut what you ask the file for, not what you got",
                    rows,
                )
        for rank, part in enumerate(parts):
            _judge_load(f"{name}, rank {rank}, after other ranks' calls", file, cuts, kv_heads, rank, world_size, part)
        rows.append(row(f"{name}: bytes that the last rank read", wanted, file.bytes_read, "B"))
    return receipt("weights of a rank", rows)


def _judge_load(who: str, file: WeightsFile, cuts: dict, kv_heads: int, rank: int, n: int, found: Any) -> None:
    if not isinstance(found, dict) or set(found) != set(cuts):
        raise CheckFailed(f"{who}: returned {found!r:.60}; the exercise asks for a dict with the names of cuts")
    for name, kind in cuts.items():
        wanted = file.part(name, kind, kv_heads, rank, n)
        expect_tensor(f"{who}: {name} ({kind})", found[name], wanted.shape)
        if found[name].dtype != wanted.dtype:
            raise CheckFailed(
                f"{who}: {name} ({kind}) is {found[name].dtype}, and the file holds {wanted.dtype}: are the zeros "
                "behind the last word of another type?"
            )
        if not torch.equal(found[name], wanted):
            said = {
                ROWS: "its rows are not this rank's",
                COLUMNS: "its columns are not this rank's",
                WHOLE: "every rank needs all of it",
                KV: "its rows are not those of this rank's kv heads, which several ranks share where there are fewer",
                WORDS: "its rows are not this rank's words, with zeros behind the end of the table",
            }[kind]
            raise CheckFailed(f"{who}: {name} ({kind}) is wrong: {said}", evidence=found[name])


# Batches of a pipeline.


@exercise(
    "next-batch",
    minutes=15,
    difficulty=2,
    hints=(
        "A sequence's next token depends on the one before it, which leaves the last stage. How many sequences should "
        "a batch have, if every stage is to have one?",
        "Nothing if as many batches as stages are in flight. Else, of the sequences in no batch in flight, the first "
        "⌈running / stages⌉.",
    ),
)
def check_next_batch(learner: Callable) -> Receipt:
    for running, in_flight, stages, why in _corners():
        _judge_batch(learner, running, in_flight, stages, why)
    rows = []
    for stages in (2, 4, random.choice((3, 5))):
        for sequences in (stages, 2 * stages + 1, random.randint(1, 4 * stages)):
            lengths = [random.randint(3, 12) for _ in range(sequences)]
            watch = lambda running, flight, n=stages: _judge_batch(learner, running, flight, n, "")  # noqa: E731
            found = play(Trace.draw(lengths), stages, watch)
            if found.tokens != sum(lengths):
                raise CheckFailed(f"{stages} stages: {found.tokens} of {sum(lengths)} tokens were written", rows)
            rows.append(row(f"{stages} stages, {sequences} sequences: tokens", sum(lengths), found.tokens))
    return receipt("batches of a pipeline", rows)


def _corners() -> list[tuple[list[str], list[list[str]], int, str]]:
    names, many = list("abcdefgh"), [f"s{number}" for number in range(1, 102)]
    return [
        (names, [], 2, "half of the sequences go first, so that the second stage has something to do as well"),
        (["e", "f", "g", "h", "a", "b", "c", "d"], [["a", "b", "c", "d"]], 2, ""),
        (many, [["s10"]], 2, "a stage's share is half of them, rounded up, however many they are"),
        (names[:5], [names[:2], names[2:4]], 2, "as many batches as stages are in flight: one more would wait"),
        (names[:3], [names[:1]], 4, ""),
        (names, [[each] for each in names[:6]], 6, "as many batches as stages are in flight: one more would wait"),
        ([], [], 3, "there is nothing to run"),
        (names[:2], [names[:1], names[1:2]], 4, "every sequence is in flight: its next token is not known"),
    ]


def _judge_batch(learner: Callable, running: list, in_flight: list, stages: int, why: str) -> list[str]:
    batch = learner(list(running), [list(each) for each in in_flight], stages)
    shown = running if len(running) <= 24 else f"{len(running)} sequences, {running[0]} to {running[-1]}"
    state = f"{stages} stages, running {shown}, in flight {in_flight}"
    if not isinstance(batch, list | tuple):
        raise CheckFailed(f"returned {batch!r:.60}; the exercise asks for a list of sequences")
    batch = list(batch)
    busy = {name for each in in_flight for name in each}
    if caught := [name for name in batch if name in busy]:
        raise CheckFailed(
            f"{state}: {caught[0]} starts, but its newest token is still in the pipeline: nobody knows the input of "
            "its next pass",
            evidence=batch,
        )
    if batch and len(in_flight) >= stages:
        raise CheckFailed(f"{state}: {batch} starts, but as many batches as stages are in flight", evidence=batch)
    ready = [name for name in running if name not in busy]
    most = -(-len(running) // stages)
    wanted = ready[:most] if len(in_flight) < stages else []
    if ready and not batch and wanted:
        raise CheckFailed(
            f"{state}: nothing starts, and the first stage idles though {ready[0]} could run", evidence=batch
        )
    if len(batch) > most:
        raise CheckFailed(
            f"{state}: {len(batch)} sequences in one batch: at most {most}, or other stages have nothing to do",
            evidence=batch,
        )
    if batch != wanted:
        said = why or "those that have waited longest go first, as many as a stage's share"
        got = f"{batch} starts, and {wanted} should"
        if len(running) > 24:
            got = f"{len(batch)} start, {batch[:2]} first, and {len(wanted)} should, {wanted[:2]} first"
        raise CheckFailed(f"{state}: {got}: {said}", evidence=batch)
    return batch
