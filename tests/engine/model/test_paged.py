"""Paged attention against sdpa on the same keys lying in one piece, and in the model against separate sequences."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.model import ModelConfig, Transformer, sdpa
from minillm.model.paged import Gathered, PagedCache, block_by_block, gathered, paged_attention
from minillm.model.paged import gather as paged_gathered
from minillm.model.paged.cpp import cpp_decode, missing
from tests.engine.node.node import is_readable

BACKENDS = [gathered, block_by_block, *([] if missing() else [cpp_decode])]


def scattered(seed, lengths, heads, kv_heads, block_size, head_dim=4):
    """Sequences of (queries, context) tokens: contiguous keys and values, and the same in shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    counts = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    pools = [normal(len(order), block_size, kv_heads, head_dim).fill_(float("nan")) for _ in range(2)]
    tables = torch.full((len(lengths), max(counts) + 1), len(order) - 1)
    parts = []
    for row, ((queries, context), count) in enumerate(zip(lengths, counts, strict=True)):
        q, k, v = (
            normal(queries, heads, head_dim),
            normal(context, kv_heads, head_dim),
            normal(context, kv_heads, head_dim),
        )
        for index in range(count):
            tables[row, index] = block = order.pop()
            here = slice(index * block_size, min((index + 1) * block_size, context))
            for pool, values in zip(pools, (k, v), strict=True):
                pool[block, : here.stop - here.start] = values[here]
        parts.append((q, k, v))
    return parts, pools, tables


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(
        st.integers(1, 12).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=4
    ),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 13),
)
def test_equals_sdpa_over_contiguous_keys(seed, lengths, kv_heads, group, block_size, window):
    """Slots that hold no key of a sequence are nan: none may be read."""
    parts, pools, tables = scattered(seed, lengths, kv_heads * group, kv_heads, block_size)
    expected = []
    for (queries, context), (q, k, v) in zip(lengths, parts, strict=True):
        where = torch.arange(context, dtype=torch.int64)
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        y = sdpa(*heads_first, positions=where[context - queries :], key_positions=where, window=window)
        expected.append(y[0].transpose(0, 1))
    q, (query_lens, context_lens) = torch.cat([part[0] for part in parts]), zip(*lengths, strict=True)
    for backend in BACKENDS:
        y = paged_attention(q, *pools, tables, query_lens, context_lens, window=window, backend=backend)
        torch.testing.assert_close(y, torch.cat(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_summed_in_float32(backend):
    parts, pools, tables = scattered(0, [(1, 40), (5, 9)], 4, 2, 4)
    q = torch.cat([part[0] for part in parts])
    exact = paged_attention(q, *pools, tables, [1, 5], [40, 9])
    half = paged_attention(q.bfloat16(), *(p.bfloat16() for p in pools), tables, [1, 5], [40, 9], backend=backend)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), exact, rtol=0.03, atol=0.03)


def test_lengths_that_do_not_fit_are_refused():
    (q, _, _), pools, tables = scattered(0, [(2, 5)], 2, 1, 4)[0][0], *scattered(0, [(2, 5)], 2, 1, 4)[1:]
    for lengths in (([1], [5]), ([2], [5, 1])):
        with pytest.raises(ValueError, match="lengths that sum to the queries"):
            paged_attention(q, *pools, tables, *lengths)
    for context in (1, 13):
        with pytest.raises(ValueError, match=f"2 queries and {context} keys in 12 slots"):
            paged_attention(q, *pools, tables, [2], [context])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_a_flat_batch_of_mixed_lengths_through_the_model(backend, window):
    """A prompt in pieces beside a sequence that decodes and one that reads blocks written in the same pass."""
    config = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=32, sliding_window=window, qk_norm=True)
    model = Transformer(config, seed=1).double()
    cache = PagedCache(config, 12, 4, num_host_blocks=2, dtype=torch.float64)
    first, second = torch.arange(11), torch.tensor([7, 3, 9, 1, 4, 4])
    twin = torch.cat((first[:8], torch.tensor([40, 41])))  # shares the first two blocks of `first`
    tables = {"first": [3, 9, 0], "second": [5, 1], "twin": [3, 9, 7]}

    def step(*entries):
        """entries: (table, tokens, start) -> logits after the last token of each."""
        names, tokens, starts = zip(*entries, strict=True)
        batch = cache.batch([tables[n] for n in names], starts, [len(t) for t in tokens], backend)
        return model(torch.cat(tokens)[None], batch.positions, attention=batch, rows=batch.last_rows)[0]

    def alone(tokens):
        return model(tokens[None])[0, -1]

    [a] = step(("first", first[:3], 0))
    b, c = step(("second", second[:5], 0), ("first", first[3:5], 3))
    d, e, f = step(("first", first[5:], 5), ("twin", twin[8:], 8), ("second", second[5:], 5))
    expected = [first[:3], second[:5], first[:5], first, twin, second]
    for logits, tokens in zip((a, b, c, d, e, f), expected, strict=True):
        torch.testing.assert_close(logits, alone(tokens), rtol=1e-9, atol=1e-9)

    cache.to_host([5, 1], [1, 0])
    cache.pool[:, :, [5, 1]] = float("nan")
    cache.from_host([1, 0], [2, 11])
    cache.copy(0, 8)
    tables |= {"second": [2, 11], "first": [3, 9, 8]}
    more = torch.tensor([8])
    b, c = step(("second", more, 6), ("first", more, 11))
    torch.testing.assert_close(b, alone(torch.cat((second, more))), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(c, alone(torch.cat((first, more))), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_what_is_the_same_in_all_layers_is_prepared_once_a_pass():
    config = ModelConfig(50, 32, 64, 3, 4, 2, max_seq_len=32)
    model, cache, asked = Transformer(config, seed=1), PagedCache(config, 12, 4), []

    class Counting(Gathered):
        def prepare(self, q, k_pool, block_table, query_lens, context_lens, *, window):
            asked.append((tuple(q.shape), list(query_lens), list(context_lens), window))
            return super().prepare(q, k_pool, block_table, query_lens, context_lens, window=window)

    batch = cache.batch([[0, 1], [2]], [0, 0], [5, 3], Counting())
    y = model(torch.arange(8)[None], batch.positions, attention=batch, rows=batch.last_rows)[0]
    assert asked == [((8, 4, 8), [5, 3], [5, 3], None)]
    torch.testing.assert_close(y[1], model(torch.arange(5, 8)[None])[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("longest", [32, 48, 50])
def test_masks_begin_where_a_gpu_s_kernel_may_read_them(monkeypatch, longest):
    masks, real = [], F.scaled_dot_product_attention

    def seen(*inputs, attn_mask):
        masks.append(attn_mask)
        return real(*inputs, attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    lengths = [(1, longest), (1, 13), (1, 9), (3, 13), (3, 9)]
    parts, pools, tables = scattered(0, lengths, 4, 2, 1, 8)
    monkeypatch.setattr(paged_gathered, "GROUP_BYTES", 2 * 13 * (2 * 2 * 8 * 8))
    paged_attention(torch.cat([part[0] for part in parts]), *pools, tables, *zip(*lengths, strict=True))
    assert [mask.shape[-1] for mask in masks if mask is not None] == [13, 13]
    assert all(is_readable(mask) for mask in masks)


def test_groups_hold_like_sequences_and_no_more_keys_than_fit(monkeypatch):
    """Sequences of 1 to 12 keys, 8 slots a group: the same attention from one group or many."""
    parts, pools, tables = scattered(1, [(1, keys) for keys in (9, 1, 12, 4, 4, 2)], 4, 2, 4)
    q, lengths = torch.cat([part[0] for part in parts]), ([1] * 6, [9, 1, 12, 4, 4, 2])
    expected, sizes = paged_attention(q, *pools, tables, *lengths), []
    call = paged_gathered._Group.__call__
    monkeypatch.setattr(paged_gathered, "GROUP_BYTES", 8 * 2 * 2 * 4 * 8)
    monkeypatch.setattr(
        paged_gathered._Group, "__call__", lambda group, *x: sizes.append(group.sequences) or call(group, *x)
    )
    torch.testing.assert_close(paged_attention(q, *pools, tables, *lengths), expected, rtol=1e-10, atol=1e-10)
    assert sizes == [2, 2, 1, 1]  # keys: 1 and 2, 4 and 4, 9, 12


@pytest.mark.parametrize("window", [None, 5])
def test_soft_caps_of_scores(window):
    lengths = [(1, 12), (4, 9), (1, 3), (7, 7)]
    parts, pools, tables = scattered(3, lengths, 4, 2, 3)
    q, where = torch.cat([part[0] for part in parts]), (tables, *zip(*lengths, strict=True))
    expected = []
    for (queries, context), (mine, k, v) in zip(lengths, parts, strict=True):
        positions = torch.arange(context)
        place = {"positions": positions[context - queries :], "key_positions": positions, "window": window}
        y = sdpa(*(x.transpose(0, 1)[None] for x in (mine, k, v)), soft_cap=0.5, **place)
        expected.append(y[0].transpose(0, 1))
    plain = paged_attention(q, *pools, *where, window=window)
    for backend in BACKENDS:
        y = paged_attention(q, *pools, *where, window=window, soft_cap=0.5, backend=backend)
        torch.testing.assert_close(y, torch.cat(expected))
        assert (y - plain).abs().max() > 0.01
