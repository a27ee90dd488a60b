"""What ranks run in the tests of ZeRO; kept apart from the tests because ranks import it."""

import contextlib
import math
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from minillm.measure import ledger, memory
from minillm.model import ModelConfig, Transformer, cross_entropy, dense
from minillm.parallel import ZeroOptimizer
from minillm.parallel.sharding.placement import clip_, global_norm, gradients_of
from minillm.train import TrainConfig, adamw, checkpoint_blocks
from minillm.train.optimizer import Updater

MODEL = ModelConfig(
    vocab_size=53, hidden_size=12, intermediate_size=17, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=6,
    max_seq_len=16, tie_embeddings=True,
)  # fmt: skip
UNTIED = replace(MODEL, tie_embeddings=False)
STEPS, ROWS = 5, 12  # rows of a step's batch: divide by ranks and microbatches of every case


@dataclass(frozen=True)
class Case:
    """bucket_mb: tiny, so that there are many buckets; "more ranks than elements" has some of a single number."""

    model: ModelConfig = MODEL
    stage: int = 1
    accumulate: int = 1
    frozen: tuple[str, ...] = ()
    bucket_mb: float = 0.004
    offload: object = None
    max_norm: float | None = 0.5
    recompute: bool = False


def make(named):
    """AdamW in two groups, with numbers that make weight decay and both moments matter."""
    return adamw(named, TrainConfig(MODEL, seq_len=8, lr=0.01, weight_decay=0.3))


def plain(named):
    """AdamW with one kernel per operation, which gives the same bits however parameters are cut. (The fused one does
    not: it rounds the last elements of a tensor, which fill no vector register, otherwise.)"""
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.01, weight_decay=0.3)


def model_of(case: Case, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(case.model, seed=0, dtype=dtype, attention=dense)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    return checkpoint_blocks(model) if case.recompute else model


def rows(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return tuple(torch.randint(MODEL.vocab_size, (2, ROWS, 9), generator=draw))


def backward(model: nn.Module, step: int, rank: int, world_size: int, accumulate: int, no_sync) -> None:
    """This rank's rows of the step in `accumulate` microbatches; every row has as many tokens as any other."""
    device = next(model.parameters()).device
    tokens, targets = (ids.to(device) for ids in rows(step))
    for index in range(accumulate):
        mine = slice(rank * accumulate + index, None, world_size * accumulate)
        with contextlib.nullcontext() if index == accumulate - 1 else no_sync():
            (cross_entropy(model(tokens[mine]), targets[mine]) / accumulate).backward()


def alone(case: Case, checkpoint: dict | None = None, device: str = "cpu") -> dict:
    """One process: torch's AdamW over whole parameters, whole batches."""
    model = model_of(case).to(device)
    optimizer = make(model.named_parameters())
    if checkpoint:
        model.load_state_dict(checkpoint["weights"])
        optimizer.load_state_dict(deepcopy(checkpoint["state"]))  # torch keeps the given moments and steps on in them
    norms, gradients = [], {}
    for step in range(checkpoint["step"] if checkpoint else 0, STEPS):
        backward(model, step, 0, 1, 1, contextlib.nullcontext)
        norm = global_norm(dict(enumerate(gradients_of(model.parameters()))))
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        clip_(gradients_of(model.parameters()), norm, case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
    return {"weights": _weights(model), "norms": norms, "gradients": gradients, "state": optimizer.state_dict()}


def sharded(group, case: Case) -> dict:
    """The same on ranks. Gradients are put together from what the ranks' slices hold after the first backward."""
    model = model_of(case).to(group.device)
    optimizer = ZeroOptimizer(model, group, case.stage, make=make, bucket_cap_mb=case.bucket_mb, offload=case.offload)
    norms, result = [], {}
    for step in range(STEPS):
        with ledger() as led:
            backward(model, step, group.rank, group.world_size, case.accumulate, optimizer.no_sync)
            if step == 0:
                result["slices"] = _gradient_slices(optimizer)
                held = sum(gradient.nbytes() for gradient in _storages(optimizer.gradients))
            norms.append(optimizer.clip_grad_norm_(case.max_norm).item())
            optimizer.step()
        result.setdefault("calls", dict(led.calls))
        result.setdefault("bytes", {op: led.bytes(op) for op in led.calls})
    result |= {"held": held, "left": sum(map(Tensor.numel, optimizer.gradients))}
    result |= {"weights": _weights(model), "norms": norms, "state": optimizer.state_dict()}
    result |= {"buckets": [bucket.numel for bucket in optimizer.reducer.buckets], "tied": model.head is None}
    result["host"] = _host(optimizer)
    return result


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def _gradient_slices(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    optimizer.prepare_gradients()
    return {n: part.grad.cpu().clone() for n, part in optimizer.slices.items() if part.grad is not None}


def _storages(tensors: list[Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values())


def resumed(group, case: Case, checkpoint: dict | None, last: int = STEPS) -> dict:
    """Steps up to `last` from a whole checkpoint, or from the start; returns the next checkpoint."""
    model = model_of(case)
    if checkpoint:
        model.load_state_dict(checkpoint.get("weights", model.state_dict()))
    optimizer = ZeroOptimizer(model, group, case.stage, make=make, bucket_cap_mb=case.bucket_mb)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["state"])
    for step in range(checkpoint["step"] if checkpoint else 0, last):
        backward(model, step, group.rank, group.world_size, case.accumulate, optimizer.no_sync)
        optimizer.clip_grad_norm_(case.max_norm)
        optimizer.step()
    return {"weights": _weights(model), "step": last, "state": optimizer.state_dict()}


def refused(group, case: Case, state: dict) -> str:
    """Why that state cannot be loaded."""
    optimizer = ZeroOptimizer(model_of(case), group, case.stage, make=make, bucket_cap_mb=case.bucket_mb)
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)


def mixed(group, dtype: torch.dtype, stage: int, offload: object, loss_scale: float) -> dict:
    """Three steps with 16-bit weights and float32 masters. All ranks see the same rows, so that the average of their
    gradients is the gradient of one of them to the last bit."""
    model = Transformer(MODEL, seed=0, dtype=dtype, attention=dense)
    optimizer = ZeroOptimizer(model, group, stage, make=plain, bucket_cap_mb=0.002, offload=offload, master=True)
    for step in range(3):
        tokens, targets = rows(step)
        (cross_entropy(model(tokens), targets) * loss_scale).backward()
        norm = optimizer.clip_grad_norm_(None, loss_scale)
        optimizer.step()
    host, weights, state = _host(optimizer), _weights(model), optimizer.state_dict()
    optimizer = ZeroOptimizer(model, group, 3 - stage, make=plain, master=True)  # forgets all that is not in the state
    optimizer.load_state_dict(state)
    return {"weights": weights, "norm": norm.item(), "state": state, "host": host, "again": optimizer.state_dict()}


def mixed_alone(dtype: torch.dtype, loss_scale: float) -> dict:
    model = Transformer(MODEL, seed=0, dtype=dtype, attention=dense)
    updater = Updater(model.named_parameters(), plain, master=True)
    for step in range(3):
        tokens, targets = rows(step)
        (cross_entropy(model(tokens), targets) * loss_scale).backward()
        updater.prepare_gradients()
        for master in updater.parameters:
            master.grad /= loss_scale
        norm = global_norm(dict(enumerate(gradients_of(updater.parameters))))
        updater.step()
        updater.zero_grad()
    return {"weights": _weights(model), "norm": norm.item(), "masters": updater.masters()}


def _host(optimizer: ZeroOptimizer) -> tuple[int, int, int]:
    return optimizer.home.down_bytes, optimizer.home.up_bytes, optimizer.home.file_bytes


class Odd(nn.Module):
    """A scalar, a parameter of one element, one that is used by nobody, one that only some ranks use, one tied."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.nobody = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.some = nn.Parameter(torch.randn(4, 3, generator=draw, dtype=torch.float64).t())  # not contiguous
        self.shared = nn.Parameter(torch.randn(5, 4, generator=draw, dtype=torch.float64))
        self.tied = self.shared

    def forward(self, x: Tensor, with_some: bool) -> Tensor:
        y = x @ self.some if with_some else x @ torch.ones(3, 4, dtype=x.dtype)
        return ((y @ self.shared.T).tanh() @ self.tied).square().mean() * self.scalar + self.one.sum()


def odd(group, stage: int, world_size: int) -> dict:
    """Three steps of `Odd` in which rank 0 never uses `some`; group None: one process with all ranks' losses."""
    model, x = Odd(), torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    if group is None:
        optimizer = make(model.named_parameters())
        for _ in range(3):
            ((model(x, False) + (world_size - 1) * model(x * 2, True)) / world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"weights": _weights(model), "state": optimizer.state_dict()}
    optimizer = ZeroOptimizer(model, group, stage, make=make, bucket_cap_mb=1e-5, find_unused=True)
    for _ in range(3):
        model(x if group.rank == 0 else x * 2, with_some=group.rank > 0).backward()
        optimizer.step()
    before, state = _weights(model), optimizer.state_dict()
    optimizer.load_state_dict(state)
    return {"weights": before, "state": state, "again": optimizer.state_dict(), "sizes": _sizes(optimizer)}


def _sizes(optimizer: ZeroOptimizer) -> list[tuple[int, int]]:
    pairs = zip(optimizer.reducer.buckets, optimizer.shards, strict=True)
    return [(bucket.numel, sum(part.numel() for part in shard.slices.values())) for bucket, shard in pairs]


def decisions(group) -> dict:
    """What ranks do when something is wrong: the same."""
    said, model = {}, Odd()
    x = torch.ones(2, 3, dtype=torch.float64)

    def attempt(name: str, act) -> None:
        try:
            act()
        except ValueError as error:
            said[name] = str(error)

    attempt("stage", lambda: ZeroOptimizer(Odd(), group, 3, make=make))
    attempt("offload", lambda: ZeroOptimizer(Odd(), group, 1, make=make, offload="nvme"))
    attempt("model", lambda: ZeroOptimizer(nn.Linear(2, 2 + group.rank), group, 1, make=make))
    attempt("cap", lambda: ZeroOptimizer(Odd(), group, 1, make=make, bucket_cap_mb=0))
    model = Odd()
    optimizer = ZeroOptimizer(model, group, 1, make=make)
    attempt("unused", lambda: model(x, True).backward())

    model = Odd()
    optimizer = ZeroOptimizer(model, group, 1, make=make, find_unused=True)
    model(x, True).backward()
    said["norm alone"] = optimizer.clip_grad_norm_(None).item()
    attempt("twice", lambda: model(x, True).backward())
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(x, True).backward()
    model(x * (math.inf if group.rank else 1), True).backward()
    said["norm"] = optimizer.clip_grad_norm_(1.0).item()

    model = Odd()
    for stage in (1, 2):  # only the last one reduces
        optimizer = ZeroOptimizer(model, group, stage, make=make, find_unused=True)
    model(x, True).backward()
    said["wrapped again"] = optimizer.clip_grad_norm_(None).item() / said["norm alone"]
    optimizer.zero_grad()
    for _ in range(2):  # in stage 2 two backwards add up, with and without no_sync
        model(x, True).backward()
    twice = optimizer.clip_grad_norm_(None).item()
    optimizer.zero_grad()
    model(x, True).backward()
    said["ratio"] = twice / optimizer.clip_grad_norm_(None).item()
    return said


def peaks(group, model: ModelConfig, stage: int, master: bool, offload: object = None) -> dict:
    """Model states at their fullest in the second of two steps, by kind."""
    module = Transformer(model, seed=0, dtype=torch.bfloat16 if master else torch.float32).to(group.device)
    optimizer = ZeroOptimizer(module, group, stage, make=make, bucket_cap_mb=0.05, master=master, offload=offload)
    tokens, targets = (ids.to(group.device) for ids in rows(0))
    for tracker in (contextlib.nullcontext(), memory(module, optimizer, group.device.type)):
        with tracker:
            cross_entropy(module(tokens[:1, :2]), targets[:1, :2]).backward()
            resting = getattr(tracker, "live", None)
            optimizer.step()
    peak = {kind: getattr(tracker.peak, kind) for kind in ("parameter", "gradient", "optimizer")}
    buckets = [bucket.padded for bucket in optimizer.reducer.buckets]
    return {"peak": peak, "resting": resting, "buckets": buckets, "host": _host(optimizer)}


def against_torch(group, stage: int) -> dict:
    """The same steps with DistributedDataParallel and ZeroRedundancyOptimizer."""
    case = Case(UNTIED, stage, max_norm=None)
    theirs = model_of(case)
    wrapped = nn.parallel.DistributedDataParallel(theirs)
    optimizer = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.3)
    ours = model_of(case)
    zero = ZeroOptimizer(ours, group, stage, make=plain)
    schedule = torch.optim.lr_scheduler.StepLR(zero, 1, 0.9)
    theirs_too = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for step in range(STEPS):
        backward(wrapped, step, group.rank, group.world_size, 1, contextlib.nullcontext)
        optimizer.step()
        optimizer.zero_grad()
        backward(ours, step, group.rank, group.world_size, 1, contextlib.nullcontext)
        zero.step()
        schedule.step()
        theirs_too.step()
    return {"ours": _weights(ours), "theirs": _weights(theirs)}


def several(group, calls: list[tuple]) -> list:
    """Several programs in one launch: [(function, *arguments), ...]."""
    return [function(group, *arguments) for function, *arguments in calls]
