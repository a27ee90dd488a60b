"""Fewer weights, or fewer products: masks for pruning, and low rank.

    magnitude    the smallest |w| of each output become 0          any share
    2:4          of four inputs in a row the two smallest do       half, in a form that GPUs multiply faster
                 (Mishra et al. 2021, "Accelerating sparse deep neural networks")
    low rank     W ≈ A B, [out, r] and [r, in]                     least ‖W - A B‖: the SVD, cut off

With the inputs' statistics (calibrate.py) small means small in effect: |w| · ‖x‖ (Sun et al. 2023, "Wanda", §3), and
low rank minimises ‖(W - A B) x‖ (the SVD of W L with L Lᵀ = Σ x xᵀ, then L⁻¹ behind it; Wang et al. 2024, "SVD-LLM").
"""

import torch
from torch import Tensor

DAMPING = 1e-6  # of the mean of the diagonal of Σ x xᵀ, so that it has a factor


def magnitude_mask(weight: Tensor, sparsity: float, norms: Tensor | None = None) -> Tensor:
    """[out, in], True where a weight stays. sparsity: the share of each output's weights that goes, rounded down.
    norms: [in], ‖x‖ of each input; None = all alike."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity {sparsity} must lie in 0 .. 1, without 1.")
    return _without_smallest(_effect(weight, norms), int(sparsity * weight.shape[1]))


def two_of_four_mask(weight: Tensor, norms: Tensor | None = None) -> Tensor:
    """[out, in], True for the two of every four inputs in a row that matter most."""
    if weight.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs are not a multiple of 4: 2:4 needs whole fours.")
    return _without_smallest(_effect(weight, norms).unflatten(1, (-1, 4)), 2).flatten(1)


def low_rank(weight: Tensor, rank: int, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """([out, rank], [rank, in]) whose product is nearest to the weight. gram: [in, in], Σ x xᵀ of the inputs: nearest
    in what it makes of them; None = in the weights themselves."""
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"rank {rank} must lie in 1 .. {min(weight.shape)}, the smaller side of the weight.")
    matrix, factor = weight.double(), None
    if gram is not None:
        damped = gram.double() + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
        factor = torch.linalg.cholesky(damped)
        matrix = matrix @ factor
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    left, right = u[:, :rank] * values[:rank], v[:rank]
    if factor is not None:
        right = torch.linalg.solve_triangular(factor, right, upper=False, left=False)
    return left.to(weight.dtype), right.to(weight.dtype)


def _without_smallest(effect: Tensor, count: int) -> Tensor:
    """False for so many of each row, the last axis; of equal ones the first."""
    smallest = effect.argsort(dim=-1, stable=True)[..., :count]
    return torch.ones_like(effect, dtype=torch.bool).scatter_(-1, smallest, False)


def _effect(weight: Tensor, norms: Tensor | None) -> Tensor:
    return weight.detach().abs() if norms is None else weight.detach().abs() * norms
