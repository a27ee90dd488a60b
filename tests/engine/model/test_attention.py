"""sdpa against dense, and dense against a loop that a reader can check by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.model import dense, sdpa
from minillm.model.attention import visible


def by_hand(q, k, v, sees):
    """One query at a time; sees(batch, query) -> indices of its keys."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = list(sees(b, i))
                scores = torch.tensor([float(q[b, h, i] @ k[b, h // group, j]) for j in keys], dtype=q.dtype)
                weights = (scores / math.sqrt(q.shape[-1])).softmax(0)
                out[b, h, i] = sum(w * v[b, h // group, j] for w, j in zip(weights, keys, strict=True))
    return out


def draw(seed, batch, heads, kv_heads, seq, head_dim, keys=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, seq, head_dim), *[(batch, kv_heads, keys or seq, head_dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seq=st.integers(1, 7),
    window=st.none() | st.integers(1, 8),
)
def test_causal_grouped_and_windowed(seed, batch, kv_heads, group, seq, window):
    q, k, v = draw(seed, batch, kv_heads * group, kv_heads, seq, 4)
    expected = by_hand(q, k, v, lambda b, i: range(max(0, i + 1 - (window or seq)), i + 1))
    for attention in (dense, sdpa):
        torch.testing.assert_close(attention(q, k, v, window=window), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", [dense, sdpa])
def test_positions_out_of_order_decide_what_is_visible(attention):
    """As on a rank of zigzag ring attention: the local order is not the order of the sequence."""
    q, k, v = draw(1, 2, 4, 2, 5, 4)
    positions = torch.tensor([[3, 0, 4, 1, 2], [0, 4, 3, 2, 1]])
    expected = by_hand(q, k, v, lambda b, i: [j for j in range(5) if positions[b, j] <= positions[b, i]])
    torch.testing.assert_close(attention(q, k, v, positions=positions), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", [dense, sdpa])
def test_new_queries_against_cached_keys(attention):
    q, k, v = draw(2, 1, 4, 2, 2, 4, keys=6)
    expected = by_hand(q, k, v, lambda b, i: range(4 + i + 1))
    found = attention(q, k, v, positions=torch.tensor([4, 5]), key_positions=torch.arange(6))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="6 keys but 2 key positions"):
        attention(q, k, v, positions=torch.tensor([4, 5]))


@pytest.mark.parametrize("attention", [dense, sdpa])
def test_packed_documents_do_not_see_each_other(attention):
    q, k, v = draw(3, 1, 2, 2, 5, 4)
    segments = torch.tensor([[0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    together = attention(q, k, v, positions=positions, segments=segments)
    apart = [attention(*(x[:, :, part] for x in (q, k, v))) for part in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(together, torch.cat(apart, dim=2), rtol=1e-10, atol=1e-10)


def test_mask_broadcasts_over_heads():
    q, k, _ = draw(4, 2, 4, 2, 3, 4)
    assert visible(None, None, q, k).shape == (1, 1, 3, 3)
    assert visible(torch.arange(3).expand(2, 3), None, q, k).shape == (2, 1, 3, 3)
