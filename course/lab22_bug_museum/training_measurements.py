"""What can be ordered about a training run. Each shows what it found and concludes nothing."""

from dataclasses import replace

from course.kit.receipts import Receipt, Row, receipt, row
from course.lab22_bug_museum.exhibit import Measurement
from course.lab22_bug_museum.training_runs import SMALL, Record
from course.shared.table import Table, table
from minillm.model import MoEConfig

SHOWN = 6
EXPERTS = replace(SMALL, moe=MoEConfig(4, 2, 16))
TIED = replace(SMALL, tie_embeddings=True)


def losses(record: Record) -> Table:
    """The loss of the ranks beside that of one process, every third step."""
    rows = [(str(a.step), a.loss, b.loss) for a, b in zip(record.steps, record.alone.steps, strict=True)]
    return table(f"loss in nats, {record.scene.layout}", ("step", "this run", "one process"), rows[::3] + rows[-1:])


def norms(record: Record) -> Table:
    rows = [(str(a.step), a.grad_norm, b.grad_norm) for a, b in zip(record.steps, record.alone.steps, strict=True)]
    return table("gradient norm before clipping", ("step", "this run", "one process"), rows[::3] + rows[-1:])


def ratios(record: Record) -> Table:
    """Of some parameters in the order of the model, ends included."""
    names = list(record.alone.gradients)
    chosen = names if len(names) <= 2 * SHOWN else [*names[:SHOWN], *names[-SHOWN:]]
    wrong = record.wrong_gradients()
    rows = [(name, record.ratio(name), wrong.get(name, 0.0)) for name in dict.fromkeys([*chosen, *list(wrong)[:3]])]
    return table(
        "gradients of the first step, beside one process's",
        ("parameter", "as a multiple", "relative difference"),
        [(name, f"{ratio:.3f}", f"{error:.3f}" if error else "none") for name, ratio, error in rows],
    )


def traffic(record: Record) -> Table:
    """What rank 0 sent in a step."""
    led = record.ranks[0].ledger
    groups = dict.fromkeys((event.op, event.group) for event in led.events)
    rows = [
        (f"{op} over {group}", len(led.select(op, group)), f"{led.bytes(op, group):,} B") for op, group in groups
    ] or [("nothing", 0, "0 B")]
    return table("what rank 0 sent in the first step", ("operation", "calls", "bytes"), rows)


def replicas(record: Record) -> Receipt:
    drifted = record.drifted()
    rows = [row("parts that several ranks hold", None, record.copies), row("differ between ranks", None, len(drifted))]
    rows += [row(f"    {name}", None, "differs") for name in drifted[:SHOWN]]
    return receipt(f"after {len(record.steps)} steps", rows, open_rows=2 + SHOWN)


def windows(record: Record) -> Table:
    rows = [(f"rank {number}", str(list(rank.windows))) for number, rank in enumerate(record.ranks)]
    return table("windows of the first step", ("rank", "numbers of its windows"), rows)


def schedule(record: Record) -> Table:
    rows = [(str(a.step), a.lr, b.lr) for a, b in zip(record.steps, record.alone.steps, strict=True)]
    return table("learning rate", ("step", "this run", "one process"), rows[::3] + rows[-1:])


LOSSES = Measurement("losses", 3, "the loss of this run and of one process on the same windows", losses)
NORMS = Measurement("gradient-norms", 4, "the norm that every step logs, beside one process's", norms)
RATIOS = Measurement("gradients", 12, "gradients of single parameters, gathered and held to one process's", ratios)
TRAFFIC = Measurement("ledger", 5, "operations and bytes of one step on rank 0", traffic)
REPLICAS = Measurement("replica-check", 6, "a hash of every parameter on every rank after the last step", replicas)
WINDOWS = Measurement("windows", 4, "which windows of the text each rank read in the first step", windows)
SCHEDULE = Measurement("learning-rate", 2, "the learning rate of every step", schedule)
USUAL = (LOSSES, NORMS, RATIOS, TRAFFIC, REPLICAS, WINDOWS, SCHEDULE)


# Rows that exhibits of training share.


def falls(record: Record) -> Row:
    """The symptom of nearly all silent bugs: the loss falls."""
    last = sum(step.loss for step in record.steps[-2:]) / 2
    return row("the loss falls", True, last < record.steps[0].loss - 0.02)


def starts_right(record: Record) -> Row:
    return row("the first loss is one process's", record.alone.steps[0].loss, record.steps[0].loss, "nats", 1e-3)


def gradients_are_right(record: Record) -> Row:
    return row("parameters with another gradient than one process's", 0, len(record.wrong_gradients()))


def norm_is_right(record: Record) -> Row:
    return row("gradient norm of the first step", record.alone.norm, record.ranks[0].norm, "", 2e-3)


def replicas_agree(record: Record) -> Row:
    return row("parameters that differ between ranks", 0, len(record.drifted()))
