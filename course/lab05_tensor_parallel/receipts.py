"""Lab 05's claims, each once: the notebook prints them, the tour and the tests run `CLAIMS`.

Every function yields the rows of its receipt; without arguments it measures for itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from course.kit.receipts import Row, formula, row, titled
from course.lab05_tensor_parallel import experiments as steps
from course.lab05_tensor_parallel import experiments_breaks
from course.lab05_tensor_parallel import experiments_links as links
from course.lab05_tensor_parallel import experiments_torch as torch_peers
from course.lab05_tensor_parallel.experiments import FORMS, MODEL, SEQ, Setup, StepRecord
from course.lab05_tensor_parallel.figures import layer_seconds
from course.shared.table import Table, seconds, table
from minillm.comm import Group, launch
from minillm.predict import comms
from minillm.predict.training import tensor as predict

WORLD = 4
DEEPER = replace(MODEL, num_layers=MODEL.num_layers + 1)
GPT3 = {"batch": 1, "seq": 2048, "hidden": 12288, "heads": 96}
COLLECTIVES = {  # of one layer, forward + backward
    "tensor": "2 all_reduce + 2 all_reduce",
    "sequence": "2 all_gather, 2 reduce_scatter + 2 all_gather, 2 reduce_scatter",
    "regather": "2 all_gather, 2 reduce_scatter + 4 all_gather, 2 reduce_scatter",
}
LAYERS = {  # alone: forward + backward
    "column layer": "none + 1 all_reduce",
    "row layer": "1 all_reduce + none",
    "norm on 1/t of the tokens": "none + none",
}
EXACT = [Setup(n, form, exact=True) for n, form in ((1, "tensor"), (2, "tensor"), *((WORLD, form) for form in FORMS))]


@cache
def _measured() -> list[dict[str, Any]]:
    """What 4 ranks count, all of it in one launch. Nothing is timed."""
    return launch(_everything, WORLD, _setups(), device="cpu")


def _setups() -> list[Setup]:
    return [Setup(WORLD, form, config=config) for form in FORMS for config in (MODEL, DEEPER)] + EXACT


def _everything(group: Group, setups: list[Setup]) -> dict[str, Any]:
    return {
        "steps": steps.step_all(group, setups),
        "single": steps.single_layers(group),
        "pairs": links.pairs(group),
        "accidents": experiments_breaks.all_accidents(group, steps=2),
    }


def _steps() -> dict[Setup, list[StepRecord]]:
    ranks = _measured()
    return {s: [rank["steps"][i] for rank in ranks[: s.world_size]] for i, s in enumerate(_setups())}


def _accidents(name: str) -> list[Any]:
    return [rank["accidents"][name] for rank in _measured()]


def _lines() -> dict[Setup, dict[str, Any]]:
    found = _steps()
    pairs = [(Setup(WORLD, form), Setup(WORLD, form, config=DEEPER)) for form in FORMS]
    return {one: steps.one_more(found[one][0], found[more][0]) for one, more in pairs}


@titled("GPT-3, tensor parallelism over 8 GPUs: formulas", open_rows=1)
def gpt3_traffic(guess_gb: float) -> Iterator[Row]:
    per_step = [96 * predict.layer_bytes(batch, 2048, 12288, 2, 8) / 1e9 for batch in (32, 64)]
    yield formula("sent per GPU and step: 4·L·2(t-1)/t·BSH·b", per_step[0], "GB", guess=guess_gb)
    yield formula("    one activation [32, 2048, 12288] in 16 bits", 32 * 2048 * 12288 * 2 / 1e9, "GB")
    yield formula("    for 64 sequences", per_step[1], "GB")
    yield formula("data parallelism over 8 GPUs, whatever the batch", 2 * 7 / 8 * 350, "GB")


@titled("your pieces on 4 ranks; predicted: one process")
def trained(ours: Sequence[float], alone: Sequence[float]) -> Iterator[Row]:
    yield row(f"loss of step {len(ours)}", alone[-1], ours[-1], tolerance=1e-4)


@titled(f"one layer, {4 * SEQ} tokens, 4 ranks: forward + backward", open_rows=2)
def layers(lines: dict[Setup, dict[str, Any]] | None = None) -> Iterator[Row]:
    """What one layer does on 4 ranks, in three forms."""
    lines = {setup: line for setup, line in (lines or _lines()).items() if setup.world_size == WORLD}
    sent = tuple(line["sent"] for line in lines.values())
    names = ", ".join(FORMS[setup.form] for setup in lines)
    yield row(f"sent per rank: {names}", tuple(map(steps.layer_bytes, lines)), sent, "B")
    for setup, line in lines.items():
        calls = f"{steps.listed(line['forward'])} + {steps.listed(line['backward'])}"
        yield row(f"{FORMS[setup.form]}: collectives", COLLECTIVES[setup.form], calls)
        yield row("    kept for backward", steps.layer_activation_bytes(setup), line["activation"], "B")


def gpt3_activations() -> Table:
    """What one layer of GPT-3 keeps for backward, with stored attention scores (5as/h) and without."""
    ways = {
        "one GPU: sbh(34 + 5as/h)": {},
        "TP over 8: sbh(10 + 24/t + 5as/(ht))": {"world_size": 8},
        "    and sequence parallelism: sbh(34 + 5as/h)/t": {"world_size": 8, "sequence": True},
    }
    kept = (GPT3, GPT3 | {"heads": 0})  # 0: no scores are kept
    lines = [
        (name, *(f"{predict.activation_bytes(**each, **way) / 1e9:.2f} GB" for each in kept))
        for name, way in ways.items()
    ]
    return table("activations of one layer of GPT-3; formula", ("", "scores stored", "FlashAttention"), lines)


@titled(f"a step of {MODEL.num_layers} layers", open_rows=1)
def step(setups: dict[str, Setup] | None = None, found: dict[Setup, list[StepRecord]] | None = None) -> Iterator[Row]:
    setups, found = setups or {"4 ranks": Setup(WORLD)}, found or _steps()
    names, records = ", ".join(setups), [found[setup][0] for setup in setups.values()]
    due, sent = tuple(map(steps.step_bytes, setups.values())), tuple(record.sent for record in records)
    yield row(f"sent per rank and step: {names}", due, sent, "B")
    due, held = tuple(map(steps.parameter_bytes, setups.values())), tuple(record.parameter for record in records)
    yield row("    weights per rank", due, held, "B")
    first, activation = found[Setup(WORLD)][0], (Setup(WORLD).rows, SEQ, MODEL.hidden_size)
    due = 2 * MODEL.num_layers + 1
    calls = tuple(way.shapes["all_reduce", activation] for way in (first.forward, first.backward))
    yield row("all-reduces forward: 2L and the embedding's; backward: 2L and the head's", (due, due), calls)


@titled("the loss", open_rows=1)
def loss(found: StepRecord | None = None) -> Iterator[Row]:
    """The collectives of the loss, per token."""
    found = found or _steps()[Setup(WORLD)][0]
    setup = Setup(WORLD)
    activation = (setup.rows, SEQ, MODEL.hidden_size)
    small = sum(math.prod(shape) * n for (_, shape), n in found.forward.shapes.items() if shape != activation)
    yield row("numbers per token: maximum, sum, target's logit", 3, small / setup.tokens)
    sent = steps.step_bytes(setup, "loss") / setup.tokens
    yield row("bytes sent per token and rank", predict.loss_bytes_per_token(WORLD), sent, "B")
    gathered = tuple(predict.gathered_logits_bytes_per_token(vocab, WORLD) for vocab in (MODEL.vocab_size, 128_000))
    yield formula("    gathering the logits would send, V = 256 and 128,000", gathered, "B")


@titled("gradients in float64", open_rows=1)
def float64(found: dict[Setup, list[StepRecord]] | None = None) -> Iterator[Row]:
    found = found or _steps()
    alone = found[EXACT[0]][0]
    for setup in EXACT[1:]:
        ranks, name = found[setup], f"{FORMS[setup.form]}, t={setup.world_size}"
        error = steps.gradient_error(setup, ranks, alone)
        yield row(f"{name}: every gradient of one process (1e-10)", True, error < 1e-10)
    yield row("collectives for norm gradients, last form", 1, found[EXACT[-1]][0].sums.calls.total())


@titled("one layer on 4 ranks, by form")
def single_layers(found: dict[str, tuple[str, str]] | None = None) -> Iterator[Row]:
    found = found or _measured()[0]["single"]
    for name, due in LAYERS.items():
        yield row(f"{name}: forward + backward", due, " + ".join(found[name]))


@titled("emulated products and link", open_rows=3)
def overlap(backward: dict[str, dict[str, Any]], forward: dict[int, tuple[float, float]]) -> Iterator[Row]:
    for pieces, (predicted, measured) in forward.items():
        name = f"forward of a row layer in {pieces} piece{'s' * (pieces > 1)}"
        yield row(name, predicted, measured, "s", tolerance=0.3, noisy=True)
    for name, n in backward.items():
        yield row(
            f"backward of 4 column layers: {name}", n["predicted_s"], n["measured_s"], "s", tolerance=0.3, noisy=True
        )


@titled("some steps with sequence parallelism on 4 ranks", open_rows=1, show="last loss")
def norm_gradients(found: Sequence[dict[str, Any]] | None = None) -> Iterator[Row]:
    found = found or _accidents("norms")
    for name in ("forgotten", "summed"):
        apart = max(rank[name]["apart"] for rank in found)
        yield row(f"{name}: norm weights furthest from rank 0's", 0.0 if name == "summed" else None, apart)
    last = tuple(found[0][name]["losses"][-1] for name in ("summed", "forgotten"))
    yield row("last loss: summed, forgotten", None, last)
    yield row("a rank's own gradient of the last norm: cosine with the sum", None, found[1]["forgotten"]["cosine"])


@titled("the vocabulary's rows on 4 ranks", open_rows=2)
def unmasked(found: dict[str, Any] | None = None) -> Iterator[Row]:
    found = found or _accidents("embedding")[0]
    masked, wrong = found["masked"], found["unmasked"]
    yield row("relative error of the embeddings", None, found["relative error"])
    yield row(f"loss after {len(masked)} steps: masked, not masked", None, (masked[-1], wrong[-1]))
    yield row("first loss: masked, not masked", None, (masked[0], wrong[0]))


@titled("gradient norm on 4 ranks", open_rows=2)
def grad_norm(ways: Sequence[dict[str, float]] | None = None) -> Iterator[Row]:
    ways = ways or _accidents("norm")
    whole, copies = ways[0]["whole"], ways[0]["replicated"]
    yield row("by every rank's own parts", None, tuple(way["local"] for way in ways))
    yield row("every parameter once; all squares added", None, (whole, ways[0]["naive"]))
    one_process = sum(way["local"] ** 2 - way["replicated"] ** 2 for way in ways) + copies**2
    yield row("    every parameter once: that of one process", one_process**0.5, whole, "", 1e-9)
    naive = (whole**2 + (WORLD - 1) * copies**2) ** 0.5
    yield row("    all squares added: √(norm² + (t-1)·replicated²)", naive, ways[0]["naive"], "", 1e-9)


@titled("this MLP on 4 ranks", open_rows=1, show="gradient of x")
def bug_hunt(found: dict[str, list[float]]) -> Iterator[Row]:
    for name, errors in found.items():
        yield row(f"{name}: relative error, by rank", None, tuple(errors))


@titled("yours")
def without_the_bug(found: dict[str, list[float]]) -> Iterator[Row]:
    yield row("output and all gradients: largest relative error", None, max(map(max, found.values())))


@titled("column, GELU, row on 4 ranks")
def unpaired(found: dict[str, tuple[int, int]] | None = None) -> Iterator[Row]:
    found = found or _measured()[0]["pairs"]
    reduce = comms.ring_all_reduce(32 * 16, 4, WORLD).sent_per_rank[0]
    extra = int(predict.unpaired_bytes(1, 32, 64, 4, WORLD))
    yield row("paired: forward, backward", (reduce, reduce), found["paired"], "B")
    yield row("gathered in between: one all-gather of [BS, f] more", (reduce + extra,) * 2, found["gathered"], "B")


@titled("slow link, 2 ranks")
def slow_link(found: dict[str, Any]) -> Iterator[Row]:
    first, *_, last = (line for line in found["rows"] if line["kind"] == "tensor")
    slopes = [(last[key] - first[key]) / (last["tokens"] - first["tokens"]) for key in ("predicted_s", "measured_s")]
    yield row("tensor parallel: what each further token adds to a step", *slopes, "s", tolerance=0.4, noisy=True)
    yield formula("tokens at which both would send the same", links.equal_tokens(MODEL))


@titled(f"sent per rank and step, {torch_peers.ROWS * SEQ} tokens, 2 ranks", open_rows=1, show="itself|sequence")
def peers(found: dict[str, dict[str, Any]]) -> Iterator[Row]:
    ours = found[torch_peers.OURS]
    yield row("minillm: by the ledger", steps.step_bytes(Setup(2, rows=torch_peers.ROWS)), ours["ledger"], "B")
    for name, peer in found.items():
        due = torch_peers.predicted_bytes(name, 2)
        yield row(f"{name}: on the wire", due, peer["wire"], "B", tolerance=0.1, noisy=True)
    same = max(abs(peer["loss"] / ours["loss"] - 1) for peer in found.values()) < 1e-5
    yield row("every plan has minillm's loss", True, same)


def design_degree() -> Table:
    """A layer of hidden 8,192 on 4,096 tokens at 400 TFLOP/s, backward overlapped: TP 4 and 8 in a node, 16 across."""
    rows = []
    for t, bandwidth in ((4, 400), (8, 400), (16, 50)):
        parts = layer_seconds(t, 8192, bandwidth)
        exposed = parts["all-reduce, waited for"]
        took = parts["compute"] + exposed
        sent = f"{predict.layer_bytes(1, 4096, 8192, 2, t) / 1e6:.0f} MB"
        rows.append((f"TP {t} at {bandwidth} GB/s", sent, seconds(took), f"{exposed / took:.0%}"))
    return table("one layer", ("", "sent", "takes", "of it exposed"), rows)


def design_serving() -> Table:
    """70B in bf16, 8 kv heads, 128 sequences of 4,096 tokens: room for sequences, seconds per output token."""
    rows = []
    for t in (4, 8, 16):
        kv = 2 * 80 * max(8 // t, 1) * 128 * 2  # bytes per token and rank: never less than one kv head
        room = (0.9 * 80e9 - 140e9 / t) / kv / 4096
        reduce = 160 * (10e-6 + comms.ring_all_reduce(128 * 8192, 2, t).sent_per_rank[0] / 400e9)
        took = (140e9 / t + 128 * 4096 * kv) / 3.35e12 + reduce
        rows.append((f"TP {t}", f"{room:.0f}", seconds(took)))
    return table("70B, 128 sequences", ("", "room for sequences", "per token"), rows)


CLAIMS = (layers, step, loss, float64, single_layers, unpaired, norm_gradients, unmasked, grad_norm)
