"""The kernels between a layer's products, in Triton's interpreter, against float64; and how many launches are left. Run
by test_elementwise_triton.py."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from minillm.model import ModelConfig, Transformer, elementwise_triton
from minillm.model.elementwise import FUNCTIONS, gated
from minillm.model.elementwise_triton import gated_triton, rotate_both_triton
from minillm.model.rope import Rope, rotate
from minillm.model.transformer import RMSNorm
from minillm.serve.run.optimise import fuse
from tests.engine.budgets.launches import Launches

NORM = RMSNorm.forward
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture
def launched(monkeypatch):
    """Fails a test in which torch computed instead of the kernel."""
    for name in ("rotate_both", "gated"):
        monkeypatch.setattr(elementwise_triton, name, lambda *_, name=name: pytest.fail(f"torch computes {name}"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, rotary_dim", [(4, 2, 16, None), (3, 1, 24, None), (8, 8, 64, 32), (17, 1, 6, 2)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_rotation(heads, kv_heads, head_dim, rotary_dim, dtype, fused, launched):
    config = ModelConfig(50, 32, 64, 1, heads, kv_heads, head_dim=head_dim, rotary_dim=rotary_dim, max_seq_len=999)
    torch.manual_seed(0)
    positions = torch.tensor([0, 998, 7, 7, 41])
    cos, sin = Rope(config)(positions, dtype)
    if fused:  # views of one product, one token after the other
        both = torch.randn(1, 5, (heads + 2 * kv_heads) * head_dim).to(dtype)
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, _ = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in both.split(sizes, dim=-1))
    else:
        q, k = (torch.randn(1, count, 5, head_dim).to(dtype) for count in (heads, kv_heads))
    for found, x in zip(rotate_both_triton(q, k, cos, sin), (q, k), strict=True):
        exact = rotate(x.double(), cos.double(), sin.double())
        assert found.dtype is dtype and found.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 99),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    heads=st.integers(1, 5),
    group=st.integers(1, 3),
    half=st.integers(1, 20),
    beyond=st.integers(0, 9),  # dimensions of a head that do not turn
    tokens=st.integers(1, 4),
    apart=st.integers(0, 7),
)
def test_drawn_rotations(seed, dtype, heads, group, half, beyond, tokens, apart):
    draw = torch.Generator().manual_seed(seed)
    head_dim, angles = 2 * half + beyond, 6 * torch.rand(tokens, half, generator=draw)
    cos, sin = angles.cos().repeat(1, 2).to(dtype), torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    q, k = (
        torch.randn(1, tokens, count, head_dim + apart, generator=draw).to(dtype)[..., :head_dim].transpose(1, 2)
        for count in (heads * group, heads)
    )
    for found, x in zip(rotate_both_triton(q, k, cos, sin), (q, k), strict=True):
        exact = rotate(x.double(), cos.double(), sin.double())
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 99),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    name=st.sampled_from(sorted(FUNCTIONS)),
    rows=st.integers(1, 4),
    width=st.integers(1, 1100),
    apart=st.integers(0, 40),
)
def test_drawn_gates(seed, dtype, name, rows, width, apart):
    both = 4 * torch.randn(1, rows, 2 * width + apart, generator=torch.Generator().manual_seed(seed)).to(dtype)
    gate, up = both[..., :width], both[..., -width:]
    found, exact = gated_triton(FUNCTIONS[name], gate, up), gated(FUNCTIONS[name], gate.double(), up.double())
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape, apart", [((1, 3, 1025), 0), ((1, 1, 7), 5), ((2, 64), 64), ((1, 5, 2048), 2048)])
def test_gate(shape, apart, name, dtype, launched):
    torch.manual_seed(0)
    rows = 6 * torch.randn(*shape[:-1], 2 * shape[-1] + apart).to(dtype)
    gate, up = rows[..., : shape[-1]], rows[..., -shape[-1] :]
    found, exact = gated_triton(FUNCTIONS[name], gate, up), gated(FUNCTIONS[name], gate.double(), up.double())
    assert found.dtype is dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_torch_computes_what_a_kernel_does_not():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    cos, sin = Rope(ModelConfig(50, 32, 64, 1, 4))(torch.arange(5), torch.float32)
    for found, x in zip(rotate_both_triton(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(found, rotate(x, cos, sin))
    x = torch.randn(1, 3, 8, requires_grad=True)
    gated_triton(FUNCTIONS["silu"], x, x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("variant", [{}, {"qk_norm": True}], ids=["Llama", "Qwen3"])
@torch.no_grad()
def test_a_decoding_layer_launches_at_most_16(variant, monkeypatch):
    """Attention counts as four: keys and values written, their splits, their sum."""
    found = []
    for layers in (1, 2):
        model = Transformer(ModelConfig(50, 32, 64, layers, 4, 2, max_seq_len=48, **variant), seed=3)
        fuse(model, kernels=True)
        names = []

        def counted(function, name, names=names):
            def call(*args):
                names.append(name)
                with _disable_current_modes():
                    return function(*args)

            return call

        norm = counted(NORM, "rms_norm")  # one kernel on a GPU
        monkeypatch.setattr(RMSNorm, "forward", lambda self, x, norm=norm: norm(self, x))
        for block in model.blocks:
            block.attention.rotate_both = counted(block.attention.rotate_both, "rotate_heads")
            block.mlp.gated = counted(block.mlp.gated, "gate_rows")

        def attention(q, k, v, names=names, **_):
            assert q[0].transpose(0, 1).is_contiguous(), "the paged attention would copy the queries"
            names += ["write", "write", "attend", "combine"]
            return q

        with Launches() as launches:
            model(torch.tensor([[1, 2, 3]]), torch.tensor([4, 9, 2]), attention=attention)
        found.append(Counter(names) + launches.calls)
    a_layer = found[1] - found[0]
    assert a_layer.total() == (16 if variant else 14), a_layer
