"""Spoilers of lab 25: kernels of a decoding layer."""

from course.lab25_kernels.tried import KernelAnswers

matmul_tiles = KernelAnswers("matmul-tiles")

matmul_tiles.mistake(
    "k's tail not masked",
    {"(row[:, None] < m) & (inner[None, :] < k)": "(row[:, None] < m) & (inner[None, :] > -1)",
     "(inner[:, None] < k) & (column[None, :] < n)": "(inner[:, None] > -1) & (column[None, :] < n)"},
    expect="mask every load and store",
)  # fmt: skip
matmul_tiles.mistake(
    "sum in float16",
    {"tl.zeros([M, N], tl.float32)": "tl.zeros([M, N], c.dtype.element_ty)",
     "total += tl.dot(left, right)": "total = (total + tl.dot(left, right)).to(c.dtype.element_ty)"},
    says="The sum is kept in float16: every step of k rounds it to 11 bits. Keep it in float32 until the end.",
)  # fmt: skip
matmul_tiles.mistake(
    "product of two tiles in float16",
    {"tl.dot(left, right)": "tl.dot(left, right, out_dtype=c.dtype.element_ty)"},
    says="tl.dot adds up in float16 here, too: its result, of one tile of k, belongs in float32.",
)
matmul_tiles.mistake(
    "rows and columns wrap around",
    {"a + row[:, None] * a_row": "a + (row % m)[:, None] * a_row",
     "column[None, :] * b_column": "(column % n)[None, :] * b_column",
     "(row[:, None] < m) & (inner[None, :] < k)": "inner[None, :] < k",
     "(inner[:, None] < k) & (column[None, :] < n)": "inner[:, None] < k"},
    expect="formula says",
)  # fmt: skip
matmul_tiles.mistake(
    "strides of a contiguous A",
    {"row[:, None] * a_row + inner[None, :] * a_column": "row[:, None] * k + inner[None, :]"},
    says="A is read as if it were contiguous: element (row, column) is at row · a_row + column · a_column.",
)
matmul_tiles.mistake(
    "only the last tile of k",
    {"total += tl.dot(left, right)": "total = tl.dot(left, right)"},
    says="Only the last tile of k is kept: the tiles' products add up.",
)
matmul_tiles.mistake("every tile of k twice", {"range(0, k, K)": "range(0, k, K // 2)"}, expect="in float64")
matmul_tiles.mistake("the grid's axes exchanged",
      {"tl.program_id(0) * M": "tl.program_id(1) * M", "tl.program_id(1) * N": "tl.program_id(0) * N"},
      expect="never stored|formula says")  # fmt: skip
matmul_tiles.alternative(
    "the sum handed to tl.dot", {"total += tl.dot(left, right)": "total = tl.dot(left, right, total)"}
)


between_products = KernelAnswers("between-products")

between_products.mistake(
    "both halves turned the same way",
    {"first * c - second * s": "first * c + second * s"},
    says="The first half loses second · sin: with a plus, this is no rotation.",
)
between_products.mistake(
    "turned backwards",
    {"first * c - second * s": "first * c + second * s", "second * c + first * s": "second * c - first * s"},
    says="This turns by the negative angle.",
)
between_products.mistake(
    "rows of x as far apart as in y",
    {"x + token * x_row + head * 2 * half": "x + (token * heads + head) * 2 * half"},
    says="Tokens of x lie x_row numbers apart; only y is contiguous.",
)
between_products.mistake(
    "halves of the head not masked",
    {"tl.load(source + half + lane, mask=inside, other=0.0)": "tl.load(source + half + lane)"},
    expect="mask every load and store|formula says",
)
between_products.mistake(
    "sigmoid in place of silu",
    {"z * tl.sigmoid(z) * up": "tl.sigmoid(z) * up"},
    says="silu(z) is z · sigmoid(z); this is the sigmoid alone.",
)
between_products.mistake(
    "silu rounded before the product",
    {"z * tl.sigmoid(z) * up": "(z * tl.sigmoid(z)).to(both.dtype.element_ty).to(tl.float32) * up"},
    says="silu(gate) is rounded to 16 bits here before it meets up: keep float32 until the store.",
)
between_products.mistake(
    "up and gate exchanged",
    {"z * tl.sigmoid(z) * up": "z * tl.sigmoid(up) * up"},
    says="The activation is applied to the ups, and gates come first.",
)
between_products.mistake(
    "rows of gates alone",
    {"both + row * 2 * width + lane": "both + row * width + lane"},
    says="A row of both has 2 · width numbers.",
)
between_products.alternative("silu by exp", {"z * tl.sigmoid(z) * up": "z / (1 + tl.exp(-z)) * up"})


paged_decode = KernelAnswers("paged-decode")

paged_decode.mistake(
    "no mask behind the length",
    {"tl.load(keys + at, mask=filled[:, None], other=0.0)": "tl.load(keys + at)",
     "tl.load(values + at, mask=filled[:, None], other=0.0)": "tl.load(values + at)"},
    expect="not a number",
)  # fmt: skip
paged_decode.mistake(
    "masked scores are zero",
    {'tl.where(filled[None, :], scores, float("-inf"))': "tl.where(filled[None, :], scores, 0.0)"},
    says="Masked keys get a score of 0, which has weight: their score must be -inf.",
)
paged_decode.mistake(
    "no maximum subtracted",
    {"higher = tl.maximum(largest, tl.max(scores, 1))": "higher = tl.zeros([GROUP], tl.float32)",
     "tl.exp(largest - higher)": "tl.full([GROUP], 1.0, tl.float32)"},
    says="The scores' maximum is not subtracted: above 88 exp overflows, and far below 0 nothing is left.",
)  # fmt: skip
paged_decode.mistake("a block too many", {"tl.cdiv(context, SIZE)": "context // SIZE + 1"}, expect="loads table")
paged_decode.mistake(
    "blocks in order, without the table",
    {"tl.load(table + sequence * most + block) * SIZE": "(sequence * most + block) * SIZE"},
    expect="not a number|in float64",
)
paged_decode.mistake(
    "the first sequence's table for all",
    {"tl.load(table + sequence * most + block)": "tl.load(table + block)"},
    expect="not a number|in float64",
)
paged_decode.mistake(
    "heads in turn",
    {"rows = (sequence * KV_HEADS + head) * GROUP + tl.arange(0, GROUP)": "rows = sequence * KV_HEADS * GROUP + head + "
     "KV_HEADS * tl.arange(0, GROUP)"},
    says="Neighbouring query heads share a key-value head: head h · GROUP + g reads kv head h.",
)  # fmt: skip
paged_decode.mistake(
    "sum of values not shrunk",
    {"weighted = weighted * shrink[:, None] + ": "weighted = weighted + "},
    says="When the maximum rises, the weighted sum of values has to shrink as well as the sum of weights.",
)
paged_decode.mistake(
    "scores not scaled",
    {"tl.load(q + rows[:, None] * DIM + dim[None, :]) * scale": "tl.load(q + rows[:, None] * DIM + dim[None, :])"},
    says="The scores are not multiplied by scale.",
)
paged_decode.alternative(
    "scaled scores instead of scaled queries",
    {
        "tl.load(q + rows[:, None] * DIM + dim[None, :]) * scale": "tl.load(q + rows[:, None] * DIM + dim[None, :])",
        "scores = tl.sum(query[:, None, :] * key[None, :, :], 2)": (
            "scores = tl.sum(query[:, None, :] * key[None, :, :], 2) * scale"
        ),
    },
)
