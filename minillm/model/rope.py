"""Rotary position embedding: a query and a key are turned by angles proportional to their positions.

Each head is head_dim / 2 planes; plane i turns by position · theta^(-2i / head_dim). The product of a turned query and
a turned key then depends on the distance of the two positions alone (Su et al. 2021, §3.2). Planes pair dimension i
with i + head_dim / 2, the layout of Hugging Face's Llama weights.
"""

import math

import torch
from torch import Tensor, nn

from minillm.model.config import ModelConfig, RopeScaling


class Rope(nn.Module):
    """positions -> (cos, sin), computed once per forward pass and shared by all blocks.

    The frequencies follow from the configuration, so they are no checkpointed state. They stay float32 when the
    model is cast (in bfloat16 they would be off by whole turns at long positions) and are made again when it leaves
    "meta".
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: [seq] or [batch, seq] -> cos and sin, [seq, head_dim / 2] or [batch, 1, seq, head_dim / 2]."""
        angles = positions[..., None].float() * self.frequencies
        if positions.dim() == 2:
            angles = angles[:, None]  # one row for all heads
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.frequencies = rope_frequencies(self.config).to(self.frequencies.device)
        return self


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, heads, seq, head_dim], turned by the angles of its positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each plane: [head_dim / 2], float32, on the CPU."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    return frequencies / scaling.factor if scaling.kind == "linear" else _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths keep their frequency, long ones are slowed by `factor`, the rest is blended in between."""
    turns = scaling.original_max_seq_len / (2 * math.pi / frequencies)  # turns made over the original context
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * frequencies / scaling.factor + share * frequencies
