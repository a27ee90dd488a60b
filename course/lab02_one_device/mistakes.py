"""Spoilers of lab 02: bytes and FLOPs as people miscount them, and right counts that look different."""

from course.kit.exercises import KnownAnswers

# Memory by kind.

memory_ledger = KnownAnswers("memory-ledger")

memory_ledger.mistake(
    "Adam with one moment",
    {"(12 if mixed else 8)": "4"},
    says="Adam keeps two moments of every weight, both in float32.",
)
memory_ledger.mistake(
    "mixed precision without its master copy",
    {"(12 if mixed else 8)": "8"},
    says="With 16-bit weights the optimizer also owns a float32 copy of them, the masters.",
)
memory_ledger.mistake(
    "ReLU's input counted as well",
    {"hidden + intermediate": "hidden + 2 * intermediate"},
    says="ReLU keeps its output, which is the input of down: one tensor, counted once.",
)
memory_ledger.mistake(
    "one matrix per block",
    {'"parameter": width * weights': '"parameter": width * weights // 2'},
    says="Each block has two matrices, up and down.",
)
memory_ledger.mistake(
    "float32 gradients in mixed precision",
    {'"gradient": width * weights': '"gradient": 4 * weights'},
    says="A weight in 16 bits gets a gradient in 16 bits.",
)
memory_ledger.mistake(
    "the last output counted",
    {"layers * (hidden + intermediate)": "(layers * (hidden + intermediate) + hidden)"},
    says="The output of the last block is no input of a matmul: nothing in this model needs it for backward.",
)
memory_ledger.mistake(
    "masters and moments in 16 bits",
    {"(12 if mixed": "(6 if mixed"},
    says="Masters and moments all stay in float32: 12 bytes per weight.",
)
memory_ledger.mistake(
    "float32 weights in mixed precision",
    {'"parameter": width': '"parameter": 4'},
    says="The model's own weights are stored in 16 bits here; the float32 copy belongs to the optimizer.",
)
memory_ledger.mistake(
    "only what the second matmul reads",
    {"(hidden + intermediate)": "intermediate"},
    says="up keeps its input as well: its weight's gradient needs it.",
)
memory_ledger.mistake(
    "the addition's input counted",
    {"(hidden + intermediate)": "(2 * hidden + intermediate)"},
    says="An addition keeps nothing: its gradients do not depend on its inputs.",
)
memory_ledger.mistake(
    "one block's activations",
    {"tokens * layers": "tokens"},
    says="Every block's activations stay until the backward pass reaches that block.",
)
memory_ledger.mistake(
    "float32 activations in mixed precision",
    {'"activation": width': '"activation": 4'},
    says="16-bit weights and inputs make 16-bit activations.",
)
memory_ledger.mistake(
    "sixteen bytes in the optimizer alone",
    {"(12 if mixed": "(16 if mixed"},
    says="16 is the sum of weights, gradients and optimizer; masters and moments are 12 of it.",
)
memory_ledger.mistake(
    "elements",
    {'"parameter": width * weights': '"parameter": weights'},
    says="That is a number of weights; each takes 4 bytes, or 2 in 16 bits.",
)
memory_ledger.mistake(
    "tokens forgotten", {"tokens * layers": "layers"}, says="Activations exist for every token: multiply by `tokens`."
)


@memory_ledger.alternative("from the total of 16 bytes per weight")
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

mfu = KnownAnswers("mfu")

mfu.mistake(
    "forward only",
    {"3 * forward": "forward"},
    says="That is the forward pass alone: backward costs twice as much again.",
)
mfu.mistake(
    "6 N and nothing else",
    {" + 4 * layers * width * (seq + 1) / 2": ""},
    says="The scores and values of attention are missing.",
)
mfu.mistake(
    "attention as if it were not causal",
    {"(seq + 1) / 2": "seq"},
    says="A causal query meets (seq + 1) / 2 keys on average; PaLM's own formula counts all seq.",
)
mfu.mistake(
    "scores without values",
    {"4 * layers": "2 * layers"},
    says="Scores and values are two products: 2 FLOPs per number and key each.",
)
mfu.mistake(
    "recomputation counted as work",
    {"3 * forward": "4 * forward"},
    says="Recomputed FLOPs are no useful work; with them the ratio is called HFU.",
)
mfu.mistake(
    "attention of the forward pass only",
    {"3 * forward": "(forward + 4 * weights)"},
    says="The weights are counted forward and backward, attention forward only.",
)
mfu.mistake(
    "half of seq keys",
    {"seq + 1": "seq"},
    says="On average that is (seq + 1) / 2 keys, since a query also meets its own: not seq / 2.",
)
mfu.mistake(
    "whole keys",
    {"(seq + 1) / 2": "((seq + 1) // 2)"},
    says="For an even seq the mean is not whole: divide with /.",
)
mfu.mistake(
    "attention backward counted once",
    {"3 * forward": "(2 * forward + 2 * weights)"},
    says="Backward costs twice the forward pass in attention, too: three units, not two.",
)
mfu.mistake(
    "a whole sequence",
    {"3 * forward": "seq * 3 * forward"},
    says="That is the work of a sequence; tokens per second need the work of a token.",
)
mfu.mistake(
    "a query does not meet itself",
    {"seq + 1": "seq - 1"},
    says="A query also meets its own key, so the mean is (seq + 1) / 2, not (seq - 1) / 2.",
)
mfu.mistake(
    "a multiply-add counted as one",
    {"3 * forward": "3 * forward / 2"},
    says="A multiplication and an addition are two FLOPs.",
)
mfu.mistake(
    "in percent", {"3 * forward": "100 * 3 * forward"}, says="That is a percentage: return the share, 0.4 for 40 %."
)


@mfu.alternative("as the ratio of two times")
def ratio_of_times(weights, layers, width, seq, tokens_per_s, peak_flops):
    ideal = (6 * weights + 6 * layers * width * (seq + 1)) / peak_flops
    return ideal / (1 / tokens_per_s)


mfu.mistake(
    "one layer's attention", {"4 * layers": "4"}, says="That is the attention of one layer; there are `layers` of them."
)
