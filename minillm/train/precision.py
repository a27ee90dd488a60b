"""Fewer bits where they do no harm: 16-bit arithmetic around float32 weights, or 16-bit weights beside a float32 copy.

                    weights  gradients  master  moments   bytes per parameter        (Micikevicius et al. 2018)
    fp32               4         4         -      4 + 4        16
    bf16, fp16         4         4         -      4 + 4        16     autocast: matmuls cast their inputs each time
    *-master           2         2         4      4 + 4        16     the weights are stored in 16 bits
    bf16-pure          2         2         -      2 + 2         8     and stands still: small updates are lost

Mixed precision therefore saves no model state; it saves activations, traffic and time. float16 also needs loss scaling:
gradients below 3e-8 would be flushed to zero, so the loss is multiplied before backward and the
gradients divided after, in float32.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """weights: the dtype they are stored in; autocast: what matmuls compute in; master: float32 copies are stepped."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    master: bool = False
    scaled: bool = False

    def context(self, device: torch.device) -> contextlib.AbstractContextManager:
        """The context in which forward runs; backward runs outside."""
        return torch.autocast(device.type, self.autocast) if self.autocast else contextlib.nullcontext()

    @property
    def compute(self) -> torch.dtype:
        """The dtype in which matmuls compute."""
        return self.autocast or self.weights


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "fp16": Precision(autocast=torch.float16, scaled=True),
    "bf16-master": Precision(weights=torch.bfloat16, master=True),
    "fp16-master": Precision(weights=torch.float16, master=True, scaled=True),
    "bf16-pure": Precision(weights=torch.bfloat16),
}


class LossScaler:
    """Dynamic loss scaling: the highest power of two that does not overflow, found by trying.

        scaler.scale(loss).backward()
        scaler.unscale_(parameters)            # gradients / scale, in place
        finite = norm.isfinite()               # of all gradients: it is known anyway, to clip them
        if finite: optimizer.step()
        scaler.update(finite)                  # overflow: halve; `interval` good steps in a row: double

    The same numbers as torch.amp.GradScaler; disabled, its scale stays 1.
    """

    def __init__(
        self,
        enabled: bool = True,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ):
        if scale <= 0 or growth <= 1 or not 0 < backoff < 1 or interval < 1:
            raise ValueError(
                f"loss scaling by {scale}, growth {growth}, backoff {backoff}, interval {interval} cannot work: "
                "scale > 0, growth > 1, 0 < backoff < 1, interval >= 1."
            )
        self.enabled, self.growth, self.backoff, self.interval = enabled, growth, backoff, interval
        self.value = scale if enabled else 1.0
        self.good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.enabled else loss

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[Tensor]) -> None:
        """Divides the gradients in place, in one operation for all. Half-precision gradients would underflow: unscale
        float32 ones (`MasterWeights.cast_gradients`). Disabled: touches nothing."""
        if not self.enabled:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if half := [gradient for gradient in gradients if gradient.dtype == torch.float16]:
            raise ValueError(f"{len(half)} gradients are float16 and would underflow: unscale float32 ones.")
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.value)

    def update(self, finite: bool) -> None:
        """After each step; finite: whether all gradients were, on all ranks."""
        if not self.enabled:
            return
        if not finite:
            self.value *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            grown = self.value * self.growth
            self.value = grown if grown < torch.finfo(torch.float32).max else self.value
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]


class MasterWeights:
    """Float32 copies of 16-bit weights: the optimizer steps the copies, the weights follow.

        cast_gradients()   weight.grad (16 bit) -> master.grad (float32), and the first is freed
        ...          unscale, clip and step the masters
        write_weights()    master -> weight, rounded

    16 bytes per parameter with Adam during backward; 18 while it steps, when gradients are float32 and masters move.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter]):
        self.weights = list(weights)
        self.masters = [torch.nn.Parameter(w.detach().float(), w.requires_grad) for w in self.weights]

    def cast_gradients(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def write_weights(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad = None
