"""Runs lab 09's groups of a mesh and its hybrid step on any number of processes.

python 09_four_dimensions.py                                   4 ranks on this machine
torchrun --nproc-per-node 4 09_four_dimensions.py              the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 09_four_dimensions.py           on each of two nodes

With a GPU for each rank the tensors live on the GPUs and NCCL carries the messages.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm.comm import Group, Mesh
from minillm.measure import ledger
from minillm.model import ModelConfig, Transformer
from minillm.parallel.context_parallel import context_attention, context_parallel
from minillm.parallel.sharding.placement import Partial
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import placements
from minillm.predict import comms

CONFIG = ModelConfig(32, 16, 24, 2, 4, 2, max_seq_len=1024)
TOKENS_PER_RANK = 8


def mesh_groups(rank: int, axes: dict[str, int]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Place of the rank along each axis, and its group along each; the last axis varies fastest."""
    # BEGIN SOLUTION
    place, groups, stride = {}, {}, 1
    for axis, size in reversed(axes.items()):
        place[axis] = rank // stride % size
        first = rank - place[axis] * stride
        groups[axis] = [first + index * stride for index in range(size)]
        stride *= size
    return place, groups
    # END SOLUTION


def hybrid_step(
    model: nn.Module,
    microbatch: tuple[Tensor, Tensor],
    mesh: Mesh,
    shares: set[str],
) -> Tensor:
    """Leaves in p.grad the gradient of the mean loss over all targets of all ranks;
    returns that loss.

    model(tokens, targets=targets) -> (sum of this rank's losses, how many targets count). shares:
    names of norms that saw a part of the sequence on each tp rank.
    """
    # BEGIN SOLUTION
    tokens, targets = microbatch
    replicas = mesh.joined("dp", "cp")
    loss, count = model(tokens, targets=targets)
    everywhere = replicas.all_reduce(count.detach().clone())
    (loss / everywhere).backward()
    for name, parameter in model.named_parameters():
        replicas.all_reduce(parameter.grad)
        if name in shares:
            mesh.tp.all_reduce(parameter.grad)
    return replicas.all_reduce(loss.detach().clone()) / everywhere
    # END SOLUTION


# What follows runs and judges them.


def meshes(n: int) -> list[dict[str, int]]:
    """tp inside, and dp of one rank, over all of the ranks."""
    tp = 2 if n % 4 == 0 else 1
    return [{"dp": n // tp, "cp": 1, "tp": tp}, {"dp": 1, "cp": n // tp, "tp": tp}]


def rank_program(group: Group) -> dict[str, Any]:
    """Each part once; None if not written yet."""
    return attempt(PARTS, group)


def try_groups(group: Group) -> bool:
    """Whether the groups are those of torch's DeviceMesh."""
    right = True
    for axes in meshes(group.world_size):
        mesh = Mesh(group, **axes)
        right &= mesh_groups(group.rank, axes) == (
            mesh.place,
            {axis: mesh[axis].ranks for axis in axes},
        )
    return right


def try_step(group: Group) -> list[tuple[bool, int]]:
    """In each mesh: whether every gradient is that of one process,
    and the bytes sent over dp x cp."""
    return [one_step(Mesh(group, **axes), group) for axes in meshes(group.world_size)]


def one_step(mesh: Mesh, group: Group) -> tuple[bool, int]:
    dp, cp, tp = mesh.dp, mesh.cp, mesh.tp
    seq = TOKENS_PER_RANK * group.world_size
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(CONFIG.vocab_size, (2, group.world_size, seq), generator=draw)
    tokens, targets = drawn.to(group.device)
    targets[:, : seq // 4] = -100  # do not count, so that ranks have different numbers
    model = Transformer(CONFIG, seed=0, dtype=torch.float64, device=group.device)
    loss, count = model(tokens, targets=targets)
    right = torch.autograd.grad(loss / count, list(model.parameters()))
    whole = dict(zip(dict(model.named_parameters()), right, strict=True))
    if tp.world_size > 1:
        model = tensor_parallel(model, CONFIG, tp, sequence=True)
    rows = [x.chunk(dp.world_size)[dp.rank] for x in (tokens, targets)]
    if cp.world_size > 1:
        attention = context_attention("zigzag", cp)
        model = context_parallel(model, attention)
        rows = [x[:, attention.positions(seq).to(x.device)] for x in rows]
    places = placements(CONFIG, tp.rank, tp.world_size, tp.world_size > 1)
    partial = [name for name in places if any(isinstance(p, Partial) for p in places[name].parts)]
    with ledger() as led:
        hybrid_step(model, tuple(rows), mesh, set(partial))
    sent = sum(led.bytes(op="all_reduce", group=name) for name in ("dp", "cp", "dp_cp"))
    due = {name: place.cut(whole[name]) for name, place in places.items()}
    close = [torch.allclose(p.grad, due[name]) for name, p in model.named_parameters()]
    return all(close), sent


PARTS = {"groups": try_groups, "step": try_step}


def predictions(n: int) -> list[int]:
    """Bytes that all ranks send over dp x cp: each rank's gradients and two scalars, once round."""
    found = []
    for axes in meshes(n):
        replicas = axes["dp"] * axes["cp"]
        tp = axes["tp"]
        places = [placements(CONFIG, rank, tp, tp > 1) for rank in range(tp)]
        sizes = [place.part_shape.numel() for each in places for place in each.values()]
        tensors = [*sizes, *[1, 1] * axes["tp"]]
        found.append(sum(comms.ring_all_reduce(size, 8, replicas).total_bytes for size in tensors))
    return found


def judge_groups(ranks: list[bool]) -> Iterator[Row]:
    yield row("groups: as torch's DeviceMesh", True, all(ranks))


def judge_step(ranks: list[list[tuple[bool, int]]]) -> Iterator[Row]:
    n = len(ranks)
    cases = zip(meshes(n), predictions(n), zip(*ranks, strict=True), strict=True)
    for axes, sent, of_ranks in cases:
        name = ", ".join(f"{axis} {size}" for axis, size in axes.items())
        right = all(each for each, _ in of_ranks)
        yield row(f"{name}: every gradient as on one process", True, right)
        yield row("    bytes sent over dp x cp", sent, sum(each for _, each in of_ranks), "B")


def judge(name: str, ranks: list[Any]) -> Iterator[Row]:
    return {"groups": judge_groups, "step": judge_step}[name](ranks)


if __name__ == "__main__":
    run("lab 09", rank_program, judge)
