"""Paged attention as a Triton kernel that splits the keys, too (Dao et al. 2023, Flash-Decoding).

A decoding sequence brings one query. A kernel with one program per (sequence, kv head) leaves most of a GPU idle when
few sequences run, however long they are. So the keys of each are divided as well, and the parts are joined afterwards:

keys        0 ········ │ ········ │ ········ │ ···· n     one program per (tile of queries, split) and kv head
            y₀, ln Σ₀    y₁, ln Σ₁   y₂, ln Σ₂   y₃, ln Σ₃  each: its own softmax, and the logarithm of its sum
                  ╰──────────┴── combine ──┴──────────╯     y = Σ wᵢ yᵢ / Σ wᵢ, wᵢ = exp(ln Σᵢ)

Rows of a tile are the query heads of one kv head (for a prompt piece: of several tokens), so that each key is read once
for all of them. Keys come by their slot number one by one, not block by block: blocks may be of any size, 1 included.
Of a `QuantizedPool` codes are multiplied; a key's scale then multiplies its score, a value's scale its weight.
On the CPU only in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minillm.model.attention.causal import Attend
from minillm.model.kernels import TILE_BYTES, UNLIMITED, check_kernel, factors, kernel, tl, triton
from minillm.model.paged.quantized import QuantizedPool
from minillm.model.paged.split import count_splits, cut_tiles, share_work
from minillm.model.paged.tables import to_device

_kernel = kernel("window", "table_width")


@dataclass(frozen=True)
class TritonSplitKV:
    """A backend of `paged_attention`, shapes as there; sums in float32. splits: of each sequence's keys; None = what
    fills the GPU twice, see `count_splits`. Raises ValueError without triton, off the GPU without its interpreter, and
    for other dtypes than `kernels.DTYPES`.
    """

    splits: int | None = None

    def __post_init__(self):
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"splits {self.splits} must be at least 1, or None to let the GPU's size decide.")

    def __call__(self, q, k_pool, v_pool, block_table, query_lens, context_lens, **options) -> Tensor:
        return self.prepare(q, k_pool, block_table, query_lens, context_lens, **options)(q, k_pool, v_pool)

    def prepare(
        self, q, k_pool, block_table, query_lens, context_lens, *, window: int | None, soft_cap: float | None = None
    ) -> Attend:
        check_kernel("triton_split_kv", "backend=gathered", queries=q, **_floats(keys=k_pool))
        heads, kv_heads = q.shape[1], k_pool.shape[2]
        kernel = _Launch.of(q, k_pool, max(query_lens), window, soft_cap)
        tiles = cut_tiles(query_lens, context_lens, kernel.rows // (heads // kv_heads))
        keys = np.minimum(tiles[:, 3] + tiles[:, 2], kernel.reach + tiles[:, 2] - 1)
        splits = (
            count_splits(keys, kv_heads, _units(q.device)) if self.splits is None else np.full(len(tiles), self.splits)
        )
        work, places = (each.int() for each in to_device(share_work(tiles, splits), q.device))
        most, partial_tokens = int(splits.max()), int(splits @ tiles[:, 2])
        return partial(kernel, block_table.contiguous(), work, places, partial_tokens, most)

    def fixed(self, size: int, kv_heads: int, device: torch.device) -> TritonDecode:
        return TritonDecode(size, kv_heads, _units(device), self.splits)


@dataclass(frozen=True)
class TritonDecode:
    """A `FixedDecode`: the same kernel with as many programs as the splits of `size` sequences can ever be, of which
    those that are not needed find nothing to do. splits: see `TritonSplitKV`."""

    size: int
    kv_heads: int
    units: int
    splits: int | None = None

    @property
    def most(self) -> int:
        """The most splits that one sequence can have: as many as fill the GPU twice, if all keys of the step are its
        own."""
        return self.splits or max(1, 2 * self.units // self.kv_heads)

    @property
    def programs(self) -> int:
        return self.size * self.splits if self.splits else self.size + self.most

    @property
    def plan_size(self) -> int:
        return 7 * self.programs + 3 * self.size

    def plan(self, rows: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
        """The work of all programs and the places of all partial results, one after the other; see `share_work`."""
        ones = np.ones_like(rows)
        tiles = np.stack((rows, np.arange(self.size), ones, context_lens - 1), axis=1)
        splits = self.splits * ones if self.splits else count_splits(context_lens, self.kv_heads, self.units)
        work, places = share_work(tiles, splits)
        idle = np.zeros((self.programs - len(work), 7), np.int64)
        idle[:, 5] = 1  # of one split of no tokens
        return np.concatenate((work, idle, places), axis=None)

    def prepare(
        self, q, k_pool, tables: Tensor, plan: Tensor, *, window: int | None, soft_cap: float | None = None
    ) -> Attend:
        check_kernel("triton_split_kv", "backend=gathered", queries=q, **_floats(keys=k_pool))
        work, places = plan.int().split((7 * self.programs, 3 * self.size))
        kernel = _Launch.of(q, k_pool, 1, window, soft_cap)
        return partial(kernel, tables, work.view(-1, 7), places.view(-1, 3), self.programs, self.most)


@dataclass(frozen=True)
class _Launch:
    """The part of a launch that depends only on the model and the longest piece. rows: of a tile; reach: keys of a
    query."""

    head_dim: int
    rows: int
    reach: int
    constants: tuple

    @classmethod
    def of(cls, q: Tensor, k_pool: Tensor, longest: int, window: int | None, soft_cap: float | None) -> _Launch:
        heads, head_dim, block_size, kv_heads = *q.shape[1:], *k_pool.shape[1:3]
        group, dims = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))  # tl.dot takes 16 or more
        columns = min(64, max(16, TILE_BYTES // (dims * q.element_size())))
        rows = min(columns, triton.next_power_of_2(longest * group))
        rows = max(16, rows, triton.next_power_of_2(group))
        codes = {torch.int8: 1, torch.uint8: 2}[k_pool.dtype] if isinstance(k_pool, QuantizedPool) else 0
        constants = (group, head_dim, block_size, rows, columns, dims, factors(q.dtype), soft_cap or 0.0, codes)
        return cls(head_dim, rows, UNLIMITED if window is None else window, constants)

    def __call__(
        self,
        block_table: Tensor,
        work: Tensor,
        places: Tensor,
        partial_tokens: int,
        most: int,
        q: Tensor,
        k_pool: Tensor | QuantizedPool,
        v_pool: Tensor | QuantizedPool,
    ) -> Tensor:
        """work: [programs, 7], places: [tokens, 3], int32, see `share_work`. most: splits of a tile."""
        scales = (q, q)  # which the kernel does not read
        if isinstance(k_pool, QuantizedPool):
            scales, (k_pool, v_pool) = (k_pool.scale, v_pool.scale), (k_pool.codes, v_pool.codes)
        else:
            _check_layer(q, k_pool, v_pool)
        q, (tokens, heads, head_dim) = q.contiguous(), q.shape
        kind = q.dtype if most == 1 else torch.float32
        parts = torch.empty((partial_tokens, heads, head_dim), device=q.device, dtype=kind)
        log_sums = torch.empty((partial_tokens, heads), device=q.device, dtype=torch.float32)
        attend[len(work), k_pool.shape[2]](
            *(q, k_pool, v_pool, *scales, block_table, work, parts, log_sums, head_dim**-0.5, self.reach),
            *(block_table.shape[1], *k_pool.stride()[:3], *self.constants),
            num_stages=2,
        )
        if most == 1:
            return parts[:tokens]
        y, dims = torch.empty_like(q), max(16, triton.next_power_of_2(head_dim))
        combine[tokens, heads](parts, log_sums, places, y, head_dim, dims, triton.next_power_of_2(most))
        return y


triton_split_kv = TritonSplitKV()


@_kernel
def attend(
    q,  # [tokens, heads, head_dim]
    k_pool,  # [num_blocks, block_size, kv_heads, head_dim]
    v_pool,
    k_scales,  # [num_blocks, block_size, kv_heads], float32, if CODES
    v_scales,
    block_table,  # [sequences, table_width]
    work,  # [programs, 7], int32: see `share_work`
    parts,  # [partial tokens, heads, head_dim]: softmax over one split's keys, times values
    log_sums,  # [partial tokens, heads]: ln Σ exp(score) over one split's keys
    scale,
    window,
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
    SOFT_CAP: tl.constexpr,
    CODES: tl.constexpr,  # what the pools hold: 0 = floats, 1 = int8, 2 = the bits of e4m3
):
    item, kv_head = work + 7 * tl.program_id(0), tl.program_id(1)
    sequence, token, count, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    split, splits, partial_token = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside, wide = row < count * GROUP, dim < HEAD_DIM
    q_position = position + row // GROUP
    q_row = ((token + row // GROUP) * tl.num_programs(1) + kv_head) * GROUP + row % GROUP
    q_mask = inside[:, None] & wide[None, :]
    queries = tl.load(q + q_row[:, None] * HEAD_DIM + dim[None, :], mask=q_mask, other=0.0).to(FACTORS)

    first, end = tl.maximum(position - window + 1, 0), position + count  # what any of these queries sees
    span = tl.cdiv(tl.cdiv(end - first, splits), COLUMNS) * COLUMNS
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
        keys = tl.load(k_pool + slot[:, None] + dim[None, :], mask=k_mask, other=0)
        values = tl.load(v_pool + slot[:, None] + dim[None, :], mask=k_mask, other=0)
        if CODES == 2:
            keys, values = e4m3(keys), e4m3(values)
        keys, values = keys.to(FACTORS), values.to(FACTORS)

        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if CODES > 0:
            scores = scores * tl.load(k_scales + slot // HEAD_DIM, mask=there, other=0.0)[None, :]
        if SOFT_CAP > 0:  # cap · tanh(score / cap), by a function that the interpreter has, too
            scores = SOFT_CAP * (2 * tl.sigmoid(scores * (2 / SOFT_CAP)) - 1)
        distance = q_position[:, None] - k_position[None, :]
        scores = tl.where((distance >= 0) & (distance < window) & there[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: exp(-inf - 0) = 0, not nan
        weights, shrink = tl.exp(scores - pivot[:, None]), tl.exp(largest - pivot)
        total = total * shrink + tl.sum(weights, 1)
        if CODES > 0:
            v_scale = tl.load(v_scales + slot // HEAD_DIM, mask=there, other=0.0)
            most = tl.max(v_scale, 0)  # taken out: float16 knows no weights as small as a scale may be
            weights = weights * (v_scale / tl.where(most == 0.0, 1.0, most))[None, :]
        product = tl.dot(weights.to(FACTORS), values, input_precision="ieee")
        if CODES > 0:
            product = product * most
        weighted = weighted * shrink[:, None] + product
        largest = higher

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees none of this split's keys: 0, and ln Σ = -inf
    out = q_row + (partial_token - token).to(tl.int64) * tl.num_programs(1) * GROUP
    tl.store(parts + out[:, None] * HEAD_DIM + dim[None, :], weighted / total[:, None], mask=q_mask)
    tl.store(log_sums + out, largest + tl.log(total), mask=inside)


@_kernel
def e4m3(codes):
    """Their numbers, by way of float16, whose exponent begins 8 lower: for GPUs that know no float8, too."""
    bits = (codes.to(tl.int16) & 128) << 8 | (codes.to(tl.int16) & 127) << 7
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256


@_kernel
def combine(parts, log_sums, places, y, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr):
    """One program per query and head: the mean of its parts, each weighted by its sum. places: see `share_work`."""
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, step, splits = tl.load(places + 3 * token), tl.load(places + 3 * token + 1), tl.load(places + 3 * token + 2)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    there, wide = split < splits, dim < HEAD_DIM
    at = (first + split.to(tl.int64) * step) * heads + head
    row = token * heads + head
    log_sum = tl.load(log_sums + at, mask=there, other=float("-inf"))
    weights = tl.exp(log_sum - tl.max(log_sum, 0))
    mask = there[:, None] & wide[None, :]
    part = tl.load(parts + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    mean = tl.sum(weights[:, None] * part, 0) / tl.sum(weights, 0)
    tl.store(y + row.to(tl.int64) * HEAD_DIM + dim, mean, mask=wide)


def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _floats(**pools: Tensor | QuantizedPool) -> dict[str, Tensor]:
    return {name: pool for name, pool in pools.items() if isinstance(pool, Tensor)}


def _check_layer(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    if not q.dtype == k_pool.dtype == v_pool.dtype or k_pool.stride() != v_pool.stride() or k_pool.stride(-1) != 1:
        raise ValueError(
            f"k_pool is {k_pool.dtype} with strides {k_pool.stride()}, v_pool {v_pool.dtype} with {v_pool.stride()}: "
            f"triton_split_kv wants both {q.dtype}, with equal strides, the last of them 1."
        )
