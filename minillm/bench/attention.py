"""Backends of paged attention against what needs no paging code: gather the blocks of all sequences, padded, and SDPA.

    cpp_decode       no copy, single queries in C++         the default on the CPU, where there is a compiler
    gathered         like sequences gathered together       the default elsewhere
    triton_split_kv  no copy, the keys split, too           the default on a CUDA GPU (only there, and with triton)
    flashinfer       FlashInfer's kernels                   on a CUDA GPU, where that package is installed
    block_by_block   a loop over blocks                     to read, not to use

A sample is one forward pass: what a backend prepares once, then every layer. What the peer gathers by (slots and mask)
is prepared once as well. Results have to agree before anything is timed.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.bench.counts import settling
from minillm.bench.harness import BenchRow, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.model import PagedCache
from minillm.model.attention import Attend
from minillm.model.config import ModelConfig
from minillm.model.paged import Backend, block_by_block, gathered
from minillm.model.paged.cpp import cpp_decode, missing
from minillm.model.paged.flashinfer import FlashInfer
from minillm.model.paged.triton import triton_split_kv

PEER = "torch SDPA, padded"
BLOCK_SIZE = 16
SHAPES = {  # layers, heads, kv heads, head_dim as in the committed target, and as in Llama 3 8B (four of its layers)
    "cpu": (6, 8, 4, 32),
    "cuda": (4, 32, 8, 128),
}
DECODING = [(1, 32 * n) for n in range(1, 16)]  # (queries, context) of each sequence; on a GPU 16 times the context
BATCHES = {
    "one sequence": [(1, 480)],
    "15 decode": DECODING,
    "15 decode and a prompt piece": [*DECODING, (64, 256)],
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def run(batches: Sequence[str] = tuple(BATCHES), repeats: int = 7, device: str | None = None) -> list[BenchRow]:
    """A row for each batch and backend: seconds of one pass."""
    check_repeats(repeats)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cpu":
        kernel = {} if missing() else {"cpp_decode": cpp_decode}
        backends = {**kernel, "gathered": gathered, "block_by_block": block_by_block}
    else:
        kernel = {"triton_split_kv": triton_split_kv} if find_spec("triton") else {}
        kernel |= {"flashinfer": FlashInfer()} if find_spec("flashinfer") else {}
        backends = {**kernel, "gathered": gathered}
    return [compare(batch, name, backend, where, repeats) for batch in batches for name, backend in backends.items()]


@torch.no_grad()
def compare(batch: str, name: str, backend: Backend, device: torch.device, repeats: int) -> BenchRow:
    layers, heads, kv_heads, head_dim = SHAPES[device.type]
    scale, dtype = (16, torch.bfloat16) if device.type == "cuda" else (1, torch.float32)
    lengths = [(queries, scale * context) for queries, context in BATCHES[batch]]
    query_lens, context_lens = zip(*lengths, strict=True)
    counts = [-(-context // BLOCK_SIZE) for context in context_lens]
    config = ModelConfig(8, heads * head_dim, 8, layers, heads, kv_heads)
    cache = PagedCache(config, sum(counts), BLOCK_SIZE, device=device, dtype=dtype)
    cache.pool.normal_(generator=torch.Generator(device).manual_seed(0))
    blocks = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist())
    table = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(blocks) for _ in range(count)])
    table, q = table.to(device), torch.randn(sum(query_lens), heads, head_dim, device=device, dtype=dtype)

    def passing(prepare: Callable[..., Attend]) -> Callable[[], list[Tensor]]:
        def one_pass() -> list[Tensor]:
            attend = prepare(q, cache.pool[0, 0], table, query_lens, context_lens, window=None)
            return [attend(q, *cache.pool[:, layer]) for layer in range(layers)]

        return one_pass

    def plain(q, k_pool, block_table, *lens, window: int | None) -> Attend:
        return lambda q, k_pool, v_pool: backend(q, k_pool, v_pool, block_table, *lens, window=window)

    mine, other = passing(getattr(backend, "prepare", plain)), passing(padded)

    def same() -> bool:
        pairs = zip(mine(), other(), strict=True)
        return all(torch.allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]) for a, b in pairs)

    settle = settling(device)
    found = side_by_side(same, *(seconds_per_call(each, after=settle) for each in (mine, other)), repeats=repeats)
    return bench_row(f"{name}: {batch}, {layers} layers, {device.type}", PEER, found, "ms", scale=1e3)


def padded(q, k_pool, block_table, query_lens, context_lens, *, window: int | None) -> Attend:
    """The peer: every sequence's keys, and queries, padded to the longest and aligned at the end, in one SDPA call."""
    device, block_size = q.device, k_pool.shape[1]
    last = torch.tensor(context_lens, device=device)
    places = last[:, None] - torch.arange(max(context_lens), 0, -1, device=device)  # negative: padding
    there, places = places >= 0, places.clamp(min=0)
    slots = block_table.gather(1, places // block_size) * block_size + places % block_size
    most = max(query_lens)
    ends = torch.tensor(query_lens, device=device).cumsum(0)
    rows = (ends[:, None] - torch.arange(most, 0, -1, device=device)).clamp(min=0)  # padding: some other's query
    real = torch.arange(most, 0, -1, device=device) <= torch.tensor(query_lens, device=device)[:, None]
    behind = torch.arange(most, 0, -1, device=device)[:, None] - torch.arange(max(context_lens), 0, -1, device=device)
    mask = (there[:, None] & (behind <= 0))[:, None]  # a key is visible if it is not nearer to the end than the query
    mask = mask | ~real[:, None, :, None]  # padded queries see everything, so that none has an empty softmax

    def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        keys, values = (pool.flatten(0, 1)[slots].transpose(1, 2) for pool in (k_pool, v_pool))
        y = F.scaled_dot_product_attention(q[rows].transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
        return y.transpose(1, 2)[real]

    return attend
