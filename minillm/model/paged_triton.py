"""Paged attention as a Triton kernel that splits the keys, too (Dao et al. 2023, Flash-Decoding).

A decoding sequence brings one query. A kernel with one program per (sequence, kv head) leaves most of a GPU idle when
few sequences run, however long they are. So the keys of each are divided as well, and the parts are joined afterwards:

keys        0 ········ │ ········ │ ········ │ ···· n     one program per (tile of queries, kv head, split)
            y₀, ln Σ₀    y₁, ln Σ₁   y₂, ln Σ₂   y₃, ln Σ₃  each: its own softmax, and the logarithm of its sum
                  ╰──────────┴── combine ──┴──────────╯     y = Σ wᵢ yᵢ / Σ wᵢ, wᵢ = exp(ln Σᵢ)

Rows of a tile are the query heads of one kv head (for a prompt piece: of several tokens), so that each key is read once
for all of them. Keys come by their slot number one by one, not block by block: blocks may be of any size, 1 included.
On the CPU only in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.model.attention import Attend

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch for CUDA on Linux; the CPU's torch is without
    triton = tl = None

TILE_BYTES = 16 << 10  # of queries, of keys and of values: what a program keeps close to its compute unit
MIN_KEYS = 256  # of a split: fewer are not worth a partial result that is written and read again
UNLIMITED = (1 << 31) - 1
VARYING = ("window", "all_rows", "table_width", "splits")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TritonSplitKV:
    """A backend of `paged_attention`, shapes as there; sums in float32. splits: of the keys; None = as many as fill the
    GPU twice. Raises ValueError without triton, off the GPU without its interpreter, and for other dtypes than DTYPES.
    """

    splits: int | None = None

    def __post_init__(self):
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"splits {self.splits} must be at least 1, or None to let the GPU's size decide.")

    def __call__(self, q, k_pool, v_pool, block_table, query_lens, context_lens, *, window: int | None) -> Tensor:
        return self.prepare(q, k_pool, block_table, query_lens, context_lens, window=window)(q, k_pool, v_pool)

    def prepare(self, q, k_pool, block_table, query_lens, context_lens, *, window: int | None) -> Attend:
        _check(q, k_pool)
        (tokens, heads, head_dim), (_, block_size, kv_heads, _) = q.shape, k_pool.shape
        group, dims = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))  # tl.dot takes 16 or more
        columns = min(64, max(16, TILE_BYTES // (dims * q.element_size())))
        rows = min(columns, triton.next_power_of_2(max(query_lens) * group))
        rows = max(16, rows, triton.next_power_of_2(group))
        tiles = torch.tensor(list(_tiles(query_lens, context_lens, rows // group)), dtype=torch.int32).to(q.device)
        longest = min(max(context_lens), (window or UNLIMITED) + rows // group)
        splits = self.splits or _splits(len(tiles) * kv_heads, longest, q.device)
        block_table = block_table.contiguous()
        constants = (group, head_dim, block_size, rows, columns, dims, _factors(q.dtype))

        def launch(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
            _check_layer(q, k_pool, v_pool)
            q = q.contiguous()
            parts = torch.empty((splits, *q.shape), device=q.device, dtype=q.dtype if splits == 1 else torch.float32)
            log_sums = torch.empty((splits, tokens, heads), device=q.device, dtype=torch.float32)
            attend[len(tiles), kv_heads, splits](
                *(q, k_pool, v_pool, block_table, tiles, parts, log_sums),
                *(head_dim**-0.5, UNLIMITED if window is None else window),
                *(tokens * heads, block_table.shape[1], *k_pool.stride()[:3], *constants),
                num_stages=2,
            )
            if splits == 1:
                return parts[0]
            y, sizes = torch.empty_like(q), (splits, tokens * heads, head_dim, dims, triton.next_power_of_2(splits))
            combine[(tokens * heads,)](parts, log_sums, y, *sizes)
            return y

        return launch


triton_split_kv = TritonSplitKV()


def kernel(function: Callable) -> Callable:
    """triton.jit without a compilation of its own for every divisor of what changes from step to step."""
    return function if triton is None else triton.jit(function, do_not_specialize=VARYING)


@kernel
def attend(
    q,  # [tokens, heads, head_dim]
    k_pool,  # [num_blocks, block_size, kv_heads, head_dim]
    v_pool,
    block_table,  # [sequences, table_width]
    tiles,  # [tiles, 4], int32: see `_tiles`
    parts,  # [splits, tokens, heads, head_dim]: softmax over this split's keys, times values
    log_sums,  # [splits, tokens, heads]: ln Σ exp(score) over this split's keys
    scale,
    window,
    all_rows,
    table_width,
    block_stride,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, token = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    count, position = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside, wide = row < count * GROUP, dim < HEAD_DIM
    q_position = position + row // GROUP
    q_row = ((token + row // GROUP) * tl.num_programs(1) + kv_head) * GROUP + row % GROUP
    q_mask = inside[:, None] & wide[None, :]
    queries = tl.load(q + q_row[:, None] * HEAD_DIM + dim[None, :], mask=q_mask, other=0.0).to(FACTORS)

    first, end = tl.maximum(position - window + 1, 0), position + count  # what any of these queries sees
    span = tl.cdiv(tl.cdiv(end - first, tl.num_programs(2)), COLUMNS) * COLUMNS
    start = first + split * span
    end = tl.minimum(end, start + span)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIMS], tl.float32)
    for at in range(start, end, COLUMNS):
        k_position = at + tl.arange(0, COLUMNS)
        there = k_position < end
        block = tl.load(block_table + sequence * table_width + k_position // BLOCK_SIZE, mask=there, other=0)
        slot = block.to(tl.int64) * block_stride + k_position % BLOCK_SIZE * slot_stride + kv_head * head_stride
        k_mask = there[:, None] & wide[None, :]
        keys = tl.load(k_pool + slot[:, None] + dim[None, :], mask=k_mask, other=0.0).to(FACTORS)
        values = tl.load(v_pool + slot[:, None] + dim[None, :], mask=k_mask, other=0.0).to(FACTORS)

        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        distance = q_position[:, None] - k_position[None, :]
        scores = tl.where((distance >= 0) & (distance < window) & there[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: exp(-inf - 0) = 0, not nan
        weights, shrink = tl.exp(scores - pivot[:, None]), tl.exp(largest - pivot)
        total = total * shrink + tl.sum(weights, 1)
        product = tl.dot(weights.to(FACTORS), values, input_precision="ieee")
        weighted = weighted * shrink[:, None] + product
        largest = higher

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees none of this split's keys: 0, and ln Σ = -inf
    out = split.to(tl.int64) * all_rows + q_row
    tl.store(parts + out[:, None] * HEAD_DIM + dim[None, :], weighted / total[:, None], mask=q_mask)
    tl.store(log_sums + out, largest + tl.log(total), mask=inside)


@kernel
def combine(parts, log_sums, y, splits, all_rows, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr):
    """One program per query and head: the mean of its parts, each weighted by its sum."""
    row = tl.program_id(0)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    there, wide = split < splits, dim < HEAD_DIM
    at = split.to(tl.int64) * all_rows + row
    log_sum = tl.load(log_sums + at, mask=there, other=float("-inf"))
    weights = tl.exp(log_sum - tl.max(log_sum, 0))
    mask = there[:, None] & wide[None, :]
    part = tl.load(parts + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    mean = tl.sum(weights[:, None] * part, 0) / tl.sum(weights, 0)
    tl.store(y + row.to(tl.int64) * HEAD_DIM + dim, mean, mask=wide)


def _tiles(query_lens: Sequence[int], context_lens: Sequence[int], size: int) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, row of q that is its first, how many tokens (at most `size`), position of the first), tile by tile.

    No keys are needed beyond a tile's last token: causality is in where it ends.
    """
    start = 0
    for sequence, (length, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        for done in range(0, length, size):
            yield sequence, start + done, min(size, length - done), context - length + done
        start += length


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """A power of two: what fills every compute unit twice, as long as each split has MIN_KEYS keys."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = max(1, min(2 * units // programs, longest // MIN_KEYS))
    return 1 << (wanted.bit_length() - 1)


def _factors(dtype: torch.dtype):
    """What tl.dot multiplies: the inputs as they are. The interpreter takes bfloat16 for integers (triton#11584)."""
    if dtype is torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _check(q: Tensor, k_pool: Tensor) -> None:
    if triton is None:
        raise ValueError("triton_split_kv needs the package triton: `pip install triton`, or use backend=gathered.")
    if not (q.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(
            f"triton_split_kv runs on a CUDA GPU, not on {q.device}: use backend=gathered, or set TRITON_INTERPRET=1 "
            "before Python starts to run it in Triton's interpreter."
        )
    if q.dtype not in DTYPES or k_pool.dtype != q.dtype:
        raise ValueError(
            f"queries of {q.dtype} and keys of {k_pool.dtype}: triton_split_kv takes float32, bfloat16 or float16 for "
            "both; use backend=gathered for others."
        )


def _check_layer(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    if not q.dtype == k_pool.dtype == v_pool.dtype or k_pool.stride() != v_pool.stride() or k_pool.stride(-1) != 1:
        raise ValueError(
            f"k_pool is {k_pool.dtype} with strides {k_pool.stride()}, v_pool {v_pool.dtype} with {v_pool.stride()}: "
            f"triton_split_kv wants both {q.dtype}, with equal strides, the last of them 1."
        )
