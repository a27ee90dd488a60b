"""GPTQ: round the columns of a weight matrix in turn, and let the columns that are left make good for the error.

    columns in order:   done │ this one │ still to come          least Σ ‖(W - Ŵ) x‖² over the calibration's inputs
                               rounded    each -= error · what H⁻¹ says
                               error = (w - ŵ) / [H⁻¹]jj

H = Σ x xᵀ + damping. The row of H⁻¹ that each step needs, with the columns before it taken out, is a row of the upper
Cholesky factor of H⁻¹, so it is computed once (Frantar et al. 2022, §3.3). Columns come in blocks: within a block each
step updates the block alone, then one product updates the rest.
"""

import torch
from torch import Tensor

from minillm.quantize.formats import Format, Grid

BLOCK = 128  # columns


def gptq(
    weight: Tensor, gram: Tensor, format: Format, *, damping: float = 0.01, by_activation: bool = True
) -> tuple[Tensor, Grid]:
    """(codes [out, in], the grid). weight: [out, in]; gram: [in, in], Σ x xᵀ of the layer's inputs.

    damping: of the mean of the diagonal, added to it. by_activation: columns with large inputs come first, while many
    columns are left to make good for them. The grid is that of the weights as they were, so groups keep their order
    and a reader of the codes needs no index.
    """
    weight, hessian, size = weight.float().clone(), gram.float().clone(), weight.shape[1]
    grid = format.grid(weight)
    diagonal = hessian.diagonal()
    unseen = diagonal == 0  # such a column changes nothing: it is rounded to nearest
    diagonal[unseen] = 1
    diagonal += damping * diagonal.mean()
    order = diagonal.argsort(descending=True) if by_activation else torch.arange(size, device=weight.device)
    weight, upper = weight[:, order], _inverse_factor(hessian[order][:, order])
    wide = grid.spread(size).map(lambda each: each[:, order])
    codes = []
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        errors = torch.zeros(len(weight), end - start, device=weight.device)
        for column in range(start, end):
            own = wide.map(lambda each, at=column: each[:, at])
            codes.append(format.encode(weight[:, column], own))
            error = (weight[:, column] - format.decode(codes[-1], own)) / upper[column, column]
            weight[:, column:end] -= error[:, None] * upper[column, column:end]
            errors[:, column - start] = error
        weight[:, end:] -= errors @ upper[start:end, end:]
    return torch.stack(codes, dim=1)[:, order.argsort()], grid


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor U of H⁻¹ = Uᵀ U. ValueError if H has no inverse in float32."""
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError:
        raise ValueError(
            "GPTQ's Hessian has no inverse: calibrate on more text, or look for weights that are not finite."
        ) from None
