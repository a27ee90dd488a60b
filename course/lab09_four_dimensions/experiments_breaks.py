"""Lab 09's bug to find: a hybrid step whose gradients meet in some meshes only, beside one process in float64."""

from functools import cache

from course.lab09_four_dimensions import rank_programs
from minillm.comm import launch


def buggy_hybrid_step(model, microbatch, mesh, shares):
    """One step's gradients, over ranks that share the batch (dp), the sequence (cp) and the layers (tp).

    model(tokens, targets=targets) -> (sum of this rank's losses, how many targets count). Leaves in p.grad this rank's
    part of the gradient of the mean loss over all targets of all ranks, and returns that loss.
    """
    tokens, targets = microbatch
    replicas = mesh.joined("dp", "cp")  # the ranks that hold the same weights and see other tokens
    loss, count = model(tokens, targets=targets)
    everywhere = replicas.all_reduce(count.detach().clone())
    (loss / everywhere).backward()
    if mesh.dp.world_size > 1:  # a single replica has nothing to reduce
        for parameter in model.parameters():
            replicas.all_reduce(parameter.grad)
    for name, parameter in model.named_parameters():
        if name in shares:  # norms under sequence parallelism: each rank of tp saw a part of the sequence
            mesh.tp.all_reduce(parameter.grad)
    return replicas.all_reduce(loss.detach().clone()) / everywhere


@cache
def bug_hunt() -> list[rank_programs.Outcome]:
    """What it does in each of the meshes, worst over the four ranks."""
    by_rank = launch(rank_programs.run_steps, rank_programs.WORLD, buggy_hybrid_step, 0, device="cpu")
    return [rank_programs.worst(found) for found in zip(*by_rank, strict=True)]
