"""The one transformer, its attention, its loss, and Hugging Face weights in and out. Reading path of a forward pass:

    config.py       the shape of a model, checked once
    transformer.py  the model: embedding, blocks, head
    initialise.py   initial values, each a function of the seed and the parameter's name
    rope.py         rotated positions, stretched to longer contexts
    attention/      the function where tokens meet: dense, fused, tile by tile
    moe/            a mixture of experts in place of the MLP
    loss.py         cross-entropy, and the head and the loss together without whole logits

Then generate.py (tokens one after the other, with a cache) and draw.py (reproducible sampling); paged/ (keys and values
in blocks); hf/ (loading and saving a folder); parts.py (what parts of a model have alike).
"""

from minillm.model.attention import AttentionFunction, dense, sdpa
from minillm.model.config import ModelConfig, MoEConfig, RopeScaling
from minillm.model.hf import load_hf, save_hf
from minillm.model.initialise import initial
from minillm.model.loss import cross_entropy, cross_entropy_sums, linear_cross_entropy_sums
from minillm.model.paged import PagedCache, paged_attention
from minillm.model.transformer import Block, Transformer, check_tokens

__all__ = [
    "AttentionFunction",
    "Block",
    "MoEConfig",
    "ModelConfig",
    "PagedCache",
    "RopeScaling",
    "Transformer",
    "check_tokens",
    "cross_entropy",
    "cross_entropy_sums",
    "dense",
    "initial",
    "linear_cross_entropy_sums",
    "load_hf",
    "paged_attention",
    "save_hf",
    "sdpa",
]
