"""flex_attention over a paged pool: its mask against each sequence's own positions, its values, and the engine."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged import scattered

from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.model.paged import block_by_block, paged_attention
from minillm.model.paged_flex import block_mask, flex, logical_blocks
from minillm.serve import LLM, SamplingParams


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(
        st.integers(1, 30).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=4
    ),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 31),
)
def test_the_mask_lets_each_query_see_its_own_keys(seed, lengths, block_size, window):
    parts, pools, tables = scattered(seed, lengths, 1, 1, block_size, 2)
    q, lens = torch.cat([part[0] for part in parts]), list(zip(*lengths, strict=True))
    mask = block_mask(q, pools[0], tables, *lens, window)
    slots = pools[0].shape[0] * block_size
    seen = mask.mask_mod(None, None, torch.arange(len(q))[:, None], torch.arange(slots))
    row = 0
    for table, (queries, context) in zip(tables.tolist(), lengths, strict=True):
        for position in range(context - queries, context):
            first = 0 if window is None else max(0, position - window + 1)
            expected = {table[p // block_size] * block_size + p % block_size for p in range(first, position + 1)}
            assert set(seen[row].nonzero().flatten().tolist()) == expected
            row += 1


def test_the_block_table_turned_round():
    """Blocks 4 and 2 are shared; the zeros that pad a row are not block 0."""
    tables = torch.tensor([[4, 2, 1], [4, 2, 0], [0, 0, 0]])
    assert logical_blocks(tables, [9, 8, 1], 5, 4).tolist() == [
        [-1, 2, 1, -1, 0],
        [-1, -1, 1, -1, 0],
        [0, -1, -1, -1, -1],
    ]


@pytest.mark.full
@pytest.mark.parametrize("lengths", [[(1, 40), (5, 9)], [(1, 300), (70, 170), (1, 1)]])
@pytest.mark.parametrize("heads, kv_heads, block_size", [(6, 2, 1), (4, 4, 16)])
@pytest.mark.parametrize("window", [None, 7])
@torch.no_grad()
def test_equals_the_loop_over_blocks(lengths, heads, kv_heads, block_size, window):
    parts, pools, tables = scattered(0, lengths, heads, kv_heads, block_size, 24)
    q, pools = torch.cat([part[0] for part in parts]).float(), [pool.float().nan_to_num(0) for pool in pools]
    call = partial(paged_attention, q, *pools, tables, *zip(*lengths, strict=True), window=window)
    torch.testing.assert_close(call(backend=flex), call(backend=block_by_block), rtol=1e-5, atol=2e-6)


@pytest.mark.full
def test_greedy_tokens_of_the_engine_with_shared_blocks():
    model = Transformer(ModelConfig(50, 48, 64, 1, 4, 2, head_dim=24, max_seq_len=32, init_std=0.2), seed=3)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9]]
    llm = LLM(model, block_size=2, chunk=3, num_blocks=24, backend=flex)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6))
    assert [o.answers[0].ids for o in outputs] == [list(generate(model, prompt, 6)) for prompt in prompts]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@torch.no_grad()
def test_compiled_on_a_gpu():
    lengths = [(1, 300), (70, 170)]
    parts, pools, tables = scattered(0, lengths, 4, 2, 16, 32)
    q, pools = torch.cat([part[0] for part in parts]).bfloat16(), [pool.bfloat16().nan_to_num(0) for pool in pools]
    lens = list(zip(*lengths, strict=True))
    expected = paged_attention(q, *pools, tables, *lens, backend=block_by_block)
    y = paged_attention(q.cuda(), *(pool.cuda() for pool in pools), tables.cuda(), *lens, backend=flex)
    torch.testing.assert_close(y.cpu(), expected, rtol=2e-2, atol=2e-2)
