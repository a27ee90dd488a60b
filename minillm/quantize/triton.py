"""W4A16 as a Triton kernel: weights of 4 bits are read packed, and unpacked on the chip (after Frantar et al. 2024,
"MARLIN", without its layout).

    one program: a tile of rows × a tile of outputs
    for each step along the inputs     of one group at most, so one scale and zero point per output
        low, high = codes & 15, codes >> 4                      codes of the even and of the odd inputs
        Σ += (x_even · lowᵀ + x_odd · highᵀ) · scale            in float32

Integers less their zero point are exact in every float type, so the scale is the only rounding, and it happens in
float32. NF4's levels are looked up, and rounded to the type of the inputs. On the CPU only in Triton's interpreter: set
TRITON_INTERPRET=1 before Python starts.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from minillm.model.kernels import check_kernel, factors, kernel, tl, triton

LEAST_STEP, MOST_STEP = 32, 128  # inputs: half of them take part in one tl.dot, which wants 16 or more
_kernel = kernel("rows", "outputs", "row_stride")


def fits(group: int | None) -> bool:
    """Whether the kernel takes groups of this size; None = one for each output."""
    return triton is not None and (group is None or group % LEAST_STEP == 0)


def multiply_w4a16(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None = None, levels: Tensor | None = None
) -> Tensor:
    """x: [rows, in], any strides; codes: uint8 [out, in / 2]; scale, zero: [out, groups] -> [rows, out].

    A code c of 0 .. 15 stands for (c - 8 - zero) · scale, or with levels, float32 [16], for levels[c] · scale.
    ValueError off the GPU without Triton's interpreter, and for x of another type than float32, bfloat16 and float16.
    """
    check_kernel("w4a16", "layer.use('dequantize')", inputs=x)
    (rows, size), (outputs, groups) = x.shape, scale.shape
    step = MOST_STEP if groups == 1 else gcd(MOST_STEP, size // groups)
    tile = 16 if rows <= 16 else 64
    of_outputs = 32 if rows <= 16 else 64  # decoding: more programs, so that a GPU is full
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _w4a16[triton.cdiv(rows, tile), triton.cdiv(outputs, of_outputs)](
        *(x, codes, scale, zero, levels, y, rows, outputs, *x.stride()),
        *(size, groups, tile, of_outputs, step // 2, factors(x.dtype)),
    )
    return y


@_kernel
def _w4a16(
    x,  # [rows, SIZE]
    codes,  # [outputs, SIZE / 2], contiguous, as all below
    scale,  # [outputs, GROUPS]
    zero,  # [outputs, GROUPS] or None
    levels,  # [16] or None
    y,  # [rows, outputs]
    rows,
    outputs,
    row_stride,
    column_stride,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF: tl.constexpr,
    FACTORS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, 2 * HALF):
        byte = start // 2 + tl.arange(0, HALF)
        there = byte < SIZE // 2
        mask = (row < rows)[:, None] & there[None, :]
        at = x + row[:, None] * row_stride + (2 * byte * column_stride)[None, :]
        even = tl.load(at, mask=mask, other=0.0).to(FACTORS)
        odd = tl.load(at + column_stride, mask=mask, other=0.0).to(FACTORS)

        mask = (output < outputs)[:, None] & there[None, :]
        packed = tl.load(codes + output[:, None] * (SIZE // 2) + byte[None, :], mask=mask, other=0).to(tl.int32)
        low, high = packed & 15, packed >> 4
        group = output * GROUPS + start // (SIZE // GROUPS)
        if levels is not None:
            low, high = tl.load(levels + low), tl.load(levels + high)
        else:
            low, high = low - 8, high - 8
            if zero is not None:
                shift = tl.load(zero + group, mask=output < outputs, other=0).to(tl.int32)
                low, high = low - shift[:, None], high - shift[:, None]
        products = tl.dot(even, tl.trans(low.to(FACTORS)), input_precision="ieee")
        products += tl.dot(odd, tl.trans(high.to(FACTORS)), input_precision="ieee")
        total += products * tl.load(scale + group, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + output[None, :], total, mask=mask)
