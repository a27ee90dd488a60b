"""Spoilers of lab 13's optional kernel, as functions whose text can be read."""

# ruff: noqa: F821 (tl is imported where the kernel runs)

from course.kit.exercises import KnownAnswers
from course.shared.kernels import INSTALLED

triton_kernel = KnownAnswers("triton-kernel", here=INSTALLED)


@triton_kernel.mistake("no mask behind the context", expect="mask the loads")
def unmasked(q, k_pool, v_pool, table, y, context, scale, GROUP, KV_HEADS, SIZE, DIM):
    head, dims, places = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, SIZE)
    query = tl.load(q + head * DIM + dims) * scale
    total, weighted = 0.0, tl.zeros([DIM], tl.float32)
    for first in range(0, context, SIZE):
        rows = (tl.load(table + first // SIZE) * SIZE + places) * KV_HEADS + head // GROUP
        at = rows[:, None] * DIM + dims
        weights = tl.exp(tl.sum(tl.load(k_pool + at) * query, 1))
        total += tl.sum(weights, 0)
        weighted += tl.sum(weights[:, None] * tl.load(v_pool + at), 0)
    tl.store(y + head * DIM + dims, weighted / total)


@triton_kernel.mistake(
    "masked scores are zero",
    says="Masked keys are loaded as 0 and still get a score of 0, which has weight. Their score must be -inf.",
)
def zero_scores(q, k_pool, v_pool, table, y, context, scale, GROUP, KV_HEADS, SIZE, DIM):
    head, dims, places = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, SIZE)
    query = tl.load(q + head * DIM + dims) * scale
    total, weighted = 0.0, tl.zeros([DIM], tl.float32)
    for first in range(0, context, SIZE):
        rows = (tl.load(table + first // SIZE) * SIZE + places) * KV_HEADS + head // GROUP
        at, filled = rows[:, None] * DIM + dims, (first + places < context)[:, None]
        weights = tl.exp(tl.sum(tl.load(k_pool + at, mask=filled, other=0.0) * query, 1))
        total += tl.sum(weights, 0)
        weighted += tl.sum(weights[:, None] * tl.load(v_pool + at, mask=filled, other=0.0), 0)
    tl.store(y + head * DIM + dims, weighted / total)


@triton_kernel.mistake(
    "kv heads in turn",
    says="Query heads meet the wrong kv heads: neighbours share one, so head h reads kv head h // GROUP.",
)
def heads_in_turn(q, k_pool, v_pool, table, y, context, scale, GROUP, KV_HEADS, SIZE, DIM):
    head, dims, places = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, SIZE)
    query = tl.load(q + head * DIM + dims) * scale
    total, weighted = 0.0, tl.zeros([DIM], tl.float32)
    for first in range(0, context, SIZE):
        rows = (tl.load(table + first // SIZE) * SIZE + places) * KV_HEADS + head % KV_HEADS
        at, filled = rows[:, None] * DIM + dims, first + places < context
        scores = tl.sum(tl.load(k_pool + at, mask=filled[:, None], other=0.0) * query, 1)
        weights = tl.exp(tl.where(filled, scores, float("-inf")))
        total += tl.sum(weights, 0)
        weighted += tl.sum(weights[:, None] * tl.load(v_pool + at, mask=filled[:, None], other=0.0), 0)
    tl.store(y + head * DIM + dims, weighted / total)


@triton_kernel.mistake("no maximum", expect="exp overflows")
def no_maximum(q, k_pool, v_pool, table, y, context, scale, GROUP, KV_HEADS, SIZE, DIM):
    head, dims, places = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, SIZE)
    query = tl.load(q + head * DIM + dims) * scale
    total, weighted = 0.0, tl.zeros([DIM], tl.float32)
    for first in range(0, context, SIZE):
        rows = (tl.load(table + first // SIZE) * SIZE + places) * KV_HEADS + head // GROUP
        at, filled = rows[:, None] * DIM + dims, first + places < context
        scores = tl.sum(tl.load(k_pool + at, mask=filled[:, None], other=0.0) * query, 1)
        weights = tl.where(filled, tl.exp(scores), 0.0)
        total += tl.sum(weights, 0)
        weighted += tl.sum(weights[:, None] * tl.load(v_pool + at, mask=filled[:, None], other=0.0), 0)
    tl.store(y + head * DIM + dims, weighted / total)


@triton_kernel.mistake(
    "scale is not used",
    says="Scores are multiplied by the argument `scale`, which its caller chooses; 1/√DIM is only the usual one.",
)
def own_scale(q, k_pool, v_pool, table, y, context, scale, GROUP, KV_HEADS, SIZE, DIM):
    head, dims, places = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, SIZE)
    query = tl.load(q + head * DIM + dims) / DIM**0.5
    total, weighted = 0.0, tl.zeros([DIM], tl.float32)
    for first in range(0, context, SIZE):
        rows = (tl.load(table + first // SIZE) * SIZE + places) * KV_HEADS + head // GROUP
        at, filled = rows[:, None] * DIM + dims, first + places < context
        scores = tl.sum(tl.load(k_pool + at, mask=filled[:, None], other=0.0) * query, 1)
        weights = tl.where(filled, tl.exp(scores), 0.0)
        total += tl.sum(weights, 0)
        weighted += tl.sum(weights[:, None] * tl.load(v_pool + at, mask=filled[:, None], other=0.0), 0)
    tl.store(y + head * DIM + dims, weighted / total)


@triton_kernel.alternative("one key after the other")
def key_by_key(q, k_pool, v_pool, table, y, context, scale, GROUP, KV_HEADS, SIZE, DIM):
    head, dims = tl.program_id(0), tl.arange(0, DIM)
    query = tl.load(q + head * DIM + dims)
    largest, total, weighted = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for place in range(0, context):
        slot = tl.load(table + place // SIZE) * SIZE + place % SIZE
        at = (slot * KV_HEADS + head // GROUP) * DIM + dims
        score = tl.sum(query * tl.load(k_pool + at), 0) * scale
        higher = tl.maximum(largest, score)
        weight, shrink = tl.exp(score - higher), tl.exp(largest - higher)
        total, weighted = total * shrink + weight, weighted * shrink + weight * tl.load(v_pool + at)
        largest = higher
    tl.store(y + head * DIM + dims, weighted / total)
