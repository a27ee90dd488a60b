"""The one transformer, its attention, its loss, and Hugging Face weights in and out."""

from minillm.model.attention import AttentionFunction, dense, sdpa
from minillm.model.config import ModelConfig, MoEConfig, RopeScaling
from minillm.model.huggingface import load_hf, save_hf
from minillm.model.loss import cross_entropy, cross_entropy_sums, linear_cross_entropy_sums
from minillm.model.paged import PagedCache, paged_attention
from minillm.model.transformer import Block, Transformer, check_tokens, initial

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
