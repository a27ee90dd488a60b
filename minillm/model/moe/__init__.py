"""A mixture of experts in place of an MLP: many experts are held, a token is computed by a few of them.

          ┌ router ─ weights ──────────────────────────────┐
    x ────┼ sort by expert ─ dispatch ─ experts ─ sort back ┴ weighted sum ─(+)─ y
          └ shared experts ──────────────────────────────────────────────────┘

Parameters grow with the number of experts, FLOPs per token with top_k and the shared ones alone. Reading path:

    layer.py      the layer from x to y, and the seam where expert parallelism sends tokens to other ranks
    router.py     which experts compute a token, with which weights; capacity and drops; experts that choose
    permute.py    rows sorted by expert and back, each other's inverse
    experts.py    all experts' SwiGLU over sorted rows, one grouped product per matrix
    balance.py    the losses that keep the load even, how they reach the trainer, and balancing without a loss
"""

from minillm.model.moe.balance import RouterLosses
from minillm.model.moe.experts import Experts
from minillm.model.moe.layer import Dispatch, MoE, forget_load, update_balance_biases
from minillm.model.moe.permute import Routes, sort_by_expert
from minillm.model.moe.router import Router

__all__ = [
    "Dispatch",
    "Experts",
    "MoE",
    "Router",
    "RouterLosses",
    "Routes",
    "forget_load",
    "sort_by_expert",
    "update_balance_biases",
]
