"""Stop 05: a transformer cut over 4 ranks: collectives, bytes, gradients of one process; what goes wrong silently."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from course.lab05_tensor_parallel import experiments as steps
from course.lab05_tensor_parallel import experiments_breaks as breaks
from course.lab05_tensor_parallel import experiments_links as links
from course.lab05_tensor_parallel.experiments import FORMS, MODEL, SEQ, Setup
from minillm.comm import Group, launch
from minillm.labkit.receipts import Row, row
from minillm.predict import tensor as predict

WORLD = 4
DEEPER = replace(MODEL, num_layers=MODEL.num_layers + 1)
COLLECTIVES = {  # of one layer: forward, backward
    "tensor": ("2 all_reduce", "2 all_reduce"),
    "sequence": ("2 all_gather, 2 reduce_scatter", "2 all_gather, 2 reduce_scatter"),
    "regather": ("2 all_gather, 2 reduce_scatter", "4 all_gather, 2 reduce_scatter"),
}
LAYERS = {  # alone: forward, backward
    "column layer": ("none", "1 all_reduce"),
    "row layer": ("1 all_reduce", "none"),
    "norm on 1/t of the tokens": ("none", "none"),
}


def rows() -> Iterator[Row]:
    """Everything of this stop is counted, nothing timed."""
    setups = [Setup(WORLD, form, config=config) for form in FORMS for config in (MODEL, DEEPER)]
    setups += [Setup(WORLD, form, exact=True) for form in ("tensor", "sequence")] + [Setup(1, exact=True)]
    ranks = launch(_everything, WORLD, setups, device="cpu")
    found = {s: [rank["steps"][i] for rank in ranks[: s.world_size]] for i, s in enumerate(setups)}
    yield from _layers(found)
    yield from _step(found)
    yield from _alone(ranks[0])
    yield from _accidents(ranks)


def _everything(group: Group, setups: list[Setup]) -> dict[str, Any]:
    return {
        "steps": steps.step_all(group, setups),
        "single": steps.single_layers(group),
        "pairs": links.pairs(group),
        "accidents": breaks.all_accidents(group, steps=2),
    }


def _layers(found: dict[Setup, list[steps.Found]]) -> Iterator[Row]:
    for form, name in FORMS.items():
        setup = Setup(WORLD, form)
        one, more = found[setup][0], found[Setup(WORLD, form, config=DEEPER)][0]
        forward, backward = COLLECTIVES[form]
        yield row(f"{name}, one layer: forward", forward, steps.listed(more.forward.calls - one.forward.calls))
        yield row("    backward", backward, steps.listed(more.backward.calls - one.backward.calls))
        yield row("    sent per rank", steps.layer_bytes(setup), more.sent - one.sent, "B")
        yield row("    kept for backward", steps.layer_activation_bytes(setup), more.activation - one.activation, "B")


def _step(found: dict[Setup, list[steps.Found]]) -> Iterator[Row]:
    setup = Setup(WORLD)
    yield row("weights per rank", steps.parameter_bytes(setup), found[setup][0].parameter, "B")
    yield row("sent per rank and step", steps.step_bytes(setup), found[setup][0].sent, "B")
    (alone,) = found[Setup(1, exact=True)]
    for form in ("tensor", "sequence"):
        setup = Setup(WORLD, form, exact=True)
        yield row(f"{FORMS[form]}, float64: loss of one process", alone.loss, found[setup][0].loss, "", 1e-12)
        error = steps.gradient_error(setup, found[setup], alone)
        yield row("    gradients of one process (below 1e-10)", True, error < 1e-10)
        yield row("    all-reduces of norm gradients", int(setup.sequence), found[setup][0].sums.calls.total())
    small = sum(event[1] for event in found[Setup(WORLD)][0].forward.shapes.items() if event[0][1][-1] == 1)
    yield row("all-reduces of the loss", 2, small)
    tokens = Setup(WORLD).tokens
    sent = steps.step_bytes(Setup(WORLD), "loss") / tokens
    yield row(f"    bytes per token, {tokens // SEQ} rows", predict.loss_bytes_per_token(WORLD), sent, "B")


def _alone(rank: dict[str, Any]) -> Iterator[Row]:
    for name, (forward, backward) in LAYERS.items():
        yield row(f"{name}: forward", forward, rank["single"][name][0])
        yield row("    backward", backward, rank["single"][name][1])
    (paired, _), (gathered, _) = rank["pairs"]["paired"], rank["pairs"]["gathered"]
    extra = int(predict.unpaired_bytes(1, 32, 64, 4, WORLD))
    yield row("column, row with a gather between: bytes more, forward", extra, gathered - paired, "B")


def _accidents(ranks: list[dict[str, Any]]) -> Iterator[Row]:
    norms = [rank["accidents"]["norms"] for rank in ranks]
    yield row("norm replicas apart, gradients summed", 0.0, max(rank["summed"]["apart"] for rank in norms))
    yield row("    forgotten: they drift", True, max(rank["forgotten"]["apart"] for rank in norms) > 1e-3)
    rows_added = ranks[0]["accidents"]["embedding"]
    yield row(
        "embedding not masked: another loss", True, abs(rows_added["masked"][0] - rows_added["unmasked"][0]) > 1e-4
    )
    ways = ranks[0]["accidents"]["norm"]
    naive = (ways["whole"] ** 2 + (WORLD - 1) * ways["replicated"] ** 2) ** 0.5
    yield row("gradient norm, replicated parameters counted t times", naive, ways["naive"], "", 1e-9)


CLAIMS = (rows,)
