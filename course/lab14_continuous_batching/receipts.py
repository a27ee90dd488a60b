"""Lab 14's claims and tables, each a function that the notebook calls in one line; CLAIMS need no learner.

Counted, or on a simulated clock: except where a column says "measured", nothing depends on how busy the machine is.
"""

import math
from collections.abc import Callable
from typing import Any

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, receipt, row
from course.lab14_continuous_batching import experiments, experiments_breaks, figures_flight
from course.lab14_continuous_batching import experiments_engines as engines
from course.lab14_continuous_batching import formulas as predict
from course.lab14_continuous_batching.experiments_transformers import peer
from course.lab14_continuous_batching.receipts_loads import ahead
from course.shared.step_cost import FOUR_H100_70B, H100_8B
from course.shared.table import Table, seconds, table

ANSWERS = answers_of("14_continuous_batching")

MOST = engines.MAX_NUM_SEQS  # sequences in a batch
LONG_PROMPT = f"a prompt of {engines.LONG:,} tokens arrives while {engines.DECODING} decode"
CROWDED = f"{engines.CROWD_SIZE} requests"


def passes(guess_static: int, guess_continuous: int) -> Table:
    """32 skewed answers, at most 8 at once: the reader's guesses beside the closed forms."""
    lengths = engines.answers(engines.trace_arrivals("skewed"))
    counts = f"{len(lengths)} skewed answers (longest {max(lengths)}, sum {sum(lengths)})"
    return table(
        f"{counts}, at most {MOST} at once: forward passes",
        ("", "your guess", "formula"),
        [
            ("static batches: sum of each batch's longest", guess_static, predict.static_steps(lengths, MOST)),
            ("continuous batching", guess_continuous, predict.continuous_steps(lengths, MOST)),
            ("no schedule needs fewer: max(longest, sum / batch)", None, predict.least_steps(lengths, MOST)),
        ],
    )


def gain(continuous_batches: Callable) -> Table:
    """Static over continuous steps by the distribution of lengths, counted with the learner's function."""
    shares = {
        "uniform, 1 to 64": [1 / 64] * 64,
        "geometric, mean 20": [0.05 * 0.95**k for k in range(600)],
        "all 32": [0.0] * 31 + [1.0],
    }
    found = []
    for name, each in shares.items():
        draws = experiments.draw(each, 4000)
        counted = predict.static_steps(draws, MOST) / len(continuous_batches(draws, MOST))
        found.append((name, predict.static_over_continuous([share / sum(each) for share in each], MOST), counted))
    return table("static / continuous, 8 at once, 4,000 requests", ("lengths", "E[max of 8] / mean", "counted"), found)


def pass_cost() -> Table:
    """A pass of the 8B model by what is in it: roofline."""
    work = [(f"a prompt of {tokens:,}", [(0, tokens)]) for tokens in (64, 256, 512, 2048, 8192)]
    work += [(f"{batch} decoding at 2,000 tokens", [(1999, 1)] * batch) for batch in (1, 8, 64, 200)]
    times = [(name, sum(count for _, count in batch), H100_8B.step(batch)) for name, batch in work]
    return table(
        "one pass of the 8B model on one H100, formula",
        ("in the pass", "time", "tokens per second"),
        [(name, seconds(each), f"{tokens / each:,.0f}") for name, tokens, each in times],
    )


def two_recordings() -> Receipt:
    """One trace played without a model and run through the engine with one."""
    llm, outputs = experiments.fly(figures_flight.trace(), experiments.draft(), **figures_flight.POOL)
    played = figures_flight.flight()
    return receipt(
        "one trace: played without a model (predicted), and run with one (measured)",
        [
            row("steps", len(played.records), len(llm.records)),
            row("batches, admissions, preemptions equal", True, experiments.same_flight(played.records, llm.records)),
            row("preemptions", played.preemptions, sum(output.preemptions for output in outputs)),
            row("tokens computed", played.computed, sum(each.tokens for each in llm.records)),
            row("    of them again, after a preemption", None, played.computed - played.needed),
            row("blocks used afterwards", 0, llm.pool.used),
        ],
    )


def three_engines(found: dict[tuple[str, str], dict[str, Any]]) -> Table:
    """All 32 requests there at the start: passes counted, times simulated."""
    lines = []
    for trace in engines.TRACES:
        wanted = engines.answers(engines.trace_arrivals(trace))
        due = {"static": predict.static_steps(wanted, MOST), "continuous": predict.continuous_steps(wanted, MOST)}
        for engine in engines.ENGINES:
            each = found[trace, engine]
            same = each["ids"] == found[trace, "static"]["ids"]
            rate = f"{each['summary'].tokens_per_s:,.0f}"
            lines.append((f"{trace}, {engine}", due.get(engine), each["passes"], each["wasted"], same, rate))
    return table(
        f"{engines.COUNT} requests at once, batches of at most {MOST}",
        ("", "passes, formula", "counted", "padding rows", "same tokens", "tokens/s, simulated"),
        lines,
    )


def trickling(rate: float = 60) -> Table:
    """The same requests, `rate` of them per second, on the simulated clock."""
    lines = []
    for (trace, engine), found in engines.compare(rate).items():
        ttft, whole = found["summary"].ttft, found["summary"].end_to_end
        times = (seconds(each) for each in (ttft.p50, ttft.p99, whole.p50, whole.p99))
        lines.append((f"{trace}, {engine}", *times, found["passes"]))
    columns = ("", "TTFT p50", "p99", "end to end p50", "p99", "passes")
    return table(f"{rate:g} requests per second, simulated", columns, lines)


def chunks(guess_ms: float) -> Table:
    """The stall by chunk size: formula and simulated."""
    found, unmixed = engines.stalls(engines.CHUNKS), engines.unmixed(512)
    lines = [
        (f"chunk {each['chunk']:,}", *(seconds(each[key]) for key in ("predicted", "gap", "predicted_ttft", "ttft")))
        for each in found
    ]
    lines.append(("chunk 512, phases never mixed", None, seconds(unmixed["gap"]), None, seconds(unmixed["ttft"])))
    columns = ("", "worst gap, formula", "simulated", "its TTFT, formula", "simulated")
    return table(f"{LONG_PROMPT} (your guess, chunk 512: {guess_ms:g} ms)", columns, lines)


def measured_stall() -> Table:
    """A real stall on this machine, by the wall clock."""
    found = {name: engines.measured_stall(chunk) for name, chunk in (("whole", None), ("in chunks of 48", 48))}
    return table(
        "440 tokens arrive while 4 sequences decode, target model, wall clock",
        ("the prompt is computed", "gap before, measured", "worst gap, measured", "its TTFT, measured"),
        [(name, *(seconds(each[key]) for key in ("before", "gap", "ttft"))) for name, each in found.items()],
    )


def policies() -> Table:
    """Four policies, two ways back, one trace on the simulated clock."""
    lines = []
    for (policy, how), flight in engines.crowds().items():
        gap = flight.spread("worst_gap")
        lines.append(
            (f"{policy}, {how}", flight.preemptions, flight.computed - flight.needed, flight.swapped,
             f"{engines.just_used(flight):.0%}", *(seconds(each) for each in (gap.p50, gap.p99, flight.seconds)))
        )  # fmt: skip
    columns = (
        "",
        "preemptions",
        "tokens computed twice",
        "blocks moved",
        "used in the step before",
        "worst gap p50",
        "p99",
        "all done",
    )
    return table(f"{CROWDED}, {engines.CROWD['num_blocks']} blocks of 16, simulated", columns, lines)


def reserve() -> Table:
    """No block kept free when a sequence is admitted, and one per running sequence."""
    lines = []
    for name, flight in (
        ("none", engines.crowd("latest", "recompute")),
        ("one per sequence", engines.crowd(reserve=1)),
    ):
        gap, ttft = flight.spread("worst_gap").p99, flight.spread("ttft").p50
        twice = flight.computed - flight.needed
        lines.append((name, flight.preemptions, twice, *(seconds(each) for each in (gap, ttft, flight.seconds))))
    columns = ("blocks kept free", "preemptions", "tokens computed twice", "worst gap p99", "TTFT p50", "all done")
    return table("policy 'latest', recompute, simulated", columns, lines)


def faults(seed: int = 5) -> Table:
    """Each broken scheduler beside a sound one on the same trace."""
    lines = []
    for fault in experiments_breaks.FAULTS:
        found, sound = (
            experiments_breaks.case(fault, seed=seed),
            experiments_breaks.case(fault, seed=seed, sound=True),
        )
        gaps = [seconds(flown.spread("worst_gap").most) for flown in (found, sound)]
        ended = sum(len(step.ended) for step in found.records)
        steps = "no end" if found.stuck else len(found.records)
        lines.append((fault, steps, len(sound.records), f"{ended} of 8", "no end" if found.stuck else gaps[0], gaps[1]))
    columns = ("", "steps", "sound", "ended", "longest gap", "sound")
    return table("five recorded runs, simulated", columns, lines)


def overhead() -> Table:
    """The scheduler's own cost beside a pass, on this machine."""
    lines = [
        (f"schedule + advance, {width} running: per sequence", seconds(each), None)
        for width, each in engines.bookkeeping().items()
    ]
    lines += [
        (f"a decode step of the draft model with {width} in it", seconds(each), f"{width / each:,.0f}")
        for width, each in engines.step_seconds(experiments.draft()).items()
    ]
    return table("on this machine", ("", "measured", "tokens per second"), lines)


def transformers(ours: dict[str, Any]) -> Receipt:
    """transformers' continuous batching on the same requests, where it is installed."""
    theirs = peer(engines.trace_arrivals("skewed"), max_num_seqs=MOST, token_budget=MOST * engines.PROMPT + MOST)
    if theirs is None:
        return receipt("transformers is not installed here: pip install transformers", [])
    equal = sum(mine == other for mine, other in zip(ours["ids"], theirs["ids"], strict=True))
    return receipt(
        "transformers' continuous batching, skewed answers",
        [
            row("answers equal to ours", len(ours["ids"]), equal),
            row("forward passes: ours, theirs", None, (ours["passes"], theirs["passes"])),
            row("seconds: ours, theirs", None, (seconds(ours["wall_s"]), seconds(theirs["seconds"]))),
        ],
    )


def interview() -> Table:
    """Numbers that the questions rest on."""
    held = [2000] * 32
    one, many = H100_8B.step([(1999, 1)]), H100_8B.step([(1999, 1)] * 64)
    return table(
        "by formula; 8B on one H100",
        ("quantity", "formula"),
        [
            ("decode pass of 1 sequence with 2,000 tokens; of 64", (seconds(one), seconds(many))),
            ("    tokens per second", (round(1 / one), round(64 / many))),
            ("a prompt of 32,768 while 32 decode: worst gap whole; in chunks of 1,024",
             tuple(seconds(predict.worst_gap(H100_8B, 32768, chunk, held)) for chunk in (None, 1024))),
            ("    its TTFT",
             tuple(seconds(predict.chunked_prefill(H100_8B, 32768, chunk, held)) for chunk in (None, 1024))),
            ("preempting 4,000 tokens: recompute; swap at 64 GB/s each way",
             (seconds(H100_8B.recompute(4000)), seconds(2 * H100_8B.swap(250, 16)))),
            ("patience 64, one level of priority: overtaken by at most", predict.overtakers(64, 1)),
        ],
    )  # fmt: skip


def design_fleet(prompt: int = 1000, answer: int = 200, arrivals: float = 200.0) -> Table:
    """D1: replicas of four H100s for a 70B model, by how many sequences decode together."""
    room = int((0.9 * 4 * 80e9 - FOUR_H100_70B.weight_bytes) / (FOUR_H100_70B.kv_bytes * (prompt + answer)))
    lines = []
    for batch in (16, 32, 64, 96, 128, 192):
        piece = batch * prompt // answer  # prompt tokens per step in the steady state
        step = FOUR_H100_70B.step([(prompt + answer // 2, 1)] * batch + [(prompt // 2, piece)])
        rate = batch / step
        lines.append((f"{batch} decoding", piece, seconds(step), f"{rate:,.0f}", math.ceil(arrivals * answer / rate)))
    columns = ("sequences", "prompt tokens per step", "step = TPOT", "answer tokens/s", "replicas for 200 requests/s")
    return table(f"D1: 70B on four H100s, at peak rates; memory holds {room} sequences", columns, lines)


def design_chunk(prompt: int = 32768, decoding: int = 32) -> Table:
    """D2: gap and TTFT by chunk size for a long prompt."""
    held = [2000] * decoding
    lines = [
        (f"{chunk:,}", seconds(predict.worst_gap(H100_8B, prompt, chunk, held)),
         seconds(predict.chunked_prefill(H100_8B, prompt, chunk, held)))
        for chunk in (128, 256, 512, 1024, 2048, prompt)
    ]  # fmt: skip
    return table("D2: 8B on one H100, formula", ("chunk", "worst gap of 32", "TTFT of the prompt"), lines)


# Claims that need no learner, beside `two_recordings`.


def passes_counted() -> Receipt:
    """Forward passes of static and of continuous batching for the same requests, and the tokens of every engine."""
    found, rows = engines.compare(), []
    for trace in engines.TRACES:
        lengths = engines.answers(engines.trace_arrivals(trace))
        due = {"static": predict.static_steps(lengths, MOST), "continuous": predict.continuous_steps(lengths, MOST)}
        for engine, steps in due.items():
            rows.append(row(f"{trace} answers, {engine}: forward passes", steps, found[trace, engine]["passes"]))
        alike = all(found[trace, engine]["ids"] == found[trace, "static"]["ids"] for engine in engines.ENGINES)
        rows.append(row("    the same tokens from every engine", True, alike))
    return receipt("static and continuous batches", rows)


def gaps() -> Receipt:
    """The worst gap of sequences that decode while a long prompt comes in, by chunk size."""
    rows = []
    for chunk in (512, 2048, None):
        numbers = engines.stall(chunk)
        name = f"chunk {chunk}" if chunk else "the whole prompt"
        rows.append(row(f"{name}: worst gap", numbers["predicted"], numbers["gap"], "s", 0.01, kind="simulated"))
    rows.append(row("    chunk 512, phases never mixed", None, engines.unmixed(512)["gap"], "s", kind="simulated"))
    return receipt(LONG_PROMPT, rows)


def preempted() -> Receipt:
    """What a crowded trace computes again, or moves, is what its victims had."""
    recomputed, swapped = engines.crowd("latest", "recompute"), engines.crowd("latest", "swap")
    blocks = 2 * sum(-(-tokens // 16) for tokens in engines.given_up(swapped))
    again = recomputed.computed - recomputed.needed
    return receipt(
        f"{CROWDED} in a pool that is too small",
        [
            row("preempted and recomputed: tokens computed twice", sum(engines.given_up(recomputed)), again),
            row("preempted and swapped: blocks moved", blocks, swapped.swapped),
            row("    tokens computed twice", 0, swapped.computed - swapped.needed),
        ],
    )


def diagnoses() -> Receipt:
    """Five schedulers, told by their records."""
    rows = []
    for fault in experiments_breaks.FAULTS:
        flight = experiments_breaks.case(fault, 14)
        name = f"a scheduler that is {fault!r}" if fault == experiments_breaks.HEALTHY else f"fault: {fault}"
        rows.append(row(name, fault, ANSWERS.diagnose(flight.records, flight.prompts)))
    return receipt("diagnosis of recorded runs", rows)


CLAIMS = (passes_counted, two_recordings, gaps, preempted, diagnoses, ahead)
