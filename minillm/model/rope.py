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
        self.attention_factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: [seq] or [batch, seq] -> cos and ±sin, [seq, 2 · planes] or [batch, 1, seq, 2 · planes].

        Each plane's numbers stand where its two dimensions do; the sine is negative at the first of them, see `rotate`.
        With a sliding_rope_theta both have an axis of size 2 before these, see `rotation_of`.
        """
        frequencies = self.frequencies
        if frequencies.dim() == 2:
            frequencies = frequencies.view(2, *[1] * positions.dim(), -1)
        angles = positions[..., None].float() * frequencies
        if positions.dim() == 2:
            angles = angles.unsqueeze(-3)  # one row for all heads
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        cos, sin = cos.to(dtype), sin.to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.frequencies = rope_frequencies(self.config).to(self.frequencies.device)
        return self


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, heads, seq, head_dim], turned by the angles of its positions; dimensions beyond the planes stay.

    A plane (a, b) becomes (a, b) · cos + (b, a) · (-sin, sin): few operations, as a step of one token needs.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        turned, rest = x.split([size, x.shape[-1] - size], dim=-1)
        return torch.cat((rotate(turned, cos, sin), rest), dim=-1)
    return x.roll(size // 2, dims=-1) * sin + x * cos  # in this order contiguous, whatever x is


def rotation_of(config: ModelConfig, layer: int) -> int | None:
    """Which of `Rope`'s two rotations a layer uses, 0 or 1; None if the model has one."""
    return None if config.sliding_rope_theta is None else int(layer not in config.full_attention_layers)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each plane: [planes], float32, on the CPU.

    With a sliding_rope_theta [2, planes]: of the full-attention layers and of the others.
    """
    frequencies = _scaled(config)
    if config.sliding_rope_theta is None:
        return frequencies
    return torch.stack((frequencies, 1.0 / _powers(config, config.sliding_rope_theta)))


def _powers(config: ModelConfig, theta: float) -> Tensor:
    size = config.rotary_dim or config.head_dim
    return theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)


def _scaled(config: ModelConfig) -> Tensor:
    powers, scaling = _powers(config, config.rope_theta), config.rope_scaling
    frequencies = 1.0 / powers
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(powers, scaling, config.rope_theta)
    if scaling.kind == "longrope":
        longer = config.max_seq_len > scaling.original_max_seq_len
        factors = scaling.long_factors if longer else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)
    size = 2 * len(frequencies)  # dynamic: https://github.com/jquesnelle/yarn, "NTK-aware"
    growth = scaling.factor * max(1.0, config.max_seq_len / scaling.original_max_seq_len) - (scaling.factor - 1)
    return 1.0 / _powers(config, config.rope_theta * growth ** (size / (size - 2)))


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths keep their frequency, long ones are slowed by `factor`, the rest is blended in between."""
    turns = scaling.original_max_seq_len / (2 * math.pi / frequencies)  # turns made over the original context
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def _yarn(powers: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """As llama3, but blended along the number of the plane instead of its turns."""
    planes = len(powers)

    def plane(turns: float) -> float:  # that makes so many turns over the original context
        return planes * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    first, last = plane(scaling.beta_fast), plane(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * planes - 1)
    slowed = (torch.arange(planes, dtype=torch.float32, device="cpu") - first) / (last - first or 0.001)
    slowed = slowed.clamp(0, 1)
    kept = 1 - slowed
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
