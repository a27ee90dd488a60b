"""The Triton kernels of tiled attention in Triton's interpreter, against dense attention in float64: outputs and
gradients. Run by test_tiled_triton.py, which sets TRITON_INTERPRET for this process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.model import dense
from minillm.model.attention.tiled import tiled_with_lse
from minillm.model.attention.tiled_triton import tiled_triton, tiled_triton_with_lse

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def draw(seed, batch, heads, kv_heads, queries, keys, head_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, head_dim), *[(batch, kv_heads, keys, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


def compare(inputs, tolerance=2e-6, expected=dense, **how):
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, right = tiled_triton(*inputs, **how), expected(*wide, **how)
    assert out.dtype is inputs[0].dtype
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
    for found, exact in zip(gradients(out, inputs), gradients(right, wide), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=5 * tolerance, atol=5 * tolerance)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    groups=st.sampled_from([1, 3]),
    seq=st.integers(1, 40),
    head_dim=st.sampled_from([2, 16, 24]),
    window=st.none() | st.integers(1, 45),
    documents=st.integers(0, 3),
    shuffled=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
)
def test_small_shapes(seed, batch, kv_heads, groups, seq, head_dim, window, documents, shuffled, dtype):
    generator = torch.Generator().manual_seed(seed)
    how = {"window": window}
    if documents:
        how["segments"] = torch.randint(documents, (batch, seq), generator=generator).sort(dim=1).values
    elif shuffled:
        how["positions"] = torch.stack([torch.randperm(seq, generator=generator) for _ in range(batch)])
    inputs = draw(seed, batch, kv_heads * groups, kv_heads, seq, seq, head_dim, dtype)
    compare(inputs, TOLERANCE[dtype], **how)


@pytest.mark.parametrize("window", [None, 70])
def test_several_tiles(window):
    segments = torch.tensor([[0] * 60 + [1] * 90])
    compare(draw(1, 1, 4, 2, 150, 150, 24), window=window, segments=segments)
    compare(draw(2, 1, 2, 1, 150, 150, 24), window=window)


def test_a_wide_head_takes_smaller_tiles():
    compare(draw(3, 1, 2, 1, 40, 40, 136))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    compare(draw(4, 1, 4, 2, 70, 70, 32, dtype), TOLERANCE[dtype])


def test_keys_of_another_rank_with_log_sum_exp():
    """As in a ring: other keys than queries, of which some queries see none."""
    inputs = draw(5, 2, 4, 2, 20, 33, 16)
    positions, key_positions = torch.arange(20) * 2, torch.arange(5, 38)
    segments, key_segments = positions.expand(2, -1) // 16, key_positions.expand(2, -1) // 16
    how = {"positions": positions, "key_positions": key_positions, "window": 9}
    how |= {"segments": segments, "key_segments": key_segments}
    compare(inputs, expected=lambda *x, **more: tiled_with_lse(*x, **more)[0], **how)
    (out, lse), (_, exact) = (
        call(*(x.detach().to(dtype) for x in inputs), **how)
        for call, dtype in ((tiled_triton_with_lse, torch.float32), (tiled_with_lse, torch.float64))
    )
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)
    assert lse[:, :, 0].isneginf().all() and out[:, :, 0].eq(0).all()


def test_what_the_kernel_cannot_take_is_refused():
    q, k, v = draw(0, 1, 2, 1, 4, 4, 8, torch.float64)
    with pytest.raises(ValueError, match="takes float32, bfloat16 or"):
        tiled_triton(q, k, v)
    q, k, v = draw(0, 1, 3, 2, 4, 4, 8)
    with pytest.raises(ValueError, match="3 query heads do not divide over 2 kv heads"):
        tiled_triton(q, k, v)
    q, k, v = draw(0, 1, 2, 2, 4, 6, 8)
    with pytest.raises(ValueError, match="6 keys but 4 key positions"):
        tiled_triton(q, k, v)
