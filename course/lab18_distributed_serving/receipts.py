"""Lab 18's claims and tables, each a function that the notebook calls in one line; CLAIMS need no learner."""

from collections.abc import Callable, Iterator
from functools import partial

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, Row, formula, receipt, row, titled
from course.lab18_distributed_serving import experiments, experiments_pool, formulas
from course.lab18_distributed_serving import experiments_breaks as breaks
from course.lab18_distributed_serving.experiments import Handed, Linked, Played, TwoRanks
from course.lab18_distributed_serving.pipeline import Trace, play
from course.shared.table import Table, table
from minillm.predict.serving import handover, ranks

ANSWERS = answers_of("18_distributed_serving")

# One engine on two ranks.


@titled("the target on 2 ranks: a decode step of one greedy sequence", open_rows=2, show="Llama")
def decode_step(found: TwoRanks | None = None, guess_reduces: float | None = None) -> Iterator[Row]:
    """P98: what a rank holds and a step sends under tensor parallelism, by formula and by the ledger."""
    found = found or experiments.two_ranks()
    shape, tp = found.shape, found.tp
    calls = ranks.step_calls(shape, 2, 1, likeliest=1)
    yield row("all-reduces: 2 a layer and the embedding's", 2 * shape.num_layers + 1, tp.all_reduces)
    yield row("bytes that rank 0 sends in collectives", ranks.sent_bytes(calls, 2), tp.collectives, "B")
    yield row("bytes of the message that announces the step", _message(), tp.told, "B")
    yield formula("Llama 3 70B: all-reduces a token, in its layers", 2 * 80, guess=guess_reduces)
    yield row("tokens of a plain loop in one process", True, tp.ids == found.alone)
    yield row("parameters on rank 0: matrices / 2, norms whole", ranks.weight_bytes(shape, 2, 1), tp.parameters)


def _message() -> int:
    return ranks.message_bytes(ranks.step_numbers(1, 1, 1))


@titled("the target in 2 stages", open_rows=2)
def engine_of_stages(found: TwoRanks | None = None) -> Iterator[Row]:
    """What a decode step sends under pipeline parallelism."""
    found = found or experiments.two_ranks()
    yield row("bytes to the next stage: h numbers", ranks.hidden_bytes(found.shape, 1), found.pp.hidden, "B")
    yield row("collectives", 0, found.pp.all_reduces)
    yield row("four answers: steps under way", 2, found.flight)
    yield row("greedy tokens: those of one process", True, found.pp.ids == found.alone)


# Stages.


@titled("32 sequences of 20 tokens, 4 stages", open_rows=2)
def stages(next_batch: Callable | None = None) -> Iterator[Row]:
    """Seconds of batches that move through a pipeline: everybody at once, and a share for each stage."""
    next_batch = next_batch or ANSWERS.next_batch
    count, sequences, tokens = 4, 32, 20
    shares = play(Trace.at_once(sequences, tokens), count, partial(_with, next_batch, count))
    whole = play(Trace.at_once(sequences, tokens), count, lambda running, flight: [] if flight else running)
    for name, per in (("reading is all", 0.0), ("8 sequences take as long as reading", 1 / 8)):
        many, one = shares.ticks * (1 + per * sequences / count), whole.ticks * (1 + per * sequences)
        yield formula(f"{name}: seconds of one batch over those of shares", one / many)
    yield row("a share each: ticks until the last token", count * tokens + count - 1, shares.ticks,
              kind="simulated")  # fmt: skip
    yield row("one batch of everybody: ticks", count * tokens, whole.ticks, kind="simulated")


def _with(next_batch: Callable, count: int, running: list, flight: list) -> list:
    return next_batch(running, flight, count)


# Links.


def over_links(found: list[Linked] | None = None, guess_slower: float | None = None) -> Receipt:
    """Seconds per token over emulated links. guess_slower: ms."""
    found = found or experiments.over_links()
    rows = []
    for each in found:
        name = "one rank" if each.link is None else f"two ranks, {each.link.latency_s * 1e3:g} ms"
        name = name.replace(", 0 ms", ", no link")
        rows.append(row(f"{name}: seconds per token", each.predicted, each.measured, "s", 0.25, noisy=True))
    slower = experiments.slower_from() * 1e3
    rows.append(formula("slower than one rank from a latency of (ms)", slower, guess=guess_slower))
    for name, each, count in (("two replicas", found[0], 2), ("one replica on two ranks, 8 ms", found[2], 1)):
        rates = (count / each.predicted, count / each.measured)
        rows.append(row(f"{name}: tokens per second", *rates, "", 0.25, noisy=True))
    return receipt("a token over emulated links", rows, open_rows=1, show="24 ms|slower|tokens per second")


# Hand-overs.


@titled("a prompt of 2,000 tokens", open_rows=1, show="the target")
def bytes_handed(guess_megabytes: float | None = None) -> Iterator[Row]:
    """P97, by formula and in a cache."""
    for model in ("70B", "8B"):
        handed = handover.handed_bytes(formulas.shape_of(model), 2000)
        guess = guess_megabytes if model == "70B" else None
        yield formula(f"Llama 3 {model}: MB handed over", handed / 1e6, guess=guess)
    pairs = handover.routes(8, 4, 8)
    yield formula("    tp 4 prefills, tp 8 decodes: messages a layer", len(pairs))
    shape, tokens, held = experiments.slots_of_a_prompt()
    predicted = handover.handed_bytes(shape, tokens, itemsize=4)
    yield row(f"the target: slots of {tokens} tokens in an engine's pool", predicted, held, "B")


@titled("200 tokens, prefilled by a pool in a process of its own", open_rows=2, show="leaves before")
def from_a_pool() -> Iterator[Row]:
    """P97 in the engine: what arrives, when it leaves, and the tokens."""
    found = experiments_pool.with_a_pool()
    received = experiments_pool.PROMPT - 1
    yield row("tokens beside a pool, and those of a plain loop", True, found.ids == found.alone)
    yield row("tokens whose keys arrive: all but the last", received, found.received)
    handed = handover.handed_bytes(found.shape, received, itemsize=4)
    yield row("bytes of keys and values", handed, sum(found.layers), "B")
    yield row("the first layer leaves before the last is computed", True, found.early, noisy=True)


def hidden(found: list[Handed] | None = None, guess_hidden: float | None = None) -> Receipt:
    """Seconds of a hand-over at the end and layer by layer."""
    found = found or experiments.handover_on_a_clock()
    rows = [row(f"{each.name}: seconds in all", each.predicted, each.measured, "s", 0.15, noisy=True) for each in found]
    compute = experiments.LAYERS * experiments.LAYER_S
    share = handover.hidden_share(experiments.LAYERS, compute, compute / 2)
    name = "layer by layer: hidden share of the transfer"
    rows.append(row(name, share, found[1].hidden, "", 0.15, guess=guess_hidden, noisy=True))
    rows.append(formula("    with Llama 3 70B's 80 layers", handover.hidden_share(80, 1.0, 0.5)))
    return receipt("8 layers of 20 ms, a link that takes half as long", rows, open_rows=2, show="hidden share")


def interference(found: list[Played] | None = None) -> Table:
    """Gaps and first tokens of the three ways."""
    found = found or experiments.interference()
    lines = []
    for each in found:
        median, longest = experiments.spread(each.gaps)
        ttft = sum(each.first) / len(each.first)
        lines.append((each.name, f"{median * 1e3:.1f} ms", f"{longest * 1e3:.0f} ms", f"{ttft * 1e3:.0f} ms"))
    columns = ("served", "median gap", "longest gap", "mean TTFT")
    return table("32 sequences decode, three prompts of 8,000 tokens arrive; simulated", columns, lines)


@titled("prompts among decode steps", open_rows=3)
def prompts_interfere() -> Iterator[Row]:
    """The longest gap of each way, by the roofline."""
    whole, chunks, apart = (max(each.gaps) for each in experiments.interference())
    cost, running = experiments.FOUR_H100_70B, [(experiments.CONTEXT, 1)] * experiments.RUNNING
    prompt = cost.step([(0, experiments.LONG)])
    yield row(
        "whole prompts: longest gap, a prompt and a step",
        prompt + cost.step(running),
        whole,
        "s",
        0.05,
        kind="simulated",
    )
    yield row("in chunks: less than a tenth of it", True, chunks < whole / 10, kind="simulated")
    yield row("apart: less than in chunks", True, apart < chunks, kind="simulated")


# Splits.


def splits(guess_prefill: float | None = None) -> Receipt:
    """The best division of 16 H100 for Llama 3 70B, and the same cards doing both."""
    plans = formulas.best_pools(4000, 1.5, 0.04)
    apart, together = plans[True], plans[False]
    prefilling = apart.prefill * apart.prefill_tp * apart.prefill_pp
    return receipt(
        "Llama 3 70B on 16 H100, prompts of 4,000, answers of 250; TTFT 1.5 s, TPOT 40 ms",
        [
            formula("apart: cards that prefill", prefilling, guess=guess_prefill),
            formula("requests per second: apart, together", (apart.rate, together.rate)),
            formula("longest gap between two tokens: apart, together", (apart.gap * 1e3, together.gap * 1e3), "ms"),
            formula("replicas × (tp, pp): apart, together", (formulas.layout_of(apart), formulas.layout_of(together))),
            formula("sequences in a decode batch: apart, together", tuple(map(formulas.decoding, (apart, together)))),
        ],
        open_rows=5,
    )


def where_the_split_loses() -> Table:
    """What the figure shows, in numbers, and other limits."""
    cases = [(prompt, "", 1.0, 0.04) for prompt in formulas.PROMPTS]
    cases += [(8000, ", TTFT 2 s", 2.0, 0.04), *((prompt, ", no limits", None, None) for prompt in (4000, 8000))]
    lines = []
    for prompt, name, ttft, tpot in cases:
        plans = formulas.best_pools(prompt, ttft, tpot)
        apart, together = ([f"{plan.rate:.1f}", f"{plan.gap * 1e3:.0f} ms", formulas.layout_of(plan)] if plan else
                           ["none", "—", "—"] for plan in (plans.get(True), plans.get(False)))  # fmt: skip
        lines.append((f"{prompt:,} tokens{name}", *apart, *together))
    columns = [f"{way}: {what}" for way in ("apart", "together") for what in ("requests/s", "longest gap", "layout")]
    title = (
        "Llama 3 70B on 16 H100, answers of 250; TTFT 1 s, TPOT 40 ms on average; layout: replicas × (tp, pp); formula"
    )
    return table(title, ("prompt", *columns), lines)


# Break it.


def programs(verdict: Callable) -> Table:
    """The six programs: the learner's verdict beside what their logs hold."""
    lines = []
    for name, seen in breaks.all_programs().items():
        steps = sum(event[0] == "step" for event in seen.events)
        preempted = sum(event[0] == "preempted" for event in seen.events)
        freed = sum(event[0] == "freed" for event in seen.events)
        logged = ", ".join(str(len(tokens)) for tokens in seen.tokens)
        lines.append((name, verdict(seen), steps, preempted, freed, logged))
    columns = ("program", "your verdict", "steps", "preemptions", "blocks freed", "tokens by rank")
    return table("six programs on two ranks", columns, lines)


def verdicts() -> Receipt:
    """The six programs, judged."""
    found = breaks.all_programs()
    return receipt(
        "which bug",
        [row(f"program {name}", breaks.BUGS[name], ANSWERS.verdict(seen)) for name, seen in found.items()],
    )


CLAIMS = (
    decode_step,
    engine_of_stages,
    stages,
    over_links,
    bytes_handed,
    from_a_pool,
    hidden,
    prompts_interfere,
    splits,
    verdicts,
)
