"""Weights in 8 and 4 bits: fewer bytes to keep and, where decoding waits for memory, fewer to read. Reading path:

    formats.py    how a weight becomes a code: int8, int4 in groups, NF4, e4m3
    linear.py     `QuantizedLinear`, in place of `nn.Linear`
    kernels.py    what multiplies: torch's packed kernels, triton.py's on a GPU, or dequantize and multiply
    in_place.py   `quantize(model, settings)`: every linear layer of a model

joined.py multiplies layers that share an input in one call; head.py has the logits from int8, too.

With text to calibrate on (calibrate.py, a block at a time) the rounding does less harm: rescale.py has AWQ and
SmoothQuant, gptq.py has GPTQ. experts.py takes a mixture's experts apart, so that they are layers, too. folder.py
writes and reads folders in compressed-tensors' layout, which transformers loads (hub.py reads GPTQ's and AWQ's own,
words.py packs codes in int32); quality.py measures what was lost and won. prune.py leaves weights out instead: by size,
two of four, low rank.
"""

from minillm.quantize.formats import NF4, Float8, Format, Int
from minillm.quantize.head import quantize_head
from minillm.quantize.in_place import METHODS, Receipt, Settings, nbytes, quantize, quantized_layers
from minillm.quantize.linear import QuantizedLinear

__all__ = [
    "METHODS",
    "NF4",
    "Float8",
    "Format",
    "Int",
    "QuantizedLinear",
    "Receipt",
    "Settings",
    "nbytes",
    "quantize",
    "quantize_head",
    "quantized_layers",
]
