"""The head in int8: logits by a byte a weight, where a small model's head is a good part of what a token reads.

    embedding [words, hidden], float     looked up: a row a token
    head      [words, hidden], int8      multiplied: all of it for each token whose logits are wanted

Layers in 8 bits leave the head of the committed target 4 of its 9 MB. Where head and embedding are tied, the codes are
a copy beside the embedding, so the model takes more memory and less time; training and its loss never see them.
"""

import torch
from torch import Tensor, nn

from minillm.model.transformer import Transformer
from minillm.quantize.formats import Int
from minillm.quantize.linear import QuantizedLinear


class HeadInCodes(nn.Module):
    """In place of a model's `head_logits`. x: [..., hidden] -> [..., words], whatever the weights of the head are."""

    def __init__(self, codes: QuantizedLinear):
        super().__init__()
        self.codes = codes

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.codes(x)


@torch.no_grad()
def quantize_head(model: Transformer) -> QuantizedLinear:
    """The logits of `model` come from int8 codes of its head, one scale a word, from here on. Returns the codes.

    ValueError if they do already, or if the head is cut over ranks.
    """
    if isinstance(model.head_logits, HeadInCodes):
        raise ValueError("the head of this model is in int8 already: load the model that it was made of.")
    if getattr(model.embedding, "region", None) is not None:
        raise ValueError("the head of this model is cut over ranks: quantize the head of a whole one.")
    with torch.device("meta"):
        head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    head.weight = nn.Parameter(model.embedding.weight if model.head is None else model.head.weight)
    codes = QuantizedLinear.of(head, Int())
    model.head_logits = HeadInCodes(codes)
    return codes
