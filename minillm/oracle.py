"""The equivalence oracle: any layout must compute the gradients of a single process.

`reference` is the single process: one SGD step in float64. SGD and not Adam, because Adam divides a gradient's scale
out again and so hides a loss that is N times too large; float64, so that 1e-10 separates another order of summation
from a bug; every gradient and weight by name, because a loss agrees long before all of them do.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from minillm.model import ModelConfig, Transformer, cross_entropy, dense
from minillm.model.loss import IGNORE


@dataclass(frozen=True)
class Batch:
    """tokens, targets: [batch, seq] of ids, a target of -100 does not count; weights: [batch, seq], None = all 1."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None = None

    def __post_init__(self):
        for name in ("targets", "weights"):
            other = getattr(self, name)
            if other is not None and other.shape != self.tokens.shape:
                raise ValueError(
                    f"{name} have shape {list(other.shape)}, tokens {list(self.tokens.shape)}: use one shape."
                )

    @staticmethod
    def random(config: ModelConfig, batch: int, seq: int, *, seed: int = 0) -> "Batch":
        """Random ids, weights between 0 and 1, and about one target in five left out: no two rows count alike."""
        draw = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(config.vocab_size, (2, batch, seq), generator=draw)
        targets[torch.rand(batch, seq, generator=draw) < 0.2] = IGNORE
        return Batch(tokens, targets, torch.rand(batch, seq, generator=draw, dtype=torch.float64))


@dataclass(frozen=True)
class Reference:
    """One step in float64. gradients: of trainable parameters, before clipping; weights: of all, after the step."""

    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float
    weights: dict[str, Tensor]


def reference(
    config: ModelConfig,
    batch: Batch,
    *,
    seed: int = 0,
    lr: float = 0.1,
    frozen: tuple[str, ...] = (),
    max_grad_norm: float | None = None,
) -> Reference:
    """One SGD step of `Transformer(config, seed=seed)` on the whole batch, in this process.

    frozen: names or patterns of parameters that take no gradient ("blocks.0.*"). max_grad_norm: clip to it before.
    A tied embedding is one parameter, "embedding.weight", whose gradient is the sum of both uses.
    ValueError for a pattern that matches nothing, or when everything is frozen.
    """
    model = Transformer(config, seed=seed, device="cpu", dtype=torch.float64, attention=dense)
    for pattern in frozen:
        matched = [parameter for name, parameter in model.named_parameters() if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"frozen pattern {pattern!r} matches no parameter: see Transformer.named_parameters().")
        for parameter in matched:
            parameter.requires_grad_(False)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError(f"frozen {frozen} leaves no parameter to train: freeze less.")

    loss = cross_entropy(model(batch.tokens), batch.targets, batch.weights)
    gradients = dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))
    grad_norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item()
    clip = 1.0 if max_grad_norm is None or grad_norm <= max_grad_norm else max_grad_norm / grad_norm
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter -= lr * clip * gradients[name]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Reference(loss.item(), gradients, grad_norm, weights)
