"""Spoilers of lab 02: bytes and FLOPs as people miscount them, and right counts that look different."""

from course.kit.exercises import alternative, mistake

# Memory by kind.

mistake(
    "memory-ledger",
    "Adam with one moment",
    {"(12 if mixed else 8)": "4"},
    says="Adam keeps two moments of every weight, both in float32.",
)
mistake(
    "memory-ledger",
    "mixed precision without its master copy",
    {"(12 if mixed else 8)": "8"},
    says="With 16-bit weights the optimizer also owns a float32 copy of them, the masters.",
)
mistake(
    "memory-ledger",
    "ReLU's input counted as well",
    {"hidden + intermediate": "hidden + 2 * intermediate"},
    says="ReLU keeps its output, which is the input of down: one tensor, counted once.",
)
mistake(
    "memory-ledger",
    "one matrix per block",
    {'"parameter": width * weights': '"parameter": width * weights // 2'},
    says="Each block has two matrices, up and down.",
)
mistake(
    "memory-ledger",
    "float32 gradients in mixed precision",
    {'"gradient": width * weights': '"gradient": 4 * weights'},
    says="A weight in 16 bits gets a gradient in 16 bits.",
)
mistake(
    "memory-ledger",
    "the last output counted",
    {"layers * (hidden + intermediate)": "(layers * (hidden + intermediate) + hidden)"},
    says="The output of the last block is no input of a matmul: nothing in this model needs it for backward.",
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

mistake(
    "mfu",
    "forward only",
    {"3 * forward": "forward"},
    says="That is the forward pass alone: backward costs twice as much again.",
)
mistake(
    "mfu",
    "6 N and nothing else",
    {" + 4 * layers * width * (seq + 1) / 2": ""},
    says="The scores and values of attention are missing.",
)
mistake(
    "mfu",
    "attention as if it were not causal",
    {"(seq + 1) / 2": "seq"},
    says="A causal query meets (seq + 1) / 2 keys on average, not seq.",
)
mistake(
    "mfu",
    "scores without values",
    {"4 * layers": "2 * layers"},
    says="Scores and values are two products: 2 FLOPs per number and key each.",
)
mistake(
    "mfu",
    "recomputation counted as work",
    {"3 * forward": "4 * forward"},
    says="Recomputed FLOPs are no useful work; with them the ratio is called HFU.",
)


@alternative("mfu", "as the ratio of two times")
def ratio_of_times(weights, layers, width, seq, tokens_per_s, peak_flops):
    ideal = (6 * weights + 6 * layers * width * (seq + 1)) / peak_flops
    return ideal / (1 / tokens_per_s)


mistake(
    "mfu",
    "one layer's attention",
    {"4 * layers": "4"},
    says="That is the attention of one layer; there are `layers` of them.",
)
