"""Spoilers of lab 02: bytes and FLOPs as people miscount them, and right counts that look different."""

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("02_one_device")


def ledger(**changed):
    """The right ledger with some kinds replaced by functions of (hidden, intermediate, layers, tokens, mixed)."""

    def memory_ledger(*shape):
        return right.memory_ledger(*shape) | {kind: size(*shape) for kind, size in changed.items()}

    return memory_ledger


# Memory by kind.

LEDGERS = {
    "Adam with one moment": (
        {"optimizer": lambda h, f, n, t, mixed: 4 * 2 * n * h * f},
        "Adam keeps two moments of every weight, both in float32.",
    ),
    "mixed precision without its master copy": (
        {"optimizer": lambda h, f, n, t, mixed: 8 * 2 * n * h * f},
        "With 16-bit weights the optimizer also owns a float32 copy of them, the masters.",
    ),
    "masters and moments in 16 bits": (
        {"optimizer": lambda h, f, n, t, mixed: (6 if mixed else 8) * 2 * n * h * f},
        "Masters and moments all stay in float32: 12 bytes per weight.",
    ),
    "one matrix per block": (
        {"parameter": lambda h, f, n, t, mixed: (2 if mixed else 4) * n * h * f},
        "Each block has two matrices, up and down.",
    ),
    "float32 weights in mixed precision": (
        {"parameter": lambda h, f, n, t, mixed: 4 * 2 * n * h * f},
        "The model's own weights are stored in 16 bits here; the float32 copy belongs to the optimizer.",
    ),
    "float32 gradients in mixed precision": (
        {"gradient": lambda h, f, n, t, mixed: 4 * 2 * n * h * f},
        "A weight in 16 bits gets a gradient in 16 bits.",
    ),
    "ReLU's input counted as well": (
        {"activation": lambda h, f, n, t, mixed: (2 if mixed else 4) * t * n * (h + 2 * f)},
        "ReLU keeps its output, which is the input of down: one tensor, counted once.",
    ),
    "only what the second matmul reads": (
        {"activation": lambda h, f, n, t, mixed: (2 if mixed else 4) * t * n * f},
        "up keeps its input as well: its weight's gradient needs it.",
    ),
    "the addition's input counted": (
        {"activation": lambda h, f, n, t, mixed: (2 if mixed else 4) * t * n * (2 * h + f)},
        "An addition keeps nothing: its gradients do not depend on its inputs.",
    ),
    "one block's activations": (
        {"activation": lambda h, f, n, t, mixed: (2 if mixed else 4) * t * (h + f)},
        "Every block's activations stay until the backward pass reaches that block.",
    ),
    "float32 activations in mixed precision": (
        {"activation": lambda h, f, n, t, mixed: 4 * t * n * (h + f)},
        "16-bit weights and inputs make 16-bit activations.",
    ),
    "the last output counted": (
        {"activation": lambda h, f, n, t, mixed: (2 if mixed else 4) * t * (n * (h + f) + h)},
        "The output of the last block is no input of a matmul: nothing in this model needs it for backward.",
    ),
    "sixteen bytes in the optimizer alone": (
        {"optimizer": lambda h, f, n, t, mixed: (16 if mixed else 8) * 2 * n * h * f},
        "16 is the sum of weights, gradients and optimizer; masters and moments are 12 of it.",
    ),
    "elements": (
        {"parameter": lambda h, f, n, t, mixed: 2 * n * h * f},
        "That is a number of weights; each takes 4 bytes, or 2 in 16 bits.",
    ),
    "tokens forgotten": (
        {"activation": lambda h, f, n, t, mixed: (2 if mixed else 4) * n * (h + f)},
        "Activations exist for every token: multiply by `tokens`.",
    ),
}
for label, (changed, says) in LEDGERS.items():
    mistake("memory-ledger", label, says=says)(ledger(**changed))


@alternative("memory-ledger", "from the total of 16 bytes per weight")
def from_sixteen(hidden, intermediate, layers, tokens, mixed):
    weights, width = 2 * hidden * intermediate * layers, 4 - 2 * mixed
    kept = sum(tokens * size for _ in range(layers) for size in (hidden, intermediate))
    return {
        "optimizer": 16 * weights - 2 * width * weights,
        "gradient": width * weights,
        "parameter": width * weights,
        "activation": kept * width,
    }


# MFU.


def mfu_of(flops):
    def mfu(weights, layers, width, seq, tokens_per_s, peak_flops):
        return flops(weights, 12 * layers * width * (seq + 1) / 2, seq) * tokens_per_s / peak_flops

    return mfu


MFUS = {
    "forward only": (
        lambda weights, attention, seq: 2 * weights + attention / 3,
        "That is the forward pass alone: backward costs twice as much again.",
    ),
    "6 N and nothing else": (
        lambda weights, attention, seq: 6 * weights,
        "The scores and values of attention are missing.",
    ),
    "attention of the forward pass only": (
        lambda weights, attention, seq: 6 * weights + attention / 3,
        "The weights are counted forward and backward, attention forward only.",
    ),
    "attention as if it were not causal": (
        lambda weights, attention, seq: 6 * weights + attention * 2 * seq / (seq + 1),
        "A causal query meets (seq + 1) / 2 keys on average, not seq.",
    ),
    "half of seq keys": (
        lambda weights, attention, seq: 6 * weights + attention * seq / (seq + 1),
        "On average that is (seq + 1) / 2 keys, since a query also meets its own: not seq / 2.",
    ),
    "scores without values": (
        lambda weights, attention, seq: 6 * weights + attention / 2,
        "Scores and values are two products: 2 FLOPs per number and key each.",
    ),
    "recomputation counted as work": (
        lambda weights, attention, seq: 8 * weights + attention * 4 / 3,
        "Recomputed FLOPs are no useful work; with them the ratio is called HFU.",
    ),
    "attention backward counted once": (
        lambda weights, attention, seq: 6 * weights + attention * 2 / 3,
        "Backward costs twice the forward pass in attention, too: three units, not two.",
    ),
    "a whole sequence": (
        lambda weights, attention, seq: (6 * weights + attention) * seq,
        "That is the work of a sequence; tokens per second need the work of a token.",
    ),
    "a query does not meet itself": (
        lambda weights, attention, seq: 6 * weights + attention * (seq - 1) / (seq + 1),
        "A query also meets its own key, so the mean is (seq + 1) / 2, not (seq - 1) / 2.",
    ),
    "a multiply-add counted as one": (
        lambda weights, attention, seq: 3 * weights + attention / 2,
        "A multiplication and an addition are two FLOPs.",
    ),
}
for label, (flops, says) in MFUS.items():
    mistake("mfu", label, says=says)(mfu_of(flops))


@alternative("mfu", "as the ratio of two times")
def ratio_of_times(weights, layers, width, seq, tokens_per_s, peak_flops):
    ideal = (6 * weights + 6 * layers * width * (seq + 1)) / peak_flops
    return ideal / (1 / tokens_per_s)


@mistake("mfu", "in percent", says="That is a percentage: return the share, 0.4 for 40 %.")
def in_percent(*arguments):
    return 100 * right.mfu(*arguments)


@mistake("mfu", "one layer's attention", says="That is the attention of one layer; there are `layers` of them.")
def one_layer(weights, layers, width, seq, tokens_per_s, peak_flops):
    return right.mfu(weights, 1, width, seq, tokens_per_s, peak_flops)
