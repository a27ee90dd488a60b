"""Codes in words of 32 bits, from the lowest bits up: how quantized folders store them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.quantize.formats import pack_halves, unpack_halves


def to_words(codes: Tensor, bits: int) -> Tensor:
    """[rows, n] codes of -2^(bits - 1) .. -> [rows, n · bits / 32] int32, rows padded to whole words."""
    codes = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    codes = F.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    return (pack_halves(codes) if bits == 4 else codes).contiguous().view(torch.int32)


def from_words(words: Tensor, bits: int, size: int) -> Tensor:
    """[rows, words] int32 -> [rows, size] codes, int8."""
    codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # also of one word a row
    codes = unpack_halves(codes) if bits == 4 else codes
    return (codes[:, :size].to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
