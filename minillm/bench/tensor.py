"""minillm's tensor and sequence parallelism against torch DTensor's, a step of the same model each.

    tensor_parallel                  parallelize_module: ColwiseParallel, RowwiseParallel, loss_parallel
    tensor_parallel(sequence=True)   the same with SequenceParallel norms

Both sides are the same Transformer with the same weights, in the same ranks on the same backend, one thread per rank,
on the same tokens; a step is forward, loss and backward until every gradient is complete. Before anything is timed, the
gradients of all parameters have to agree. Rows "layers" are the blocks alone, without embedding, head and loss. Three
numbers each: seconds per step (of the slowest rank), bytes on the wire per step (all ranks, counted by the operating
system), and the most bytes that tensors took on rank 0 at any moment of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.bench.comm import slowest
from minillm.bench.counts import peak_in, sent_in, settling
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.comm import Group, launch
from minillm.model import ModelConfig, Transformer
from minillm.parallel.sharding.gather import gather
from minillm.parallel.sharding.placement import sum_partial
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import named_gradients, placements
from minillm.train import preset

VOCAB, SEQ_LEN, BATCH = 4096, 64, 2
SHAPES = ("draft", "target")
WORLD_SIZES = (2, 4)
CALLS = 4  # steps in a sample: one alone is no longer than what a scheduler takes away from a rank
TOLERANCE = 1e-4  # of a gradient's norm, in float32
PEER = {False: "torch DTensor", True: "torch DTensor + SequenceParallel"}
OURS = {False: "tensor parallel", True: "with sequence parallel"}


@dataclass
class Contestant:
    """A split model. step(): forward, loss and backward. gradients(): whole, by name (every rank calls it)."""

    module: nn.Module
    step: Callable[[], None]
    gradients: Callable[[], dict[str, Tensor]]


def run(
    world_sizes: Sequence[int] = WORLD_SIZES,
    shapes: Sequence[str] = SHAPES,
    repeats: int = 15,
    timeout: float = 300.0,
) -> list[BenchRow]:
    """Six rows for each form, shape and number of ranks: time, bytes and peak of the whole model and of its layers."""
    check_repeats(repeats)
    for shape in shapes:
        config = model_config(shape)
        for world_size in world_sizes:
            if world_size < 2:
                raise ValueError(f"world size {world_size} must be 2 or more: a rank alone has nobody to talk to")
            if config.num_heads % world_size or config.num_kv_heads % world_size:
                raise ValueError(
                    f"{config.num_kv_heads} kv heads of {shape} do not divide over {world_size} ranks, which torch's "
                    f"plan needs: leave out --world-sizes {world_size}"
                )
    rows = []
    for world_size in world_sizes:
        for shape in shapes:
            ranks = launch(measure, world_size, shape, repeats, timeout=timeout, device=None)
            for (sequence, what), *found in zip(CONTESTS, *ranks, strict=True):
                name, peer = f"{OURS[sequence]}, {what}, {shape}, {world_size} ranks", PEER[sequence]
                rows.append(bench_row(f"{name}: step", peer, slowest([each[0] for each in found]), "ms", scale=1e3))
                for quantity, each in (("wire per step", found[0][1]), ("peak per rank", found[0][2])):
                    rows.append(bench_row(f"{name}: {quantity}", peer, each, "MB", scale=1e-6))
    return rows


CONTESTS = tuple((sequence, what) for sequence in (False, True) for what in ("model", "layers"))


def model_config(shape: str) -> ModelConfig:
    """Untied: torch's plan cuts embedding and head separately. As many kv heads as heads: it has no copies of them."""
    config = preset(shape, VOCAB, SEQ_LEN)
    return replace(config, tie_embeddings=False, num_kv_heads=config.num_heads)


def measure(group: Group, shape: str, repeats: int) -> list[tuple[Comparison, Comparison, Comparison]]:
    """On each rank, for every contest: seconds, bytes of all ranks, peak bytes of this one."""
    torch.set_num_threads(1)
    config = model_config(shape)
    return [_compare(group, config, sequence, what == "layers", repeats) for sequence, what in CONTESTS]


def _compare(group: Group, config: ModelConfig, sequence: bool, layers: bool, repeats: int) -> tuple[Comparison, ...]:
    mine, other = _ours(group, config, sequence, layers), _dtensor(group, config, sequence, layers)
    settle = settling(group.device)
    samples = (seconds_per_call(each.step, CALLS, before=group.barrier, after=settle) for each in (mine, other))
    times = side_by_side(lambda: _same_gradients(mine, other, group), *samples, repeats=repeats)
    if not times.correct:
        return times, times, times
    traffic = tuple((sent_in(mine.step, group), sent_in(other.step, group)) for _ in range(3))
    peaks = tuple((peak_in(mine.step, mine.module), peak_in(other.step, other.module)) for _ in range(3))
    return times, Comparison(True, traffic), Comparison(True, peaks)


def _same_gradients(mine: Contestant, other: Contestant, group: Group) -> bool:
    """Whether one step gives every parameter the same gradient on both sides, on every rank."""
    mine.step(), other.step()
    first, second = mine.gradients(), other.gradients()
    same = first.keys() == second.keys() and all(
        bool(second[name].norm() > 0) and bool((first[name] - second[name]).norm() <= TOLERANCE * second[name].norm())
        for name in first
    )
    return all(group.gather_objects(same))


def _ours(group: Group, config: ModelConfig, sequence: bool, layers: bool) -> Contestant:
    module = tensor_parallel(Transformer(config, device=group.device), config, group, sequence=sequence)
    trained = dict((module.blocks if layers else module).named_parameters(prefix="blocks" if layers else ""))
    places = placements(config, group.rank, group.world_size, sequence)
    work = _layers(module, group, config, sequence) if layers else _model(module, group)

    def step() -> None:
        module.zero_grad()
        work().backward()
        sum_partial(named_gradients(trained.items()), places, group)

    def gradients() -> dict[str, Tensor]:
        return gather(named_gradients(trained.items()), places, group)

    return Contestant(module, step, gradients)


def _model(module: nn.Module, group: Group) -> Callable[[], Tensor]:
    tokens, targets = _tokens(group)

    def work() -> Tensor:
        nll, count = module(tokens, targets=targets)
        return nll / count

    return work


def _layers(module: nn.Module, group: Group, config: ModelConfig, sequence: bool) -> Callable[[], Tensor]:
    """Forward of the blocks from a hidden state that wants a gradient; the loss is the mean square over all tokens."""
    shape = (BATCH, SEQ_LEN, config.hidden_size)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(group.device)
    x = (whole.chunk(group.world_size, 1)[group.rank] if sequence else whole).clone().requires_grad_()
    rotation = module.rope(torch.arange(SEQ_LEN, device=group.device), x.dtype)

    def work() -> Tensor:
        y, x.grad = x, None
        for block in module.blocks:
            y = block(y, rotation)
        return y.square().sum() / whole.numel()

    return work


def _tokens(group: Group) -> Tensor:
    return torch.randint(VOCAB, (2, BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0)).to(group.device)


def _dtensor(group: Group, config: ModelConfig, sequence: bool, layers: bool) -> Contestant:
    """The plan of torch's own tutorial, with what torchtitan adds to it: column layers share their input."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    mesh = DeviceMesh.from_group(group.process_group, group.device.type)
    module = Transformer(config, device=group.device)
    whole, block_plan = _plans(sequence)
    for block in module.blocks:
        parallelize_module(block, mesh, block_plan)
    parallelize_module(module, mesh, whole)
    module.head_logits = lambda x, _: module.head(x)  # as a module, or its plan would not apply
    trained = dict((module.blocks if layers else module).named_parameters(prefix="blocks" if layers else ""))
    tokens, targets = _tokens(group)

    def work() -> Tensor:
        return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())

    work = _layers(module, group, config, sequence) if layers else work

    def step() -> None:
        module.zero_grad()
        with loss_parallel():
            work().backward()
        for each in trained.values():
            if isinstance(each.grad, DTensor) and each.grad.placements[0].is_partial():
                each.grad = each.grad.redistribute(mesh, (Replicate(),))

    def gradients() -> dict[str, Tensor]:
        found = {name: each.grad for name, each in trained.items()}
        return {name: (g.full_tensor() if isinstance(g, DTensor) else g).cpu() for name, g in found.items()}

    return Contestant(module, step, gradients)


def _plans(sequence: bool) -> tuple[dict, dict]:
    """(of the model, of a block)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    between = Shard(1) if sequence else Replicate()
    model = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
    block = {name: ColwiseParallel() for name in columns}
    block |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.o_proj", "mlp.down_proj")}
    for name, others in (("attention", 3), ("mlp", 0)):  # so that q, k, v (and gate, up) share one all-reduce backward
        nothing = (None,) * others
        block[name] = PrepareModuleInput(
            input_layouts=(between, *nothing), desired_input_layouts=(Replicate(), *nothing)
        )
    if sequence:
        model["norm"] = SequenceParallel()
        block |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    return model, block
