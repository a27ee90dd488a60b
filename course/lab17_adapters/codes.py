"""A weight as NF4 codes, for exercise 3: it decodes itself when it is asked to, and holds no floats until then."""

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minillm.quantize import NF4, QuantizedLinear


class Codes:
    """codes.weight() -> [out, in], float32, a new tensor each time. nbytes: of the codes and their scales."""

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        linear = nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        self._layer = QuantizedLinear.of(linear, NF4())
        self.shape, self.nbytes = weight.shape, self._layer.nbytes

    def weight(self) -> Tensor:
        with torch.no_grad():
            return self._layer.weight


class WatchedCodes(Codes):
    """Knows how often it was decoded, and whether what it gave is still held by somebody."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._given: list[StorageWeakRef] = []

    def weight(self) -> Tensor:
        decoded = super().weight()
        self._given.append(StorageWeakRef(decoded.untyped_storage()))
        return decoded

    @property
    def decoded(self) -> int:
        return len(self._given)

    @property
    def held(self) -> int:
        """How many of the decoded weights are still in memory."""
        return sum(not each.expired() for each in self._given)
