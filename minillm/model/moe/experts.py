"""All experts' SwiGLU over rows that are sorted by expert: one product per matrix, in groups of rows.

    gate_up_proj  [experts, 2, intermediate, hidden]   an expert's gate and up together: one product
    down_proj     [experts, hidden, intermediate]      [out, in] as in nn.Linear

Expert parallelism cuts the first axis of both; tensor parallelism the axis of `intermediate`. On a GPU with bfloat16
`torch`'s grouped matmul does all experts in one launch and reads the counts where they are; elsewhere one expert comes
after the other, which has an advantage of its own: what lies between its two products stays in the cache.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten


class Experts(nn.Module):
    """activation: "silu" or "gelu_tanh", of the gate."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2, intermediate_size, hidden_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype))

    def forward(self, rows: Tensor, counts: Tensor, known: Sequence[int] | None = None) -> Tensor:
        """rows: [rows, hidden], sorted by expert; counts: [num_experts], rows of each one. Returns [rows, hidden].

        known: the counts where the host has read them. Without them it waits for the device, if that has no grouped
        product."""
        gate_up, down, kind = self.gate_up_proj.flatten(1, 2), self.down_proj, rows.device.type
        if torch.is_autocast_enabled(kind):
            rows, gate_up, down = (each.to(torch.get_autocast_dtype(kind)) for each in (rows, gate_up, down))
        if not has_grouped_mm(rows, down):
            keep = torch.is_grad_enabled()
            known = counts.tolist() if known is None else known
            return _OneByOne.apply(rows, gate_up, down, known, self.activation, keep)
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return torch._grouped_mm(gate * up, down.transpose(1, 2), offs=ends)


def has_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """torch's own kernel: CUDA from compute capability 8.0, bfloat16, rows of whole 16 bytes."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(rows.device) >= (8, 0) and not any(size % 8 for size in weight.shape[1:])


class _OneByOne(torch.autograd.Function):
    """rows: [rows, hidden]; gate_up: [experts, 2 * width, hidden]; down: [experts, hidden, width].

    Only gate and up are kept for backward, 2 · width numbers a row; under autograd it would be 4, and each expert would
    fill, and add, a gradient of the size of all. What lies between two products is memory that experts take turns in.
    """

    @staticmethod
    def forward(ctx, rows, gate_up, down, counts, activation, keep):
        width, most = down.shape[2], max(counts)
        halves = rows.new_empty(len(rows) if keep else most, 2 * width)
        inner, result = rows.new_empty(most, width), rows.new_empty(len(rows), down.shape[1])
        for expert, own in _parts(counts):
            count = own.stop - own.start
            both = torch.mm(rows[own], gate_up[expert].T, out=halves[own] if keep else halves[:count])
            middle = _activate(both[:, :width], activation, out=inner[:count]).mul_(both[:, width:])
            torch.mm(middle, down[expert].T, out=result[own])
        ctx.counts, ctx.activation = counts, activation
        ctx.save_for_backward(rows, gate_up, down, halves if keep else None)
        return result

    @staticmethod
    def backward(ctx, gradient):
        rows, gate_up, down, halves = ctx.saved_tensors
        width, most = down.shape[2], max(ctx.counts)
        of_rows, of_gate_up, of_down = (
            torch.empty_like(each) if wanted else None
            for each, wanted in zip((rows, gate_up, down), ctx.needs_input_grad[:3], strict=True)
        )
        inner, of_inner = (rows.new_empty(most, width) for _ in range(2))
        of_halves = rows.new_empty(most, 2 * width)
        for expert, own in _parts(ctx.counts):
            count = own.stop - own.start
            gate, up = halves[own, :width], halves[own, width:]
            middle = _activate(gate, ctx.activation, out=inner[:count])
            of_middle = torch.mm(gradient[own], down[expert], out=of_inner[:count])
            of_both = of_halves[:count]
            torch.mul(of_middle, middle, out=of_both[:, width:])
            _activation_backward(of_middle.mul_(up), gate, ctx.activation, out=of_both[:, :width])
            if of_down is not None:
                torch.mm(gradient[own].T, middle.mul_(up), out=of_down[expert])
            if of_rows is not None:
                torch.mm(of_both, gate_up[expert], out=of_rows[own])
            if of_gate_up is not None:
                torch.mm(of_both.T, rows[own], out=of_gate_up[expert])
        return of_rows, of_gate_up, of_down, None, None, None


def _parts(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) for each expert."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return [(expert, slice(starts[expert], starts[expert + 1])) for expert in range(len(counts))]


def _activate(gate: Tensor, activation: str, out: Tensor) -> Tensor:
    return aten.silu(gate, out=out) if activation == "silu" else aten.gelu(gate, approximate="tanh", out=out)


def _activation_backward(gradient: Tensor, gate: Tensor, activation: str, out: Tensor) -> Tensor:
    if activation == "silu":
        return aten.silu_backward(gradient, gate, grad_input=out)
    return aten.gelu_backward(gradient, gate, approximate="tanh", grad_input=out)
