"""Lab 08's claims, each once: the notebook prints them, the tour and the tests run `CLAIMS`.

Every function yields the rows of its receipt; without arguments it measures for itself.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from course.kit.receipts import Row, formula, row, titled
from course.lab08_expert_parallel import experiments
from course.lab08_expert_parallel import experiments_links as links
from course.lab08_expert_parallel import experiments_training as training
from course.lab08_expert_parallel.experiments import HIDDEN, SMALL, TOKENS, TOP_K, WORLD, Journey, LayerTraffic, Size
from course.lab08_expert_parallel.experiments_training import BATCH, NUM_EXPERTS, SEQ, STEPS, Training
from course.shared.table import Table, seconds, table
from minillm.predict.planner.architectures import architecture
from minillm.predict.training import moe, tensor

Trainings = dict[str, Training]


@cache
def _expert_gradients() -> list[dict[int, dict[str, float]]]:
    return experiments.expert_gradient_bug_on_ranks()


@titled("two published models", open_rows=1)
def two_models(guess_billion: float | None = None) -> Iterator[Row]:
    mixtral, big = architecture("mixtral-8x7b"), architecture("deepseek-v3")
    yield formula("Mixtral 8x7B: all, and met by a token", _billions(mixtral), "billion", guess=guess_billion)
    yield formula("DeepSeek-V3: all, and met by a token", _billions(big), "billion")


def _billions(model) -> tuple[float, float]:
    return tuple(round(each / 1e9, 1) for each in (model.parameters, model.active_parameters))


@titled("top 2 of more and more experts", open_rows=2)
def flops(found: dict[int, Size] | None = None) -> Iterator[Row]:
    found = found or experiments.sizes()
    least, most = found[min(found)], found[max(found)]
    share = 2 * SMALL.num_layers * SMALL.hidden_size * (max(found) - min(found)) / least.formula
    grown = (most.counted - least.counted) / least.counted
    yield row("16 times the experts: FLOPs grow by the router's share alone", share, grown, "", 1e-9)
    yield row("    parameters grow to", None, most.parameters / least.parameters)
    for count, size in found.items():
        yield row(f"{count} experts, top {TOP_K}: FLOPs per token, counted", size.formula, size.counted, "FLOP")
        yield row(f"    parameters with {count}", None, size.parameters)


@titled("one layer of experts, 4 ranks", open_rows=2)
def traffic(found: LayerTraffic | None = None) -> Iterator[Row]:
    found = found or experiments.traffic()
    one = moe.all_to_all_bytes(TOKENS, TOP_K, HIDDEN, 4, WORLD)
    yield row("all-to-alls: forward, backward", (2, 2), _calls(found, "all_to_all"))
    due = (2 * one, 2 * one)
    sent = (found.forward_bytes, found.all_bytes - found.forward_bytes)
    yield row("sent per rank: 2 · T·k·H·b·(N-1)/N each", due, sent, "B")
    yield row("all-gathers of counts: forward, backward", (1, 0), _calls(found, "all_gather"))


def _calls(found: LayerTraffic, op: str) -> tuple[int, int]:
    return found.forward[op], found.both[op] - found.forward[op]


@titled("4 ranks on 2 nodes, bytes by where they go", open_rows=2, show="other rank of its node|all-to-alls in")
def two_levels(found: Sequence[dict[str, Journey]] | None = None) -> Iterator[Row]:
    found = found or experiments.flat_and_two_levels()
    due = experiments.crossing_formula()
    journeys = {name: [rank[name] for rank in found] for name in due}
    for name, ranks in journeys.items():
        across = sum(each.across for each in ranks) / len(ranks)
        yield row(f"{name}: a rank's bytes to other nodes", due[name], across, "B", tolerance=0.1)
    calls = {op: tuple(ranks[0].calls[op] for ranks in journeys.values()) for op in ("all_to_all", "all_gather")}
    yield row("all-to-alls in forward: flat, two levels", (2, 5), calls["all_to_all"])
    yield row("    all-gathers of counts", (1, 2), calls["all_gather"])
    same = all(torch.allclose(rank["flat"].out, rank["two levels"].out, atol=1e-5) for rank in found)
    yield row("both give the same output on every rank", True, same)
    counted = all(each.across + each.inside == each.ledger_bytes for ranks in journeys.values() for each in ranks)
    yield row("bytes by where they go: together what the ledger says", True, counted)
    inside = tuple(ranks[0].inside for ranks in journeys.values())
    yield row("bytes to the other rank of its node: flat, two levels", None, inside, "B")
    took = tuple(ranks[0].seconds for ranks in journeys.values())
    yield row("    seconds, link between nodes emulated: flat, two levels", None, took, "s", noisy=True)


@titled("a layer's forward until all are done", open_rows=1)
def fullest(found: Sequence[links.Load] | None = None) -> Iterator[Row]:
    for load in found or links.by_load():
        label = f"fullest rank {load.fullest:.1f} times the mean"
        yield row(label, load.predicted_s, load.measured_s, "s", tolerance=0.2, noisy=True)


@titled("a layer's forward on 4 ranks, link and work emulated", open_rows=1)
def shared_experts(found: dict[str, links.Overlap] | None = None) -> Iterator[Row]:
    alone, afterwards, beside = (found or links.overlap()).items()
    due, saved = (getattr(afterwards[1], of) - getattr(beside[1], of) for of in ("predicted_s", "measured_s"))
    yield row("saved by shared experts while rows travel", due, saved, "s", tolerance=0.5, noisy=True)
    for name, each in (afterwards, beside, alone):
        yield row(name, each.predicted_s, each.measured_s, "s", tolerance=0.35, noisy=True)


@titled(f"{NUM_EXPERTS} experts, top {TOP_K}, after {STEPS} steps", open_rows=2)
def collapse(found: Trainings | None = None) -> Iterator[Row]:
    found = found or training.trainings()
    bare, *cured = (found[name].imbalance for name in ("no balancing", "balance loss", "bias"))
    yield row("fullest expert / mean: no balancing, balance loss, bias", None, (bare, *cured))
    losses = tuple(found[name].final_loss for name in ("no balancing", "balance loss", "bias"))
    yield row("loss of the last ten steps, in the same order", None, losses, "nats")
    yield row(f"no balancing: fullest expert above 2.5 times the mean after {STEPS} steps", True, bare > 2.5)
    yield row("balance loss, bias: below twice the mean", True, max(cured) < 2)


@titled("one batch, capacity factor 1.25 in each sequence", open_rows=3)
def drops(found: Trainings | None = None) -> Iterator[Row]:
    found = found or training.trainings()
    by_chance = moe.expected_dropped_share(SEQ, TOP_K, NUM_EXPERTS, 1.25)
    yield formula("dropped by a router that chooses at random", by_chance)
    names = "no balancing", "balance loss", "bias"
    lost, shared = ({name: training.dropped(found[name], 1.25, each) for name in names} for each in (False, True))
    yield row("share of pairs dropped: no balancing, balance loss, bias", None, tuple(lost.values()))
    yield row("    if all sequences shared the batch's places", None, tuple(shared.values()))
    yield row("the collapsed router drops the most", True, lost["no balancing"] == max(lost.values()))


@titled(f"{STEPS} steps of {BATCH * SEQ:,} bytes", open_rows=2)
def beside_dense(found: Trainings | None = None) -> Iterator[Row]:
    found = found or training.trainings()
    dense, experts = found["dense"], found["balance loss"]
    yield row(f"loss after {STEPS} steps: dense, experts", None, (dense.final_loss, experts.final_loss), "nats")
    worth = _loss_at(dense, experts.seconds), _loss_at(experts, dense.seconds)
    yield row("loss at equal CPU time: dense, experts", None, worth, "nats", noisy=True)
    router = 6 * NUM_EXPERTS * training.DENSE.hidden_size * training.DENSE.num_layers * SEQ * training.BATCH
    yield row("FLOPs of a step: those of the dense model and the router's", dense.flops + router, experts.flops, "FLOP")
    yield row("    CPU seconds of all steps: dense, experts", None, (dense.seconds, experts.seconds), "s", noisy=True)


def _loss_at(run: Training, at_s: float) -> float:
    """The mean loss of the ten steps before that moment."""
    last = max(10, min(STEPS, round(STEPS * at_s / run.seconds)))
    return sum(run.losses[last - 10 : last]) / 10


@titled("one layer forward, one core", open_rows=1, show="^64 tokens")
def few_tokens(found: dict[int, links.FewTokens] | None = None) -> Iterator[Row]:
    found = found or links.few_tokens()
    times = tuple(each.experts_s / each.dense_s for each in found.values())
    sizes = ", ".join(f"{tokens:,}" for tokens in found)
    yield row(f"CPU seconds, experts / dense: {sizes} tokens", None, times, noisy=True)
    for tokens, each in found.items():
        due = links.touched_formula(tokens)
        yield row(f"{tokens:,} tokens, top 2 of 32: experts touched", due, each.touched, "", tolerance=0.15)


@titled("the shipped average on 4 ranks", open_rows=1, show="SGD|norm")
def expert_gradient_bug(found: Sequence[dict[int, dict[str, float]]] | None = None) -> Iterator[Row]:
    found = found or _expert_gradients()
    sizes = (1, 2, 4)
    times = tuple(round(max(rank[ep]["experts"] for rank in found), 9) for ep in sizes)
    yield row("experts' gradients, shipped / one process: ep 1, 2, 4", tuple(map(float, sizes)), times)
    worst = max(rank[ep]["router"] for rank in found for ep in sizes)
    yield row("the router's differ by less than 1e-12", True, worst < 1e-12)
    updates = tuple(round(found[0][4][optimizer], 3) for optimizer in ("SGD", "Adam"))
    yield row("ep 4, first update of experts / the right one, 3 digits: SGD, Adam", (4.0, 1.0), updates)
    clipped = found[0][4]["clipped router"]  # divided by the norm of all gradients
    yield row("ep 4, shipped / right: norm of all, the router after clipping", None, (1 / clipped, clipped))


@titled("32 tokens, top 2 of 8, capacity factor 1", open_rows=2)
def neighbours(found: dict[str, int] | None = None) -> Iterator[Row]:
    found = found or experiments.neighbours_in_the_batch()
    shared, own = found["shared by the batch"], found["of each sequence"]
    yield row("capacity of each sequence: choices that a neighbour changes", 0, own)
    yield row("capacity shared by the batch: choices of 64 that a neighbour changes", None, shared)
    yield row("capacity shared by the batch: a neighbour changes some", True, shared > 0)


# Design questions.

READ, NVLINK, NETWORK, TOKENS_PER_GPU = 3.35e12, 450e9, 50e9, 128


def design_serving() -> Table:
    """One expert layer of DeepSeek-V3's decode step with 128 sequences per GPU, by the size of the expert group."""
    model, rows = architecture("deepseek-v3"), []
    expert = model.expert_parameters // model.experts  # bytes in fp8, too
    for ep in (8, 32, 64, 256):
        held = model.experts // ep
        nodes = ep // 8
        flat, merged = moe.crossing_rows(model.experts, model.top_k, nodes)
        row_bytes = 3 * model.hidden_size  # fp8 on the way there, bf16 on the way back
        inside = moe.all_to_all_bytes(TOKENS_PER_GPU, model.top_k, 1, row_bytes, 8) / NVLINK
        travels = max(inside, TOKENS_PER_GPU * merged * row_bytes / NETWORK)
        per_expert = TOKENS_PER_GPU * ep * model.top_k / model.experts
        weights = held * expert * model.expert_layers / 1e9
        cells = (f"ep {ep}", held, f"{weights:.0f} GB", f"{per_expert:.0f}", seconds(held * expert / READ))
        message = TOKENS_PER_GPU * model.top_k * model.hidden_size / ep  # of a flat exchange, fp8
        sent_flat = f"{message / 1e3:.0f} kB, {seconds(message / NETWORK)}" if nodes > 1 else ""
        rows.append((*cells, f"{flat:.2g}, {merged:.2g}", seconds(travels), sent_flat))
    heads = ("", "experts per GPU", "their weights", "rows per expert", "reading them", "rows that cross", "both ways")
    heads += ("a message there, if flat",)
    return table("DeepSeek-V3, fp8, 128 sequences per GPU, one layer of a decode step", heads, rows)


def per_token_bytes() -> float:
    """What moves for one token of DeepSeek-V3 over all layers: 8 rows in fp8 there, 8 in bf16 back."""
    model = architecture("deepseek-v3")
    return model.expert_layers * model.top_k * model.hidden_size * 3


RATE, INSIDE, ACROSS = 400e12, 400e9, 50e9


def design_training() -> Table:
    """Mixtral 8x7B's experts on 8 GPUs, 4,096 tokens each: cut over tp, or spread over ep inside a node and across."""
    model, tokens = architecture("mixtral-8x7b"), 4096
    rows_due = tokens * model.top_k
    expert = model.expert_parameters // model.experts
    work = 3 * 2 * expert * rows_due / RATE
    spread = moe.all_to_all_bytes(tokens, model.top_k, model.hidden_size, 2, 8)
    cut = tensor.layer_bytes(8, tokens, model.hidden_size, 2, 8) / 2  # of four all-reduces the two of the MLP
    ways = (("experts over tp 8, inside", cut, INSIDE), ("ep 8, inside", 4 * spread, INSIDE))
    rows = [
        (name, f"{sent / 1e6:,.0f} MB", seconds(sent / rate), seconds(work), seconds(1.5 * work))
        for name, sent, rate in (*ways, ("ep 8, across", 4 * spread, ACROSS))
    ]
    heads = ("one layer, forward and backward", "sent per GPU", "on the way", "experts' work", "if one has 1.5 times")
    return table("Mixtral 8x7B, 8 GPUs of 4,096 tokens", heads, rows)


CLAIMS = (
    flops,
    traffic,
    two_levels,
    fullest,
    collapse,
    drops,
    beside_dense,
    few_tokens,
    expert_gradient_bug,
    neighbours,
)
