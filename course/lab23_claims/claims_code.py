"""Statements about code that is often copied, and what happens when it runs."""

import functools
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.kit.receipts import Row, row
from course.shared.statement import claim
from minillm.comm import launch

TORCH_AMP = "torch.amp: https://docs.pytorch.org/docs/stable/amp.html"
TORCH_CHECKPOINT = "torch.utils.checkpoint: https://docs.pytorch.org/docs/stable/checkpoint.html"
TORCH_FSDP = "torch.distributed.fsdp: https://docs.pytorch.org/docs/stable/fsdp.html"


@claim(
    "code",
    "FSDP(model, auto_wrap_policy=transformer_auto_wrap_policy) wraps every block.",
    "false",
    "The policy needs the block's class: bind it with functools.partial, or call fully_shard on each block.",
    "with functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})",
    TORCH_FSDP,
)
def auto_wrap_policy() -> list[Row]:
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    def works(policy) -> bool:
        try:
            return bool(policy(module=nn.Linear(2, 2), recurse=False, nonwrapped_numel=6))
        except TypeError:
            return False

    bound = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    return [
        row("without the class it runs", False, works(transformer_auto_wrap_policy)),
        row("bound", True, works(bound)),
    ]


@claim(
    "code",
    "Ranks that build the model without a seed may shard it at once.",
    "false",
    "Each shard then comes from another random model: the whole is one that nobody initialised.",
    "if weights are loaded, or broadcast from rank 0, afterwards",
    TORCH_FSDP,
)
def shards_without_a_seed() -> list[Row]:
    equal = launch(_shards, 2)
    return [row("the second half equals rank 0's model", False, equal[0]), row("after a broadcast", True, equal[1])]


def _shards(group) -> bool:
    """Whether rank 1's shard is that of rank 0's model; what rank 1 says is after a broadcast."""
    torch.manual_seed(group.rank)  # as without a seed: every rank another
    own = torch.randn(8)
    first = group.broadcast(own.clone(), root=0)
    pieces = group.all_gather(own.chunk(2)[group.rank].clone())
    broadcast = group.all_gather(first.chunk(2)[group.rank].clone())
    return torch.equal(pieces.reshape(-1), first) if group.rank == 0 else torch.equal(broadcast.reshape(-1), first)


@claim(
    "code",
    "checkpoint(block, x) works for any input.",
    "false",
    "The reentrant form gives no gradients if x needs none, as the first block's input does.",
    "use_reentrant=False",
    TORCH_CHECKPOINT,
)
def checkpoint_any_input() -> list[Row]:
    def has_gradient(reentrant: bool) -> bool:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = checkpoint(layer, torch.randn(2, 4), use_reentrant=reentrant)
        try:
            out.sum().backward()
        except RuntimeError:
            return False
        return layer.weight.grad is not None

    return [
        row("reentrant: gradients", False, has_gradient(True)),
        row("use_reentrant=False", True, has_gradient(False)),
    ]


@claim(
    "code",
    "torch's GradScaler works unchanged on sharded gradients.",
    "depends",
    "On FSDP2's DTensors it does: the flag is reduced over the ranks. On shards made by hand, or under FSDP1, "
    "each rank looks at its own: one skips the step, another takes it, and the weights drift apart.",
    "with FSDP2's DTensors; FSDP1 has a scaler of its own, ShardedGradScaler",
    TORCH_AMP,
)
def scalers_on_shards() -> list[Row]:
    plain, placed = (launch(program, 2) for program in (_step_on_tensors, _step_on_dtensors))
    return [
        row("rank that steps after an overflow on rank 1 of 2: shards by hand", [True, False], plain),
        row("    DTensors of fully_shard", [False, False], placed),
    ]


def _step_on_dtensors(group) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.world_size,)))
    model(torch.ones(1, 4)).sum().backward()
    return _steps(model.weight, group.rank)


def _step_on_tensors(group) -> bool:
    return _steps(torch.nn.Parameter(torch.ones(2)), group.rank)


def _steps(parameter: torch.nn.Parameter, rank: int) -> bool:
    """Whether torch's own scaler lets this rank step when rank 1 has an infinite gradient."""
    if parameter.grad is None:
        parameter.grad = torch.ones_like(parameter)
    own = getattr(parameter, "to_local", lambda: parameter)
    gradient = getattr(parameter.grad, "to_local", lambda: parameter.grad)()
    gradient.fill_(float("inf") if rank == 1 else 1.0)
    before = own().detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    return not torch.equal(own(), before)


@claim(
    "code",
    "Loading a checkpoint with map_location='meta' on all ranks but 0 saves memory, and the rest follows.",
    "false",
    "Meta tensors have no data: copying from them fails, and rank 0 waits for the others.",
    "if the weights are broadcast before anything reads them",
    "torch.nn.Module.load_state_dict: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
)
def loading_to_meta() -> list[Row]:
    state = {name: tensor.to("meta") for name, tensor in nn.Linear(2, 2).state_dict().items()}
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_state_dict(state)
        loaded = not torch.equal(before, model.weight)
    except (RuntimeError, NotImplementedError):
        loaded = False
    return [row("weights arrived from meta tensors", False, loaded)]
