"""Under autocast, which hands over queries and keys in float32 (RoPE) beside values in 16 bits."""

import pytest
import torch

from minillm.comm import launch
from minillm.measure import ledger
from minillm.model import dense
from minillm.parallel.context_parallel import context_attention

SEQ, HEADS, HEAD_DIM = 16, 2, 8
CONTEXTS = ("ring", "zigzag", "ulysses", "gather")
WINDOWS = (None, 5)


def draw():
    """Numbers that bfloat16 holds."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, HEADS, SEQ, HEAD_DIM, generator=generator).bfloat16().float() for _ in range(4)]


def attend(group):
    """By context and window: this rank's positions, its part of the output and gradients, and the bytes that it sent
    under autocast and with 16-bit inputs."""
    found = {}
    for context in CONTEXTS:
        for window in WINDOWS:
            attention = context_attention(context, group)
            at = attention.positions(SEQ)
            q, k, v, d_out = (x[:, :, at] for x in draw())
            inputs = [q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_()]
            with torch.autocast("cpu", torch.bfloat16), ledger() as led:
                out = attention(*inputs, positions=at, window=window)
            out.backward(d_out.to(out.dtype))
            with ledger() as in_16_bits:
                attention(*(x.detach().bfloat16() for x in inputs), positions=at, window=window)
            gradients = [x.grad.float() for x in inputs]
            found[context, window] = at, out.detach(), gradients, led.bytes(), in_16_bits.bytes()
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(attend, 2)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_attention_and_its_messages_are_in_autocast_s_dtype(ranks, context, window):
    *inputs, d_out = (x.double() for x in draw())
    inputs = [x.requires_grad_() for x in inputs]
    expected = dense(*inputs, window=window)
    gradients = torch.autograd.grad(expected, inputs, d_out)
    for rank in ranks:
        at, out, found, sent, sent_in_16_bits = rank[context, window]
        assert out.dtype is torch.bfloat16
        assert sent == sent_in_16_bits > 0
        for mine, whole in zip([out, *found], [expected, *gradients], strict=True):
            torch.testing.assert_close(mine.double(), whole[:, :, at], rtol=3e-2, atol=4e-2)
