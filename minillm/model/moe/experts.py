"""All experts' SwiGLU over rows that are sorted by expert: one product per matrix, in groups of rows.

    gate_up_proj  [experts, 2, intermediate, hidden]   an expert's gate and up together: one product
    down_proj     [experts, hidden, intermediate]      [out, in] as in nn.Linear

Expert parallelism cuts the first axis of both; tensor parallelism the axis of `intermediate`. On a GPU with bfloat16
`torch`'s grouped matmul does all experts in one launch and reads the counts where they are; elsewhere every expert has
a matmul of its own, over its rows and without a copy of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2, intermediate_size, hidden_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [rows, hidden], sorted by expert; counts: [num_experts], rows of each -> [rows, hidden]."""
        gate, up = grouped_linear(rows, self.gate_up_proj.flatten(1, 2), counts).chunk(2, dim=-1)
        return grouped_linear(self.activation(gate) * up, self.down_proj, counts)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows: [rows, in], in groups of counts[e]; weight: [experts, out, in] -> rows of group e times weight[e]ᵀ."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (rows, weight))
    if has_grouped_mm(rows, weight):
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    return _OneByOne.apply(rows, weight, counts.tolist())


def has_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """torch's own kernel: CUDA from compute capability 8.0, bfloat16, rows of whole 16 bytes."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(rows.device) >= (8, 0) and not any(size % 8 for size in weight.shape[1:])


class _OneByOne(torch.autograd.Function):
    """One matmul per expert, each writing to its part of the result: slices under autograd would have each expert
    fill, and add, a gradient of the size of all."""

    @staticmethod
    def forward(ctx, rows, weight, counts):
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        result = rows.new_empty(len(rows), weight.shape[1])
        for out, part, matrix in zip(result.split(counts), rows.split(counts), weight, strict=True):
            torch.mm(part, matrix.T, out=out)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (rows, weight), counts = ctx.saved_tensors, ctx.counts
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        parts = gradient.split(counts)
        if of_rows is not None:
            for out, part, matrix in zip(of_rows.split(counts), parts, weight, strict=True):
                torch.mm(part, matrix, out=out)
        if of_weight is not None:
            for out, part, inputs in zip(of_weight, parts, rows.split(counts), strict=True):
                torch.mm(part.T, inputs, out=out)
        return of_rows, of_weight, None
