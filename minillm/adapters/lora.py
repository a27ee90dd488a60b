"""LoRA: a frozen layer, and beside it a product of two thin matrices that learns (Hu et al. 2021).

           ┌─ base: W, frozen, [out, in] ────────────┐
    x ─────┤                                         (+)──▶ y = x Wᵀ + scale · (x Aᵀ) Bᵀ
           └─ A [rank, in] ──▶ h ──▶ B [out, rank] ──┘

B begins as zeros, so training begins with the base's own outputs. scale is alpha / rank, or alpha / √rank with rsLoRA
(Kalajdzievski 2023), under which the update does not shrink as the rank grows. An adapter has rank · (in + out)
numbers; `merge` adds scale · B A to W, after which the layer costs what it did before.

The base may be any linear layer: nn.Linear, a quantized one (QLoRA, Dettmers et al. 2023), and, with the forms in
parallel.py, a layer that is cut over tensor-parallel ranks.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.adapters.dropout import Rows, layer_key, mask_of

BASE, MATRICES = "base", ("lora_A", "lora_B")


@dataclass(frozen=True)
class LoraConfig:
    """rank: of every update. targets: patterns of layers' names, see `attach.matches`.

    alpha: of the scale; None = twice the rank. rslora: alpha / √rank in place of alpha / rank. dropout: of A's input,
    while training. zero_start: B begins as zeros; False is for tests, in which every number has to matter.
    """

    rank: int
    targets: tuple[str, ...] = ("q", "v")
    alpha: float | None = None
    rslora: bool = False
    dropout: float = 0.0
    zero_start: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank {self.rank!r} must be a whole number of at least 1: 8 and 16 are usual.")
        if not self.targets or not all(self.targets):
            raise ValueError(f"targets {','.join(self.targets)!r} name no layer: give some such as q,v.")
        if self.alpha is not None and not (isinstance(self.alpha, int | float) and 0 < self.alpha < math.inf):
            raise ValueError(f"alpha {self.alpha!r} must be a number above 0, or None for twice the rank.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout!r} is outside 0 .. 1: 0 is none, 0.05 is usual.")

    @property
    def full_alpha(self) -> float:
        return 2 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.full_alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoraLinear(nn.Module):
    """`base` with an adapter. x: [..., in] -> [..., out].

    lora_A, lora_B: without values until they are drawn or loaded. is_on: False computes the base alone.
    is_merged: the base's weight has the update already, so that nothing is added to what it computes.
    name: of the layer in the whole model; rows: of the model's passes; both for dropout.
    """

    def __init__(
        self,
        base: nn.Module,
        config: LoraConfig,
        dtype: torch.dtype,
        device: torch.device,
        name: str = "",
        rows: Rows | None = None,
    ) -> None:
        super().__init__()
        self.key, self.rows = layer_key(name), rows or Rows()
        outputs, inputs = sizes_of(base)
        self.base, self.scale, self.dropout = base, config.scale, config.dropout
        self.is_on, self.is_merged = True, False
        how = {"dtype": dtype, "device": device}
        self.lora_A = nn.Parameter(torch.empty(config.rank, inputs, **how))
        self.lora_B = nn.Parameter(torch.empty(outputs, config.rank, **how))

    @property
    def is_added(self) -> bool:
        """Whether forward has to add the update."""
        return self.is_on and not self.is_merged

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.update(x) if self.is_added else y

    def update(self, x: Tensor) -> Tensor:
        """What the adapter adds to the base's output: scale · (x Aᵀ) Bᵀ."""
        return self.raised(F.linear(self.dropped(x), self.lora_A))

    def dropped(self, x: Tensor) -> Tensor:
        """x: [batch, seq, in], or of any shape where rows have no keys -> what A reads of it."""
        if not (self.training and self.dropout):
            return x
        if self.rows.keys is None:
            return F.dropout(x, self.dropout)
        return x * mask_of(self.rows, self.key, self.dropout, x, x.shape[1])

    def raised(self, h: Tensor) -> Tensor:
        """h: [..., rank], of A -> [..., out]."""
        return self.scale * F.linear(h, self.lora_B)

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the update to the base's weight: the same outputs, to rounding. ValueError if that was done already, or
        if the weight is quantized."""
        if self.is_merged:
            raise ValueError("this adapter is merged already: a second time would add its update twice.")
        self._add(1.0)
        self.is_merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Takes the update out of the base's weight again: what it was before, to rounding."""
        if not self.is_merged:
            raise ValueError("this adapter is not merged: there is nothing to take out.")
        self._add(-1.0)
        self.is_merged = False

    def _add(self, sign: float) -> None:
        weight = self.base.weight
        if not isinstance(weight, nn.Parameter):
            raise ValueError(
                "a quantized weight cannot take an update of its own precision: merge into the folder that it was made "
                "of, and quantize that."
            )
        wide = torch.promote_types(weight.dtype, torch.float32)
        update = self.lora_B.to(wide) @ self.lora_A.to(wide)
        weight.copy_(weight.to(wide) + sign * self.scale * update)

    def extra_repr(self) -> str:
        return f"rank={len(self.lora_A)}, scale={self.scale:g}"


def sizes_of(base: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, of what this rank has of it."""
    if hasattr(base, "out_features"):
        return base.out_features, base.in_features
    return tuple(base.weight.shape)


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.rpartition(".")[2] in MATRICES


def base_name(name: str) -> str:
    """The name that a parameter, or for an adapter's its layer's weight, has in the model without adapters."""
    before, _, last = name.rpartition(".")
    return f"{before}.weight" if last in MATRICES else name.replace(f".{BASE}.", ".")


def initial_adapter(config: LoraConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial value of a whole A or B, a function of (seed, name) alone, float32, on the CPU: A is uniform within
    1 / √in, as nn.Linear and peft have it, and B zero."""
    if name.endswith("lora_B") and config.zero_start:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)
