"""What multiplies with packed weights: torch's own kernels on the CPU, ours on a GPU, or dequantize and multiply.

    int8 weights               torch._weight_int8pack_mm            reads a byte a weight
    int4 weights, in groups    torch._weight_int4pack_mm_for_cpu    reads half a byte, in an order of its own
    int8 weights and inputs    torch._int_mm                        sums of int8 products, in int32
    4 bits on a CUDA GPU       triton.multiply_w4a16                reads half a byte, of int4 and of NF4
    all others                 dequantize and multiply              right everywhere, and slower than not quantizing

The packed kernels multiply in bfloat16 and sum in float32: with float32 inputs they fall back to a plain loop, ten
times slower and more, so float32 inputs are rounded to bfloat16 first. In the three integer kernels the rows of a batch
do not depend on each other: a token has the same result alone, in a batch and in a prompt.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.quantize import triton
from minillm.quantize.formats import NF4, Format, Int, unpack_halves

INT4_GROUPS = (32, 64, 128, 256)  # what the kernel has been written for
INT4_ROWS = 16  # outputs come in multiples of it
INT4_BLOCK = 64  # outputs that are laid out together, or a multiple of their number
DEQUANTIZE, INT8, INT4, W8A8, W4A16 = (
    "dequantize", "torch._weight_int8pack_mm", "torch._weight_int4pack_mm_for_cpu", "torch._int_mm", "triton w4a16",
)  # fmt: skip


def has_packed_kernels() -> bool:
    """Whether this CPU has torch's vectorised ones."""
    wanted = hasattr(torch, "_weight_int8pack_mm") and hasattr(torch, "_weight_int4pack_mm_for_cpu")
    return wanted and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512", "AMX")


def available() -> dict[str, str]:
    """What layers are multiplied by -> the kernel here, of those that read packed weights."""
    found = {"int8": INT8, "int4 in groups": INT4} if has_packed_kernels() else {}
    return found | ({"4 bits on the GPU": W4A16} if torch.cuda.is_available() and triton.fits(None) else {})


def choose(format: Format, outputs: int, groups: int, device: torch.device, quantizes_inputs: bool = False) -> str:
    """The name of what multiplies with a layer's weights on a device. groups: scales of each output."""
    if device.type == "cuda":
        is_packed = isinstance(format, Int | NF4) and format.bits == 4 and not quantizes_inputs
        return W4A16 if is_packed and triton.fits(format.group) else DEQUANTIZE
    if not isinstance(format, Int) or device.type != "cpu":
        return DEQUANTIZE
    per_channel = format.symmetric and groups == 1 and format.bits == 8
    if quantizes_inputs and per_channel:
        return W8A8
    if quantizes_inputs or not has_packed_kernels():
        return DEQUANTIZE
    if per_channel:
        return INT8
    fits = format.bits == 4 and format.group in INT4_GROUPS and outputs % INT4_ROWS == 0
    return INT4 if fits else DEQUANTIZE


def multiply_int8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x: [rows, in]; codes: int8 [out, in]; scale: bfloat16 [out] -> [rows, out]."""
    return torch._weight_int8pack_mm(x.bfloat16().contiguous(), codes, scale).to(x.dtype)


def multiply_int4(x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """x: [rows, in]; packed, scales_and_zeros: of `int4_layout` -> [rows, out]."""
    return torch._weight_int4pack_mm_for_cpu(x.bfloat16().contiguous(), packed, group, scales_and_zeros).to(x.dtype)


def multiply_w8a8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Inputs rounded to int8, a scale for each token. x: [rows, in]; codes: int8 [out, in]; scale: float32 [out]."""
    rounded, of_rows = round_inputs(x)
    return (torch._int_mm(rounded, codes.T).float() * of_rows * scale).to(x.dtype)


def multiply_dequantized(x: Tensor, weight: Tensor, quantizes_inputs: bool = False) -> Tensor:
    """x: [rows, in]; weight: [out, in]. quantizes_inputs: x is rounded to int8 and back first."""
    if quantizes_inputs:
        rounded, of_rows = round_inputs(x)
        x = (rounded.float() * of_rows).to(x.dtype)
    return F.linear(x, weight.to(x.dtype))


def round_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [rows, in] -> int8 [rows, in], and the scale of each row, [rows, 1]: 255 steps span its largest input, twice,
    as those of a symmetric `Int` span a weight."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) * 2 / 255
    return torch.round(x.float() / scale).clamp(-128, 127).to(torch.int8), scale


def int4_layout(codes: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the int4 kernel reads. codes: -8 .. 7, [out, in]; scale, zero: [out, groups].

    The kernel knows codes of 0 .. 15 that stand for (code - 8) · scale + offset, so a zero point becomes an offset.
    """
    packed = torch._convert_weight_to_int4pack_for_cpu((codes.int() + 8).contiguous(), 1)
    offset = torch.zeros_like(scale) if zero is None else -zero * scale
    return packed, torch.stack((scale.T, offset.T), dim=-1).bfloat16().contiguous()


def codes_of_int4_layout(packed: Tensor) -> Tensor:
    """The codes, -8 .. 7, [out, in], that `int4_layout` made `packed` of. Blocks of outputs are laid out alike."""
    whole = len(packed) // INT4_BLOCK * INT4_BLOCK
    parts = [packed[:whole].unflatten(0, (-1, INT4_BLOCK)), packed[None, whole:]]
    return torch.cat([_codes_of_blocks(part) for part in parts if part.numel()])


def _codes_of_blocks(blocks: Tensor) -> Tensor:
    """blocks: [blocks, rows, in / 2] -> [blocks · rows, in].

    Where the kernel wants each code depends on the CPU, so that is asked: the numbers of the places go through the same
    conversion, a hexadecimal digit at a time.
    """
    rows, size = blocks.shape[1], 2 * blocks.shape[2]
    numbers = torch.arange(rows * size, dtype=torch.int32).view(rows, size)
    places = torch.zeros(rows * size, dtype=torch.int64)
    for shift in range(0, (rows * size - 1).bit_length(), 4):
        digit = (numbers >> shift & 15).contiguous()
        places += unpack_halves(torch._convert_weight_to_int4pack_for_cpu(digit, 1)).flatten().long() << shift
    codes = torch.empty(len(blocks), rows * size, dtype=torch.int8)
    codes[:, places] = unpack_halves(blocks.flatten(1)).to(torch.int8) - 8
    return codes.view(-1, size)
