"""Which of minillm's own checks notices a fault of the museum: computed by planting it and running the check.

    oracle              any layout against one process in float64                     minillm/equivalence
    NCCL's rules        order, waiting, threads of collectives                        tests/engine/comm/nccl_like.py
    mismatch check      ranks that call different operations, and hangs               minillm/comm/diagnostics
    replica check       replicas that hold other bits                                 minillm/train/fault_tolerance
    receipts            calls and bytes of a step, FLOPs of a token; tokens computed, hits, steps of an engine
    one process's log   loss, gradient norm and learning rate of the first steps
    resumed run         a run that loads a checkpoint, bit by bit
    naive loop          greedy tokens, and sampled ones with the request's own numbers
    distribution        sampled tokens of many requests, counted
    empty at the end    no block in use, no seat taken, no request left
    errors              outputs and step records

`notices.json` holds what `python -m tests.course.labs.museum_notices` found; a test finds it again.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from course.lab22_bug_museum import serving_distributions
from course.lab22_bug_museum.exhibit import Exhibit
from course.lab22_bug_museum.exhibits_checkpoint import Resumed
from course.lab22_bug_museum.exhibits_hang import Outcome
from course.lab22_bug_museum.exhibits_trainer import Utilisation
from course.lab22_bug_museum.serving_runs import Served
from course.lab22_bug_museum.training_runs import Oracle, Record, Run, Scene
from course.shared.faults.strategy import PlantedStrategy
from course.shared.table import Table, table
from minillm.comm import Group, HangError, RankError
from minillm.equivalence import ParallelConfig, cases_of, compare
from minillm.measure import Ledger
from minillm.train.strategies.hybrid import make_strategy

TRAINING = (
    "oracle", "NCCL's rules", "mismatch check", "replica check", "receipts", "one process's log", "resumed run",
)  # fmt: skip
SERVING = ("naive loop", "distribution", "receipts", "empty at the end", "errors")
# Checks that notice nothing here, with the reason.
SILENT = {
    "NCCL's rules": "They are about order, waiting and threads; every fault for which they were run keeps all three "
    "and is wrong in a value. `tests/engine/node/planted.py` has faults that break them.",
    "errors": "A silent bug is one that raises nothing.",
}
SEED, LOG_STEPS = 11, 3
FILE = Path(__file__).with_name("notices.json")
Noticed = dict[str, bool]  # checks that were run, and whether they noticed


def noticed(exhibit: Exhibit, on_nccl: Callable[[Exhibit], bool] | None = None) -> Noticed:
    """on_nccl: whether NCCL's rules are broken; that backend belongs to the tests."""
    if exhibit.kind == "serving":
        return of_serving(exhibit.run(exhibit.faults, SEED))
    found = {"oracle": oracle_notices(exhibit), **of_training(exhibit)}
    if on_nccl is not None and _scenes(exhibit):
        found["NCCL's rules"] = on_nccl(exhibit)
    return found


def of_serving(served: Served) -> Noticed:
    """An engine's run beside the sound engine's on the same traffic."""
    sound = served.again_with(())
    found = {"errors": served.errors > 0, "receipts": _other_receipts(served, sound)}
    found["empty at the end"] = served.used > 0 or served.seats > 0 or served.unfinished > 0
    if served.traffic.model is serving_distributions.target():
        greedy = range(serving_distributions.SAMPLED, len(served.traffic.asked))
        found["naive loop"] = sum(served.wrong_of(greedy)) > 0
        found["distribution"] = serving_distributions.follows(served).verdict == "off"
    elif not served.traffic.low_precision:
        found["naive loop"] = sum(served.wrong) > 0
    return found


def of_training(exhibit: Exhibit) -> Noticed:
    try:
        record, *rest = exhibit.runs([(exhibit.faults, SEED), *[((), SEED)] * hasattr(exhibit.run, "many")])
    except (RankError, HangError):
        return {"mismatch check": True}
    found: Noticed = {"mismatch check": isinstance(record, Outcome) and bool(record.error)}
    if isinstance(record, Resumed):
        found["resumed run"] = [step.loss for step in record.went_on] != [step.loss for step in record.resumed]
    elif isinstance(record, Utilisation):
        found["receipts"] = abs(record.implied / record.flops - 1) > 1e-6
    elif not isinstance(record, Outcome):
        pairs = list(zip(_records(record), _records(rest[0]), strict=True))
        found["replica check"] = any(one.drifted() for one, _ in pairs)
        found["receipts"] = any(_traffic(one) != _traffic(sound) for one, sound in pairs)
        found["one process's log"] = any(_other_log(one) for one, _ in pairs)
    return found


def oracle_notices(exhibit: Exhibit) -> bool:
    """By the layouts of the exhibit's proof; where that is no oracle, by those that it trains, or two replicas."""
    try:
        if isinstance(exhibit.proof, Oracle):
            return any(row.verdict == "off" for row in exhibit.proof(exhibit.faults))
        return not all(found.ok for found in _compared(exhibit))
    except (RankError, HangError):
        return True


def breaks_rules(exhibit: Exhibit, make: Callable[[Group, ParallelConfig], Any]) -> bool:
    """Whether the exhibit's layout, on a backend that `make` chooses and that refuses what NCCL does not forgive, ends
    in an error. Wrong numbers do not count: they are the oracle's."""
    try:
        _compared(exhibit, make)
    except (RankError, HangError):
        return True
    return False


def load() -> dict[str, Noticed]:
    """What was found last, by exhibit."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def notices(kind: str, found: Mapping[str, Noticed] | None = None, names: Iterable[str] = ()) -> Table:
    """The table of the exhibits of a kind. names: of these alone."""
    found = load() if found is None else found
    checks = TRAINING if kind == "training" else SERVING
    chosen = [name for name, its in found.items() if ("oracle" in its) == (kind == "training")]
    rows = [
        (name, *(_mark(found[name].get(check)) for check in checks)) for name in chosen if not names or name in names
    ]
    return table(f"which check notices it: {kind}", ("exhibit", *checks), rows)


def unnoticed(found: Mapping[str, Noticed] | None = None) -> list[str]:
    """Exhibits that no check notices."""
    return [name for name, its in (load() if found is None else found).items() if not any(its.values())]


def _mark(value: bool | None) -> str:
    return {True: "notices", False: "no", None: "-"}[value]


def _other_receipts(served: Served, sound: Served) -> bool:
    """What an engine counts: tokens computed and hit, preemptions, copies and the plan of every step; of drafts that
    are sampled, how many were accepted, to five hundredths."""
    if served.traffic.proposer is not None:
        return abs(serving_distributions.acceptance(served) - serving_distributions.acceptance(sound)) > 0.05
    return _receipts(served) != _receipts(sound)


def _receipts(served: Served) -> tuple:
    outputs = [
        None if output is None else (output.computed, output.hit, output.preemptions) for output in served.outputs
    ]
    return outputs, [record.batch for record in served.records], served.copied


def _records(record: Any) -> tuple[Record, ...]:
    return record if isinstance(record, tuple) else (record,)


def _traffic(record: Record) -> list[Counter]:
    return [_bytes(rank.ledger) for rank in record.ranks]


def _bytes(led: Ledger) -> Counter:
    found: Counter = Counter()
    for event in led.events:
        found[event.op, event.group, "calls"] += 1
        found[event.op, event.group, "bytes"] += event.bytes
    return found


def _other_log(record: Record) -> bool:
    pairs = list(zip(record.steps, record.alone.steps, strict=True))
    if any(abs(mine.lr - right.lr) > 1e-9 * right.lr for mine, right in pairs):
        return True
    return any(
        abs(a / b - 1) > 2e-3
        for mine, right in pairs[:LOG_STEPS]
        for a, b in ((mine.loss, right.loss), (mine.grad_norm, right.grad_norm))
    )


def _scenes(exhibit: Exhibit) -> list[Scene]:
    runs = getattr(exhibit.run, "runs", (exhibit.run,))
    return [run.scene for run in runs if isinstance(run, Run)]


def _compared(exhibit: Exhibit, make: Callable = make_strategy) -> list:
    """The oracle on the layouts that the exhibit trains, with its faults planted on every rank."""
    scenes = _scenes(exhibit)
    layouts = [scene.layout for scene in scenes] or [ParallelConfig(dp=2)]
    tied = any(scene.model.tie_embeddings for scene in scenes)

    def cases(layout: ParallelConfig) -> dict:
        known = cases_of(layout)
        name = "tied" if tied and "tied" in known else next(iter(known))
        return {name: known[name]}

    return compare(layouts, cases, steps=2, strategy=PlantedStrategy(exhibit.faults, make))
