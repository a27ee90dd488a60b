"""Attention in tiles against dense attention in float64: outputs, gradients, memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.measure import memory
from minillm.model import dense
from minillm.model.attention.tiled import merge, tiled, tiled_with_lse


def draw(seed, batch, heads, kv_heads, queries, keys, head_dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, head_dim), *[(batch, kv_heads, keys, head_dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def gradients(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 9999),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    seq=st.integers(1, 33),
    head_dim=st.integers(1, 9),
    tile=st.integers(1, 40),
    window=st.none() | st.integers(1, 36),
    documents=st.integers(0, 4),
    shuffled=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_dense_attention(
    seed, batch, kv_heads, groups, seq, head_dim, tile, window, documents, shuffled
):
    inputs = draw(seed, batch, kv_heads * groups, kv_heads, seq, seq, head_dim)
    generator = torch.Generator().manual_seed(seed)
    how = {"window": window}
    if documents:
        how["segments"] = torch.randint(documents, (batch, seq), generator=generator).sort(dim=1).values
    if shuffled:
        how["positions"] = torch.stack([torch.randperm(seq, generator=generator) for _ in range(batch)])
        how.pop("segments", None)
    out, expected = tiled(*inputs, **how, tile=tile), dense(*inputs, **how)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for found, right in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10)


@settings(max_examples=40)
@given(seed=st.integers(0, 999), cuts=st.integers(1, 20), queries=st.integers(1, 9), tile=st.integers(1, 8))
def test_outputs_over_parts_of_the_keys_merge_into_the_whole(seed, cuts, queries, tile):
    """As in a ring, where keys arrive in parts; a query may see nothing of a part."""
    keys = 21
    q, k, v = (x.detach() for x in draw(seed, 1, 4, 2, queries, keys, 5))
    positions = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))[:queries]
    whole, whole_lse = tiled_with_lse(q, k, v, positions=positions, key_positions=torch.arange(keys))
    parts = []
    for part in (slice(0, cuts), slice(cuts, keys)):
        places = torch.arange(keys)[part]
        parts.append(
            tiled_with_lse(q, k[:, :, part], v[:, :, part], positions=positions, key_positions=places, tile=tile)
        )
    out, lse = merge(*parts[0], *parts[1])
    torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-10, atol=1e-10)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient():
    inputs = draw(0, 1, 2, 1, 3, 4, 5)
    out = tiled(*inputs, positions=torch.tensor([5, 0, 6]), key_positions=torch.tensor([1, 2, 3, 4]), tile=2)
    assert out[0, :, 1].eq(0).all() and out.isfinite().all()
    dq, dk, dv = gradients(out, inputs)
    assert dq[0, :, 1].eq(0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_is_as_close_as_rounding_allows(dtype):
    inputs = draw(3, 2, 4, 2, 50, 50, 16, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = tiled(*inputs, tile=16), dense(*wide)
    assert out.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for found, right in zip(gradients(out, inputs), gradients(expected, wide), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=4 * tolerance)


def peak(attention, seq):
    inputs = draw(0, 1, 2, 2, seq, seq, 32, torch.float32)
    with memory() as seen:
        attention(*inputs).sum().backward()
    return seen.peak.total


def test_memory_grows_with_the_length_and_not_with_its_square():
    def in_tiles(*inputs):
        return tiled(*inputs, tile=64)

    peak(in_tiles, 256)
    assert 1.9 <= peak(in_tiles, 2048) / peak(in_tiles, 1024) <= 2.1
    assert 3.7 <= peak(dense, 2048) / peak(dense, 1024) <= 4.1


def test_bad_input_is_one_sentence():
    q, k, v = draw(0, 1, 3, 2, 4, 4, 5)
    with pytest.raises(ValueError, match="3 query heads do not divide over 2 kv heads"):
        tiled(q, k, v)
    q, k, v = draw(0, 1, 2, 2, 4, 6, 5)
    with pytest.raises(ValueError, match="6 keys but 4 key positions"):
        tiled(q, k, v)
    with pytest.raises(ValueError, match="tile=0 must be at least 1"):
        tiled(q, k, v, tile=0)
