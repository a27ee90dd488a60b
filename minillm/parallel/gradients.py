"""What every gradient engine needs: the global norm, clipping by it, and how an optimizer is made."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

Named = Iterable[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]


def squared_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Σ g² over all gradients, a scalar in at least float32; what shards of a model add up before the root is taken."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return torch.stack(norms).square().sum() if norms else torch.zeros(())


def clip_(parameters: Sequence[Tensor], norm: Tensor, max_norm: float | None) -> None:
    """Scales all gradients by max_norm / norm if that is below 1; their directions stay (Pascanu et al. 2013)."""
    if max_norm is None:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
