"""Spoilers of lab 25: kernels over numbers and rows."""

from course.lab25_kernels.tried import KernelAnswers

bias_relu = KernelAnswers("bias-relu")

bias_relu.mistake(
    "no mask",
    {
        "tl.load(x + place, mask=inside, other=0.0)": "tl.load(x + place)",
        "bias + place % width, mask=inside, other=0.0)": "bias + place % width)",
        "tl.store(y + place, tl.maximum(shifted, 0.0), mask=inside)": "tl.store(y + place, tl.maximum(shifted, 0.0))",
    },
    expect="mask every load and store",
)
bias_relu.mistake(
    "store not masked", {"tl.maximum(shifted, 0.0), mask=inside)": "tl.maximum(shifted, 0.0))"}, expect="stores y"
)
bias_relu.mistake("mask of one too many", {"place < n": "place <= n"}, expect="mask every load and store")
bias_relu.mistake(
    "every program computes the first tile", {"tl.program_id(0) * BLOCK + ": ""}, expect="both store to y|never stored"
)
bias_relu.mistake(
    "lanes as far apart as there are programs",
    {"tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)": "tl.arange(0, BLOCK) * tl.num_programs(0) + tl.program_id(0)"},
    expect="program_id says",
)
bias_relu.mistake(
    "the first program does it all",
    {
        "    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    inside = place < n\n": (
            "    place = tl.arange(0, 256)\n    inside = (place < n) & (tl.program_id(0) == 0)\n"
        )
    },
    expect="stored all the same",
)
bias_relu.mistake("bias not repeated", {"bias + place % width": "bias + place"}, expect="loads bias")
bias_relu.mistake(
    "no ReLU", {"tl.maximum(shifted, 0.0)": "shifted"}, says="This is x + bias: negative numbers are to be 0."
)
bias_relu.mistake(
    "ReLU before the bias",
    {
        "tl.load(x + place, mask=inside, other=0.0)": "tl.maximum(tl.load(x + place, mask=inside, other=0.0), 0.0)",
        "tl.maximum(shifted, 0.0)": "shifted",
    },
    says="The ReLU comes before the bias here; it is max(0, x + bias).",
)
bias_relu.alternative(
    "in two halves of a tile",
    {
        (
            """    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    shifted = (
        tl.load(x + place, mask=inside, other=0.0)
        + tl.load(bias + place % width, mask=inside, other=0.0)  # the same row again and again
    )
    tl.store(y + place, tl.maximum(shifted, 0.0), mask=inside)
"""
        ): (
            """    for half in range(2):
        place = tl.program_id(0) * BLOCK + half * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        inside = place < n
        row = tl.load(bias + place % width, mask=inside, other=0.0)
        shifted = tl.load(x + place, mask=inside, other=0.0) + row
        tl.store(y + place, tl.maximum(shifted, 0.0), mask=inside)
"""
        )
    },
)
bias_relu.alternative("where instead of maximum", {"tl.maximum(shifted, 0.0)": "tl.where(shifted > 0, shifted, 0.0)"})

LOOP = """    for start in range(0, width, BLOCK):
        inside = start + lane < width
        value = tl.load(
            x + row * x_row + start + lane,
            mask=inside,
            other=float("-inf"),
        ).to(tl.float32)
"""
LANES = '    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)\n' + LOOP
ONLINE = """        higher = tl.maximum(largest, value)
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - pivot) + tl.exp(value - pivot)
        largest = higher
    top = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - top), 0)
"""


softmax_rows = KernelAnswers("softmax-rows")

softmax_rows.mistake(
    "sum not shrunk",
    {"total = total * tl.exp(largest - pivot) + ": "total = total + "},
    says="When a tile brings a higher maximum, the sum so far has to shrink by exp(old - new).",
)
softmax_rows.mistake(
    "maximum begun at 0",
    {'tl.full([BLOCK], float("-inf"), tl.float32)': "tl.zeros([BLOCK], tl.float32)"},
    says="The maximum begins at 0 here: of a row far below 0 nothing is left after exp. Begin at -inf.",
)
softmax_rows.mistake(
    "sum kept in x's dtype",
    {
        "total = total * tl.exp(largest - pivot) + tl.exp(value - pivot)": (
            "total = total * tl.exp(largest - pivot) + tl.exp(value - pivot)\n"
            "        total = total.to(x.dtype.element_ty).to(tl.float32)"
        )
    },
    says="The sum is rounded to x's dtype at every tile, which drops small terms: keep it in float32.",
)
softmax_rows.mistake(
    "maximum never subtracted",
    {ONLINE: "        total += tl.exp(value)\n    top, total = 0.0, tl.sum(total, 0)\n"},
    says="Without the maximum subtracted, exp overflows from 89 on.",
)
softmax_rows.mistake(
    "-inf minus -inf",
    {'pivot = tl.where(higher == float("-inf"), 0.0, higher)': "pivot = higher"},
    says="As long as a lane or tile has seen nothing but -inf, its maximum is -inf, and -inf - (-inf) is not a number.",
)
softmax_rows.mistake(
    "three passes",
    {
        ONLINE: "        largest = tl.maximum(largest, value)\n    top = tl.max(largest, 0)\n"
        + LOOP
        + "        total += tl.exp(value - top)\n    total = tl.sum(total, 0)\n"
    },
    expect="x is read 3 times",
)
softmax_rows.mistake(
    "rows as far apart as they are wide",
    {LANES: LANES.replace("row * x_row", "row * width")},
    says="Rows of x begin x_row numbers apart, not width.",
)
softmax_rows.mistake(
    "masked lanes count as zero",
    {LANES: LANES.replace('other=float("-inf")', "other=0.0")},
    says="Masked lanes are loaded as 0, which has weight exp(0 - maximum): load them as -inf.",
)
softmax_rows.alternative(
    "logarithm of the sum", {"tl.exp(value - top) / total": "tl.exp(value - (top + tl.log(total)))"}
)
softmax_rows.alternative(
    "one maximum for the row",
    {
        LANES: '    largest, total = float("-inf"), 0.0\n' + LOOP,
        ONLINE: (
            """        higher = tl.maximum(largest, tl.max(value, 0))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - pivot) + tl.sum(tl.exp(value - pivot), 0)
        largest = higher
    top = largest
"""
        ),
    },
)


norm_kernels = KernelAnswers("norm-kernels")

norm_kernels.mistake(
    "mean over the tile",
    {"tl.sum(value * value, 0) / width + eps": "tl.sum(value * value, 0) / BLOCK + eps"},
    says="The mean is over the width of a row, not over BLOCK lanes.",
)
norm_kernels.mistake(
    "eps outside the root",
    {"1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)": "1 / (tl.sqrt(tl.sum(value * value, 0) / width) + eps)"},
    says="eps belongs under the root.",
)
norm_kernels.mistake(
    "rounded before the weight",
    {"value * scale * factor, mask": "(value * scale).to(x.dtype.element_ty).to(tl.float32) * factor, mask"},
    says="x · r is rounded to x's dtype here, before the weight: round once, with the store.",
)
norm_kernels.mistake(
    "all programs add to the first row of partial",
    {
        "tl.store(partial + program * width + lane, total, mask=inside)": (
            "tl.store(partial + lane, total + tl.load(partial + lane, mask=inside, other=0.0), mask=inside)"
        )
    },
    expect="both store to partial|not a number",
)
norm_kernels.mistake(
    "last program's rows not masked",
    {
        "there = inside & (row < rows)": "there = inside",
        "tl.load(r + row, mask=row < rows, other=0.0)": "tl.load(r + row)",
    },
    expect="mask every load and store",
)
norm_kernels.mistake(
    "r taken for a constant",
    {"scale * (given * factor - normed * mean)": "scale * given * factor"},
    says="r depends on x as well: without the second term dx is as if it did not.",
)
norm_kernels.mistake(
    "dy without the weight in the mean",
    {"mean = tl.sum(given * factor * normed, 0)": "mean = tl.sum(given * normed, 0)"},
    says="The mean is of g · x̂, and g is dy times the weight.",
)
norm_kernels.mistake(
    "weight in the weight's own gradient",
    {"total += given * normed": "total += given * factor * normed"},
    says="dw is the sum of dy · x̂; the weight itself is not in it.",
)
norm_kernels.alternative(
    "another order of factors, rsqrt",
    {
        "scale = 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)": (
            "scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)"
        ),
        "scale * (given * factor - normed * mean)": "scale * given * factor - scale * normed * mean",
    },
)
