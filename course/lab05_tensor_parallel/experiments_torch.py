"""Lab 05's peer: the same transformer under torch's DTensor, by `parallelize_module`, on the same ranks and tokens.

Three plans: every layer for itself, as tutorials have it; layers that read one input sharing it; sequence parallel.
DTensor knows nothing of minillm's ledger, so its bytes come from the loopback counter and its collectives from torch's
CommDebugMode. gloo carries out a reduce-scatter as an all-reduce, so sequence parallelism sends more here than on NCCL.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course.lab05_tensor_parallel.experiments import MODEL, SEQ, Setup, build, step_bytes, tokens
from course.shared.measuring import on_the_wire
from minillm import measure
from minillm.comm import Group, launch
from minillm.model import Transformer
from minillm.predict import comms

ROWS = 16


def separate() -> nn.Module:
    """Column, row; each layer takes the whole input for itself."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {}
    for layer, columns, row in LAYERS:
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns} | {f"{layer}.{row}": RowwiseParallel()}
    return _parallelize(plan, {})


def shared() -> nn.Module:
    """The input is made a DTensor once per attention and once per MLP: one all-reduce backward for each."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    plan: dict[str, Any] = {}
    for layer, columns, row in LAYERS:
        places = (Replicate(), *[None] * (3 if layer == "attention" else 0))
        plan[layer] = PrepareModuleInput(input_layouts=places, desired_input_layouts=places)
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns} | {f"{layer}.{row}": RowwiseParallel()}
    return _parallelize(plan, {})


def with_sequence() -> nn.Module:
    """Norms and residuals along the sequence: an all-gather in, a reduce-scatter out."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    plan: dict[str, Any] = {}
    for layer, columns, row in LAYERS:
        rest = (None,) * (3 if layer == "attention" else 0)
        plan[f"{layer}_norm"] = SequenceParallel()
        plan[layer] = PrepareModuleInput(input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest))
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
        plan[f"{layer}.{row}"] = RowwiseParallel(output_layouts=Shard(1))
    return _parallelize(plan, {"norm": SequenceParallel()}, sequence=True)


LAYERS = (
    ("attention", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    ("mlp", ("gate_proj", "up_proj"), "down_proj"),
)
OURS = "minillm"
PLANS: dict[str, Callable[[], nn.Module]] = {
    "each layer for itself": separate,
    "inputs shared": shared,
    "sequence parallel": with_sequence,
}


def _parallelize(block_plan: dict[str, Any], plan: dict[str, Any], sequence: bool = False) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = Transformer(MODEL, seed=0), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    outside = Shard(1) if sequence else Replicate()
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    head = ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"embedding": embedding, "head": head} | plan)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean nll, over logits that stay cut along the vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    x = model.embedding(batch[:, :-1])
    rotation = model.rope(torch.arange(batch.shape[1] - 1), torch.float32)
    for block in model.blocks:
        x = block(x, rotation, model.attention, None)
    logits = model.head(model.norm(x))
    with loss_parallel():
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
    return loss.detach().full_tensor()


def run_peers(group: Group, names: list[str]) -> dict[str, dict[str, Any]]:
    """By plan, and for minillm's own: the loss of one step, bytes on the wire per rank, torch's collectives."""
    from torch.distributed.tensor.debug import CommDebugMode

    warnings.simplefilter("ignore")
    batch, found = tokens(ROWS), {}
    for name in names:
        model = PLANS[name]()
        loss = loss_of(model, batch).item()
        sent = on_the_wire(group, lambda model=model: loss_of(model, batch))
        with CommDebugMode() as debug:
            loss_of(model, batch)
        calls = {str(op).removeprefix("c10d_functional."): count for op, count in debug.get_comm_counts().items()}
        found[name] = {"loss": loss, "wire": sent, "calls": calls}
    model, _ = build(group, Setup(group.world_size))

    def step() -> Tensor:
        total, count = model(batch[:, :-1], targets=batch[:, 1:])
        (total / count).backward()
        return total.detach() / count

    loss = step().item()
    with measure.ledger() as led:
        step()
    return found | {OURS: {"loss": loss, "wire": on_the_wire(group, step), "ledger": led.bytes(), "calls": led.calls}}


def peers(names: tuple[str, ...] = tuple(PLANS), nproc: int = 2) -> dict[str, dict[str, Any]]:
    """`run_peers`, as rank 0 saw it."""
    return launch(run_peers, nproc, list(names), device="cpu")[0]


def predicted_bytes(name: str, nproc: int) -> int:
    """What a rank sends per step: minillm's all-reduces; with inputs not shared, three more backward in every layer
    (q, k and v, gate and up each sum their own input gradient); on gloo a reduce-scatter costs an all-reduce."""
    setup = Setup(nproc, "sequence" if name == "sequence parallel" else "tensor", rows=ROWS)
    one = comms.ring_all_reduce(ROWS * SEQ * MODEL.hidden_size, 4, nproc).sent_per_rank[0]
    extra = 3 * MODEL.num_layers * one if name == "each layer for itself" else 0
    if name == "sequence parallel":
        extra = (4 * MODEL.num_layers + 2) * one // 2
    return step_bytes(setup) + extra
