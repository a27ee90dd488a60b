"""Spoilers of lab 02: bytes and FLOPs as people miscount them, and right counts that look different."""

from course.lab02_one_device import checks as right
from minillm.labkit.exercises import alternative, mistake


def ledger(**changed):
    """The right ledger with some kinds replaced by functions of (hidden, intermediate, layers, tokens, mixed)."""

    def memory_ledger(*shape):
        return right.memory_ledger(*shape) | {kind: size(*shape) for kind, size in changed.items()}

    return memory_ledger


# Memory by kind.

mistake("memory-ledger", "Adam with one moment", expect="Adam keeps two moments")(
    ledger(optimizer=lambda h, f, n, t, mixed: 4 * 2 * n * h * f)
)
mistake("memory-ledger", "mixed precision without its master copy", expect="master copy is missing")(
    ledger(optimizer=lambda h, f, n, t, mixed: 8 * 2 * n * h * f)
)
mistake("memory-ledger", "ReLU's input counted as well", expect="the same tensor, counted once")(
    ledger(activation=lambda h, f, n, t, mixed: (2 if mixed else 4) * t * n * (h + 2 * f))
)
mistake("memory-ledger", "only what the second matmul reads", expect="up keeps its input")(
    ledger(activation=lambda h, f, n, t, mixed: (2 if mixed else 4) * t * n * f)
)
mistake("memory-ledger", "one block's activations", expect="until backward comes back")(
    ledger(activation=lambda h, f, n, t, mixed: (2 if mixed else 4) * t * (h + f))
)
mistake("memory-ledger", "float32 gradients in mixed precision", expect="16-bit gradients")(
    ledger(gradient=lambda h, f, n, t, mixed: 4 * 2 * n * h * f)
)


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


mistake("mfu", "forward only", expect="forward alone")(
    mfu_of(lambda weights, attention, seq: 2 * weights + attention / 3)
)
mistake("mfu", "6 N and nothing else", expect="scores and values are missing")(
    mfu_of(lambda weights, attention, seq: 6 * weights)
)
mistake("mfu", "attention as if it were not causal", expect="counted twice")(
    mfu_of(lambda weights, attention, seq: 6 * weights + attention * 2 * seq / (seq + 1))
)
mistake("mfu", "recomputation counted as work", expect="HFU")(
    mfu_of(lambda weights, attention, seq: 8 * weights + attention * 4 / 3)
)
mistake("mfu", "a multiply-add counted as one", expect="two FLOPs")(
    mfu_of(lambda weights, attention, seq: 3 * weights + attention / 2)
)


@alternative("mfu", "as the ratio of two times")
def ratio_of_times(weights, layers, width, seq, tokens_per_s, peak_flops):
    ideal = (6 * weights + 6 * layers * width * (seq + 1)) / peak_flops
    return ideal / (1 / tokens_per_s)
