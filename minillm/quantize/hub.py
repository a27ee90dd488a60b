"""The two older layouts of 4-bit folders on the Hugging Face hub, read only. Both store matrices transposed, [in, out].

    GPTQ    X.qweight [in / 8, out], X.qzeros [groups, out / 8], X.scales [groups, out], X.g_idx [in]
            eight inputs in an int32, from its lowest bits up; zero points are stored less 1 (format "gptq")
    AWQ     X.qweight [in, out / 8], X.qzeros [groups, out / 8], X.scales [groups, out]
            eight outputs in an int32, in the order 0 2 4 6 1 3 5 7 from the lowest bits up

Sources: AutoGPTQ's qlinear modules (https://github.com/AutoGPTQ/AutoGPTQ), AutoAWQ's `WQLinear_GEMM`
(https://github.com/casper-hansen/AutoAWQ).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.model.hf.weights import Stored
from minillm.quantize.formats import Grid, Int
from minillm.quantize.words import from_words

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies


@dataclass(frozen=True)
class HubLayout:
    """format: asymmetric integers of 4 bits. awq: outputs are packed, in AWQ's order; else inputs, as in GPTQ.
    zeros_less_1: zero points are stored less 1."""

    format: Int
    awq: bool
    zeros_less_1: bool
    quantizes_inputs: bool = False

    def marker(self, weight: str) -> str:
        return weight.removesuffix("weight") + "qweight"

    def shapes(self, weight: str, shape: list[int]) -> dict[str, list[int]]:
        """Tensors that hold the layer of `X.weight`, [out, in] -> their shapes."""
        outputs, inputs = shape
        self.format.check_size(inputs, weight)
        if outputs % 8 or inputs % 8:
            raise ValueError(f"{weight} is {outputs} by {inputs}: eight codes share a word, so give multiples of 8.")
        groups, prefix = inputs // (self.format.group or inputs), weight.removesuffix("weight")
        packed = [inputs, outputs // 8] if self.awq else [inputs // 8, outputs]
        found = {"qweight": packed, "qzeros": [groups, outputs // 8], "scales": [groups, outputs]}
        found |= {} if self.awq else {"g_idx": [inputs]}
        return {prefix + name: each for name, each in found.items()}

    def read(self, weight: str, shape: list[int], stored: Stored) -> tuple[Tensor, Grid]:
        """(codes [out, in], the grid). ValueError if the inputs of a group do not lie side by side."""

        def tensor(name: str) -> Tensor:
            whole = weight.removesuffix("weight") + name
            return stored[whole].get_tensor(whole)

        outputs, inputs = shape
        codes, zero = tensor("qweight"), from_words(tensor("qzeros"), 4, outputs)
        if self.awq:
            codes, zero = in_order(from_words(codes, 4, outputs)).T, in_order(zero)
        else:
            codes = from_words(codes.T, 4, inputs)
            group = self.format.group or inputs
            if not torch.equal(tensor("g_idx").long(), torch.arange(inputs) // group):
                raise ValueError(
                    f"the groups of {weight} are out of order (desc_act): load a folder made without, or with "
                    "static groups."
                )
        if self.zeros_less_1:
            zero = (zero + 9) % 16 - 8  # 15 is stored for 0
        return codes.contiguous(), Grid(tensor("scales").T.float().contiguous(), zero.T.float().contiguous())


def in_order(codes: Tensor) -> Tensor:
    """[rows, out] as they lie in AWQ's words -> as they are numbered."""
    return codes.unflatten(1, (-1, 8))[:, :, AWQ_PLACES].flatten(1)


def read_hub_layout(raw: dict, scale_dtype: torch.dtype) -> HubLayout:
    """The layout that a `quantization_config` of GPTQ or AWQ describes. ValueError for what is not covered."""
    method, bits, group = raw["quant_method"], raw.get("bits", 4), raw.get("group_size", 128)
    kind = raw.get("version", "gemm").lower() if method == "awq" else raw.get("checkpoint_format", "gptq")
    if bits != 4 or kind not in ("gemm", "gptq", "gptq_v2") or raw.get("zero_point") is False:
        raise ValueError(
            f"quantization_config of {method} has {bits} bits, {kind!r}, zero_point {raw.get('zero_point')}: "
            "use 4 bits, 'gemm' with zero points or 'gptq'."
        )
    format = Int(bits=4, group=None if group in (None, -1) else group, symmetric=False, scale_dtype=scale_dtype)
    return HubLayout(format, method == "awq", kind == "gptq")
