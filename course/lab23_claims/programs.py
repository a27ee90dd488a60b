"""What real ranks run for several of the claims: a step under a ledger that counts its bytes."""

import torch
from torch import nn

from minillm.measure import ledger
from minillm.parallel import NaiveDDP, ZeroOptimizer


def traffic_of_stage_1(group) -> tuple[dict[str, int], int]:
    """(bytes that a rank sends in one step of ZeRO-1, by operation; elements of the gradient)."""
    model = nn.Linear(32, 32, bias=False)
    optimizer = ZeroOptimizer(model, group, 1, make=lambda named: torch.optim.AdamW([tensor for _, tensor in named]))
    with ledger() as found:
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
    return {op: found.bytes(op) for op in ("reduce_scatter", "all_gather", "all_reduce")}, 32 * 32


def bytes_of_a_step(group, batch: int) -> int:
    """Bytes that a rank sends for the gradients of one step of data parallelism."""
    model = NaiveDDP(nn.Linear(16, 16, bias=False), group)
    with ledger() as found:
        model(torch.ones(batch, 16)).sum().backward()
        model.finish()
    return found.bytes("all_reduce")
