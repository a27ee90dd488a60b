"""Lab 16's tables of speed, on this machine and by formula, and the numbers of its questions."""

import math
from collections.abc import Iterator, Sequence

from course.kit.receipts import Row, formula, titled
from course.lab16_quantization import experiments, formulas
from course.lab16_quantization.experiments import Measured
from course.shared.table import Table, seconds, table
from minillm.predict.serving import quantization as predict

H100 = 989e12, 3.35e12  # FLOP/s in bf16 without sparsity, bytes/s (NVIDIA H100 SXM datasheet)
KERNELS = {"torch._weight_int8pack_mm": "packed int8", "torch._weight_int4pack_mm_for_cpu": "packed int4"}


def formats(found: Sequence[Measured]) -> Table:
    """The points of the figure, and what multiplies."""
    plain = found[0]
    return table(
        "the target: bytes, error, CPU time of a token of one sequence",
        ("", "MB", "bits per byte", "change", "KL, nats", "a token", "faster", "kernel"),
        [
            (each.name, f"{each.bytes / 1e6:.1f}", f"{each.bits_per_byte:.4f}",
             f"{each.bits_per_byte / plain.bits_per_byte - 1:+.2%}", f"{each.kl:.5f}", seconds(each.seconds),
             f"{plain.seconds / each.seconds:.2f}", KERNELS.get(each.kernel, each.kernel))
            for each in found
        ],
    )  # fmt: skip


@titled("4-bit weights in groups of 128, 16-bit products, one H100", open_rows=6)
def when_it_ends(guess_batch: float | None = None) -> Iterator[Row]:
    """The batch at which the speedup begins to fall, and where it is gone."""
    bits = predict.bits_per_weight(4, 128)
    full, none = predict.batch_of_full_speedup(bits, *H100), predict.batch_without_speedup(16, *H100)
    yield formula("largest batch with the full speedup", int(full), guess=guess_batch)
    yield formula("    the speedup up to there", predict.speedup(1, bits, 16, *H100))
    yield formula("smallest batch with none", math.ceil(none))
    for batch in (128, 256):
        yield formula(f"speedup at batch {batch}", predict.speedup(batch, bits, 16, *H100))


def batches_here(rows: tuple[int, ...] = (1, 4, 16, 64, 256)) -> Table:
    """One layer in int8 against float32 on one thread of this machine."""
    return table(
        "a layer of 2,048 x 2,048, CPU time of one thread",
        ("rows at once", "float32", "int8", "times faster"),
        [(str(count), seconds(plain), seconds(small), plain / small)
         for count, (plain, small) in experiments.layer_seconds(rows).items()],
    )  # fmt: skip


def batches_h100(batches: Sequence[int] = (1, 16, 64, 128, 256, 512), contexts: Sequence[int] = (0, 2048)) -> Table:
    """Times faster than 16 bits on one H100: 4-bit weights, and 8 bits for weights and inputs."""
    head = [f"{name}, at {context:,}" for context in contexts for name in ("4-bit weights", "8 bits both")]
    lines = []
    for batch in batches:
        cells = []
        for context in contexts:
            work = [(context, 1)] * batch
            cells += [formulas.PLAIN.step(work) / each.step(work) for each in (formulas.FOUR, formulas.EIGHT)]
        lines.append((str(batch), *cells))
    plain, four, eight = (formulas.prompt_seconds(e, 2048) for e in (formulas.PLAIN, formulas.FOUR, formulas.EIGHT))
    lines.append(("a prompt of 2,048", plain / four, plain / eight, *[None] * 2 * (len(contexts) - 1)))
    return table("8B on one H100: times faster than 16 bits at two contexts, by formula", ("sequences", *head), lines)


def interview() -> Table:
    """Numbers that the questions rest on."""
    bits, number = predict.bits_per_weight(4, 128), predict.cache_bits_per_number(8, 128, scale_bits=32)
    return table(
        "by formula",
        ("quantity", "formula"),
        [
            ("int4, groups of 128: bits per weight", bits),
            ("    speedup while memory is the limit", 16 / bits),
            ("    H100: largest batch with all of it, smallest with none",
             (int(predict.batch_of_full_speedup(bits, *H100)), math.ceil(predict.batch_without_speedup(16, *H100)))),
            ("NF4 with double quantization: bits per weight", predict.bits_per_weight(4, 64, scale_bits=8 + 32 / 256)),
            ("every further bit, dB", 20 * math.log10(2)),
            ("keys in int8, head_dim 128: times as many tokens", 16 / number),
            ("4,096 x 4,096: largest rank that takes fewer numbers", predict.low_rank_saves(4096, 4096)),
        ],
    )  # fmt: skip


def design_card(guess_sequences: float | None = None) -> Table:
    """D1: Llama 3 70B on one card of 80 GB, by the format of weights and cache."""
    lines = []
    for plan in formulas.plans():
        weights, cache = (f"{each / 1e9:.1f} GB" for each in (plan.weights, plan.cache))
        step = seconds(plan.step) if plan.sequences else "—"
        lines.append((plan.name, weights, cache, f"{plan.per_token / 1e3:.0f} kB", plan.sequences, step))
    return table(
        f"D1: 70B, contexts of 32,768, one 80 GB card (your guess: {guess_sequences} sequences), by formula",
        ("weights, cache", "weights take", "left for the cache", "a token takes", "sequences", "a token of each"),
        lines,
    )


def design_day_and_night() -> Table:
    """D2: the 8B model by day (8 sequences of 2,048) and by night (prompts of 2,048)."""
    day, prompt = [(2048, 1)] * 8, 2048
    lines = []
    for name, cost in (("16 bits", formulas.PLAIN), ("4-bit weights", formulas.FOUR), ("8 bits both", formulas.EIGHT)):
        times = cost.step(day), formulas.prompt_seconds(cost, prompt)
        faster = formulas.PLAIN.step(day) / times[0], formulas.prompt_seconds(formulas.PLAIN, prompt) / times[1]
        lines.append((name, seconds(times[0]), faster[0], seconds(times[1]), faster[1]))
    columns = ("format", "day: a step", "times faster", "night: a prompt", "times faster")
    return table("D2: 8B on one H100, by formula; the head for a prompt's last token alone", columns, lines)
