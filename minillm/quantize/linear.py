"""`QuantizedLinear` takes the place of `nn.Linear`: it keeps codes and scales, and multiplies by the kernel for them.

    nn.Linear          weight [out, in], 4 bytes each
    QuantizedLinear    codes  [out, in], 1 or ½ byte each     scale [out, groups]     zero [out, groups] or None

All are buffers, so no optimizer finds them. Gradients flow to the inputs, as an adapter beside frozen weights needs.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minillm.quantize import kernels, triton
from minillm.quantize.formats import NF4, NF4_LEVELS, DoubleScales, Format, Grid


class QuantizedLinear(nn.Module):
    """x: [..., in] -> [..., out].

    codes: as `format.pack` keeps them. quantizes_inputs: inputs are rounded to int8, a scale for each token (W8A8).
    kernel: what multiplies (`kernels.choose`); `use` sets another. multiply: [rows, in] -> [rows, out] by it, without
    the bias, a new object whenever the layer's tensors are. buffers_are_constant: no forward pass changes them, so that
    replicas need not compare.
    """

    buffers_are_constant = True

    def __init__(
        self,
        format: Format,
        codes: Tensor,
        grid: Grid | DoubleScales,
        bias: Tensor | None,
        quantizes_inputs: bool = False,
    ):
        super().__init__()
        self.format, self.quantizes_inputs = format, quantizes_inputs
        self.out_features, self.in_features = len(codes), format.unpack(codes[:1]).shape[1]
        if isinstance(grid, Grid) and isinstance(format, NF4) and format.double:
            grid = DoubleScales.of(grid.scale)
        doubled, zero = (grid, None) if isinstance(grid, DoubleScales) else (None, grid.zero)
        self.register_buffer("codes", codes.contiguous())  # as kernels expect all of these
        scale = grid.scale.to(format.scale_dtype) if doubled is None else doubled.codes
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("scale_largest", None if doubled is None else doubled.largest)
        self.register_buffer("scale_mean", None if doubled is None else doubled.mean)
        self._place = (0, None) if doubled is None else (doubled.first, doubled.stride)
        self.register_buffer("zero", None if zero is None else zero.to(torch.int8).contiguous())
        self.register_buffer("scales_and_zeros", None)  # for the int4 kernel: 4 bytes a group beside scale and zero
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.kernel, self.multiply = kernels.DEQUANTIZE, self._dequantize_and_multiply
        self.use(self._fastest())

    @classmethod
    @torch.no_grad()
    def of(
        cls, linear: nn.Linear, format: Format, rounded: tuple[Tensor, Grid] | None = None, **options
    ) -> "QuantizedLinear":
        """A layer's weights as codes [out, in] of a grid; None = the nearest, of the grid that covers its groups."""
        weight = linear.weight.detach().float()
        format.check_size(weight.shape[1])
        if rounded is None:
            grid = format.grid(weight)
            rounded = format.encode(weight, grid.spread(weight.shape[1])), grid
        codes, grid = rounded
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(format, format.pack(codes), grid, bias, **options)

    @property
    def weight(self) -> Tensor:
        """[out, in], float32: what the codes stand for."""
        return self.format.decode(self.unpacked(), self.grid.spread(self.in_features))

    @property
    def grid(self) -> Grid:
        """Scales and zero points as they are kept, in float32."""
        if (doubled := self.doubled) is not None:
            return Grid(doubled.scale())
        return Grid(self.scale.float(), None if self.zero is None else self.zero.float())

    @property
    def doubled(self) -> DoubleScales | None:
        """The scales, if they are codes themselves."""
        if self.scale_largest is None:
            return None
        return DoubleScales(self.scale, self.scale_largest, self.scale_mean, *self._place)

    def unpacked(self) -> Tensor:
        """[out, in] codes, one to an element."""
        if self.kernel == kernels.INT4:
            return kernels.codes_of_int4_layout(self.codes)
        return self.format.unpack(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zero points and bias, without what a kernel keeps of them a second time."""
        extra = 0 if self.scales_and_zeros is None else self.scales_and_zeros.nbytes
        return sum(each.nbytes for each in (*self.buffers(), *self.parameters())) - extra

    @torch.no_grad()
    def use(self, kernel: str) -> None:
        """Multiply with this kernel from here on. Codes change to its layout: they are never kept twice."""
        if kernel == self.kernel:
            return
        codes = self.unpacked()
        if kernel == kernels.INT4:
            self.codes, self.scales_and_zeros = kernels.int4_layout(codes, *self.grid)
        else:
            self.codes, self.scales_and_zeros = self.format.pack(codes), None
        self.kernel = kernel
        self.multiply = self._multiplication()

    def set_codes(self, codes: Tensor) -> None:
        """The same codes, at another place in memory."""
        self.codes = codes
        self.multiply = self._multiplication()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if not (x.requires_grad and torch.is_grad_enabled()):
            y = self.multiply(rows)
        elif self.quantizes_inputs:
            y = self._dequantize_and_multiply(rows)
        else:
            y = _Dequantized.apply(rows, self)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _multiplication(self) -> Callable[[Tensor], Tensor]:
        """What `forward` calls, with its tensors at hand: to look them up in the module would take as long as a small
        product."""
        if self.kernel == kernels.INT8:
            return partial(kernels.multiply_int8, codes=self.codes, scale=self.scale[:, 0].bfloat16())
        if self.kernel == kernels.INT4:
            given = {"packed": self.codes, "group": self.format.group, "scales_and_zeros": self.scales_and_zeros}
            return partial(kernels.multiply_int4, **given)
        if self.kernel == kernels.W4A16:
            is_nf4 = isinstance(self.format, NF4)
            levels = self.codes.new_tensor(NF4_LEVELS, dtype=torch.float32) if is_nf4 else None
            return partial(self._multiply_w4a16, levels=levels)
        if self.kernel == kernels.W8A8:
            return partial(kernels.multiply_w8a8, codes=self.codes, scale=self.scale[:, 0].float())
        return self._dequantize_and_multiply

    def _multiply_w4a16(self, rows: Tensor, levels: Tensor | None) -> Tensor:
        """Double scales are decoded for each product: kept, they would take the bytes that they were to save. Inputs in
        float64 are for proofs, which need no speed."""
        if rows.dtype == torch.float64:
            return self._dequantize_and_multiply(rows)
        scale = self.scale if self.scale_largest is None else self.grid.scale
        return triton.multiply_w4a16(rows, self.codes, scale, self.zero, levels)

    def _dequantize_and_multiply(self, rows: Tensor) -> Tensor:
        return kernels.multiply_dequantized(rows, self.weight, self.quantizes_inputs)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format}, kernel={self.kernel}"

    def _apply(self, fn, recurse=True):
        """Moves and casts of the model. Scales keep their dtype: a cast would change what the codes stand for. On
        another device, what multiplies is chosen anew."""
        device = fn(torch.empty(0, device=self.codes.device)).device
        if moves := device != self.codes.device:
            self.use(kernels.DEQUANTIZE)
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, before in kept.items():
            setattr(self, name, before.to(device))
        if moves:
            self.use(self._fastest())
        else:
            self.multiply = self._multiplication()
        return self

    def _load_from_state_dict(self, *given) -> None:
        """What multiplies may hold scales of another dtype, made of those before."""
        super()._load_from_state_dict(*given)
        self.multiply = self._multiplication()

    def _fastest(self) -> str:
        groups, device = self.scale.shape[1], self.codes.device
        return kernels.choose(self.format, self.out_features, groups, device, self.quantizes_inputs)


class _Dequantized(torch.autograd.Function):
    """rows: [rows, in] -> rows @ weightᵀ. Between forward and backward the codes alone are kept, as in QLoRA (Dettmers
    et al. 2023): autograd would keep the float weights of every layer until backward has come to it."""

    @staticmethod
    def forward(ctx, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, rows.dtype
        return kernels.multiply_dequantized(rows, layer.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return (dy @ ctx.layer.weight.to(dy.dtype)).to(ctx.dtype), None
