"""Context parallelism: a sequence is cut over ranks, and attention is the one place where its parts meet.

Read in this order:
    order.py     which positions a rank holds: a contiguous part, or two that share out causal work (zigzag)
    ring.py      keys and values travel round a ring, their gradients too (Liu et al. 2023)
    exchange.py  heads for sequence by all-to-all (Ulysses, Jacobs et al. 2023), all keys by all-gather (Llama 3), both
    variants.py  these by name, and a model that runs on its part of every sequence

Each is an attention function (`model.attention.AttentionFunction`) for tensors that hold this rank's positions only.
"""

from minillm.parallel.context_parallel.exchange import GatherAttention, UlyssesAttention
from minillm.parallel.context_parallel.order import (
    ORDERS,
    ContextAttention,
    local_positions,
)
from minillm.parallel.context_parallel.ring import RingAttention
from minillm.parallel.context_parallel.variants import CONTEXTS, context_attention, context_parallel

__all__ = [
    "CONTEXTS",
    "ORDERS",
    "ContextAttention",
    "GatherAttention",
    "RingAttention",
    "UlyssesAttention",
    "context_attention",
    "context_parallel",
    "local_positions",
]
