"""What lies between the products of a decoding layer, each as one Triton kernel: the rotation of all heads, the gate.

    q, k ──rotate_heads──▶ turned q, k     torch: 4 launches for each     y[d] = x[d] · cos[d] + x[d ± half] · sin[d]
    gate, up ──gate_rows──▶ act(gate) · up torch: 2 launches

A step of few tokens spends its time on launches, so a layer needs few. Inputs may be views of one fused product. q and
k come out one token after the other, as the paged attention reads them, without a copy. For inference only: with
gradients, on a CPU, and for shapes that no engine has, the functions compute with torch. On the CPU the kernels run
only in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.model.elementwise import FUNCTIONS, gated, rotate_both
from minillm.model.kernels import has_kernel, kernel, tl, triton

_kernel = kernel("q_head", "q_token", "k_head", "k_token", "rotation_token", "gate_row", "up_row", "width")
SILU, GELU_TANH = range(2)
KINDS = {FUNCTIONS["silu"]: SILU, FUNCTIONS["gelu_tanh"]: GELU_TANH}
COLUMNS = 1024  # of a row that a program computes


def rotate_both_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rotate_both`. q: [1, heads, tokens, head_dim], k: [1, kv_heads, tokens, head_dim]; cos, sin: [tokens,
    turned dimensions]."""
    apart = q.stride(3) != 1 or k.stride(3) != 1 or len(q) != 1 or cos.dim() != 2 or not cos.is_contiguous()
    if apart or not _takes(q, k, cos):
        return rotate_both(q, k, cos, sin)
    _, heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    turned = [torch.empty((tokens, count, head_dim), dtype=q.dtype, device=q.device) for count in (heads, kv_heads)]
    rotate_heads[tokens, heads + kv_heads](
        *(q, k, cos, sin, *turned, q.stride(1), q.stride(2), k.stride(1), k.stride(2), cos.stride(0)),
        *(heads, kv_heads, head_dim, cos.shape[1], triton.next_power_of_2(head_dim)),
    )
    return tuple(each.transpose(0, 1)[None] for each in turned)


def gated_triton(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """As `gated`. gate, up: [..., tokens, width], rows at any distance."""
    width = gate.shape[-1]
    rows = gate.numel() // width
    apart = gate.shape[:-2].numel() != 1 or gate.stride(-1) != 1 or up.stride(-1) != 1 or gate.shape != up.shape
    if apart or activation not in KINDS or not _takes(gate, up):
        return gated(activation, gate, up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_rows[rows, triton.cdiv(width, COLUMNS)](
        gate, up, y, gate.stride(-2), up.stride(-2), width, KINDS[activation], COLUMNS
    )
    return y


def _takes(*inputs: Tensor) -> bool:
    """Whether a kernel can compute with them here."""
    first = inputs[0]
    alike = first.numel() > 0 and all(each.dtype == first.dtype for each in inputs)
    return alike and has_kernel(first) and not (torch.is_grad_enabled() and any(each.requires_grad for each in inputs))


@_kernel
def rotate_heads(
    q,  # [tokens, heads, head_dim], at any strides
    k,
    cos,  # [tokens, TURNED]
    sin,  # the same, negative in its first half
    q_turned,  # [tokens, heads, head_dim], contiguous
    k_turned,
    q_head,
    q_token,
    k_head,
    k_token,
    rotation_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TURNED: tl.constexpr,
    DIMS: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    if head < HEADS:
        source, target = q + head * q_head + token * q_token, q_turned + (token * HEADS + head) * HEAD_DIM
    else:
        source = k + (head - HEADS) * k_head + token * k_token
        target = k_turned + (token * KV_HEADS + head - HEADS) * HEAD_DIM
    dim = tl.arange(0, DIMS)
    inside, turns, half = dim < HEAD_DIM, dim < TURNED, TURNED // 2
    partner = tl.where(dim < half, dim + half, dim - half)  # the plane's other dimension
    x = tl.load(source + dim, mask=inside, other=0).to(tl.float32)
    other = tl.load(source + partner, mask=turns, other=0).to(tl.float32)
    c = tl.load(cos + token * rotation_token + dim, mask=turns, other=0).to(tl.float32)
    c = tl.where(turns, c, 1.0)
    s = tl.load(sin + token * rotation_token + dim, mask=turns, other=0).to(tl.float32)
    tl.store(target + dim, (x * c + other * s).to(q_turned.dtype.element_ty), mask=inside)


@_kernel
def gate_rows(
    gate,  # [rows, width], at any distance of the rows
    up,
    y,  # [rows, width], contiguous
    gate_row,
    up_row,
    width,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    x = tl.load(gate + row * gate_row + column, mask=inside, other=0).to(tl.float32)
    if KIND == 0:
        x = x * tl.sigmoid(x)
    else:  # x · (1 + tanh(z)) / 2 = x · sigmoid(2z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    factor = tl.load(up + row * up_row + column, mask=inside, other=0).to(tl.float32)
    tl.store(y + row * width + column, (x * factor).to(y.dtype.element_ty), mask=inside)
