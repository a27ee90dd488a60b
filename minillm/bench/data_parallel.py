"""minillm's data parallel forms against torch's: BucketedDDP, ZeRO stage 1 and stage 3, a step of the same model each.

    BucketedDDP            torch DistributedDataParallel (gradients as views of its buckets)
    ZeroOptimizer stage 1  the same with ZeroRedundancyOptimizer
    FullyShard             fully_shard (FSDP2) on every block and on the rest

Both sides run in the same ranks on the same backend, one thread per rank, the same transformer from the same weights on
the same tokens, AdamW. Before anything is timed, three steps have to move the weights alike. Then three numbers each:
seconds per step (of the slowest rank), bytes on the wire per step (all ranks, counted by the operating system), and the
most bytes that tensors took on rank 0 at any moment of a step (`measure.memory`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from minillm.bench.comm import slowest
from minillm.bench.counts import peak_in, sent_in, settling
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.comm import Group, launch
from minillm.model import Transformer
from minillm.parallel import BucketedDDP, FullyShard, ZeroOptimizer
from minillm.train import TrainConfig, adamw, preset

VOCAB, SEQ_LEN, BATCH = 4096, 32, 2  # few tokens: communication and optimizer weigh as much as the matmuls
SHAPES = ("draft", "target")
WORLD_SIZES = (2, 4)
TOLERANCE = 1e-2  # of the distance the weights move: Adam divides by the gradient, so rounding shows


@dataclass
class Contestant:
    """A wrapped model and what steps it. weights(): whole, by name (every rank calls it)."""

    module: nn.Module
    optimizer: object
    weights: Callable[[], dict[str, Tensor]]
    batches: Iterator[tuple[Tensor, Tensor]]

    def step(self) -> None:
        tokens, targets = next(self.batches)
        nll, count = self.module(tokens, targets=targets)
        (nll / count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(
    world_sizes: Sequence[int] = WORLD_SIZES,
    shapes: Sequence[str] = SHAPES,
    repeats: int = 15,
    timeout: float = 300.0,
) -> list[BenchRow]:
    """Three rows for each form, shape and number of ranks: step time, bytes on the wire, peak bytes."""
    check_repeats(repeats)
    if not all(n > 1 for n in world_sizes):
        raise ValueError(f"world sizes {list(world_sizes)} must be 2 or more: a rank alone has nobody to talk to")
    rows = []
    for world_size in world_sizes:
        for shape in shapes:
            ranks = launch(measure, world_size, shape, repeats, timeout=timeout, device=None)
            for (ours, theirs), *found in zip(CONTESTS, *ranks, strict=True):
                times = slowest([each[0] for each in found])
                name = f"{NAMES[ours]}, {shape}, {world_size} ranks"
                rows.append(bench_row(f"{name}: step", NAMES[theirs], times, "ms", scale=1e3))
                for what, comparison in (("wire per step", found[0][1]), ("peak per rank", found[0][2])):
                    rows.append(bench_row(f"{name}: {what}", NAMES[theirs], comparison, "MB", scale=1e-6))
    return rows


def measure(group: Group, shape: str, repeats: int) -> list[tuple[Comparison, Comparison, Comparison]]:
    """On each rank, for every contest: seconds, bytes of all ranks, peak bytes of this one."""
    torch.set_num_threads(1)
    return [_compare(ours, theirs, group, shape, repeats) for ours, theirs in CONTESTS]


def _compare(ours: Callable, theirs: Callable, group: Group, shape: str, repeats: int) -> tuple[Comparison, ...]:
    config = TrainConfig(preset(shape, VOCAB, SEQ_LEN), seq_len=SEQ_LEN, batch_size=BATCH)
    mine, other = (make(group, config) for make in (ours, theirs))
    settle = settling(group.device)
    samples = (seconds_per_call(each.step, before=group.barrier, after=settle) for each in (mine, other))
    times = side_by_side(lambda: _same_steps(mine, other, group), *samples, repeats=repeats)
    if not times.correct:
        return times, times, times
    traffic = tuple((sent_in(mine.step, group), sent_in(other.step, group)) for _ in range(3))
    peaks = tuple(tuple(peak_in(each.step, each.module, each.optimizer) for each in (mine, other)) for _ in range(3))
    return times, Comparison(True, traffic), Comparison(True, peaks)


def _same_steps(mine: Contestant, other: Contestant, group: Group) -> bool:
    """Whether three steps move the weights of both alike, on every rank."""
    before = mine.weights()
    for each in (mine, other):
        for _ in range(3):
            each.step()
    first, second = mine.weights(), other.weights()
    moved = sum((first[name] - before[name]).square().sum() for name in before).sqrt()
    apart = sum((first[name] - second[name]).square().sum() for name in before).sqrt()
    return all(group.gather_objects(bool(moved > 0) and bool(apart <= TOLERANCE * moved)))


def _model(group: Group, config: TrainConfig) -> Transformer:
    return Transformer(config.model, seed=config.seed, device=group.device)


def _batches(group: Group, config: TrainConfig) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(group.rank)
    while True:
        shape = (2, config.batch_size, config.seq_len)
        yield tuple(torch.randint(config.model.vocab_size, shape, generator=draw).to(group.device))


def _plain_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def _bucketed(group: Group, config: TrainConfig) -> Contestant:
    model = _model(group, config)
    module = BucketedDDP(model, group)
    return Contestant(
        module, adamw(model.named_parameters(), config), partial(_plain_weights, model), _batches(group, config)
    )


def _zero_one(group: Group, config: TrainConfig) -> Contestant:
    model = _model(group, config)
    optimizer = ZeroOptimizer(model, group, stage=1, make=partial(adamw, config=config))
    return Contestant(model, optimizer, partial(_plain_weights, model), _batches(group, config))


def _full_shard(group: Group, config: TrainConfig) -> Contestant:
    module = FullyShard(_model(group, config), group)
    optimizer = module.optimizer(partial(adamw, config=config))
    return Contestant(module, optimizer, module.state_dict, _batches(group, config))


def _torch_ddp(group: Group, model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=group.process_group, gradient_as_bucket_view=True)


def _ddp(group: Group, config: TrainConfig) -> Contestant:
    model = _model(group, config)
    module = _torch_ddp(group, model)
    return Contestant(
        module, adamw(model.named_parameters(), config), partial(_plain_weights, model), _batches(group, config)
    )


def _zero_redundancy(group: Group, config: TrainConfig) -> Contestant:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _model(group, config)
    module = _torch_ddp(group, model)
    settings = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    groups = adamw(model.named_parameters(), config).param_groups
    chosen = [{"params": each["params"], "weight_decay": each["weight_decay"]} for each in groups]
    optimizer = ZeroRedundancyOptimizer(chosen, torch.optim.AdamW, process_group=group.process_group, **settings)
    return Contestant(module, optimizer, partial(_plain_weights, model), _batches(group, config))


def _fsdp2(group: Group, config: TrainConfig) -> Contestant:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group.process_group, group.device.type)
    model = _model(group, config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def weights() -> dict[str, Tensor]:
        return {name: weight.detach().full_tensor() for name, weight in model.named_parameters()}

    return Contestant(model, adamw(model.named_parameters(), config), weights, _batches(group, config))


CONTESTS = ((_bucketed, _ddp), (_zero_one, _zero_redundancy), (_full_shard, _fsdp2))
NAMES = {
    _bucketed: "BucketedDDP",
    _zero_one: "ZeRO stage 1",
    _full_shard: "FullyShard",
    _ddp: "torch DistributedDataParallel",
    _zero_redundancy: "torch DDP + ZeroRedundancyOptimizer",
    _fsdp2: "torch fully_shard (FSDP2)",
}
