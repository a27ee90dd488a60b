"""What ranks run in the tests of the seams: hybrid sharding, second wrappers, torch's tools on sharded gradients."""

import copy
import math
import pickle
import threading
import warnings

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minillm.comm import Group
from minillm.measure import ledger
from minillm.parallel import BucketedDDP, FlatDDP, FullyShard, NaiveDDP, ZeroOptimizer
from minillm.parallel.sharding.placement import Placement, Shard
from minillm.train import decay_groups

STEPS = 3


class Net(nn.Module):
    """Blocks of two matrices and a vector each, a stem and a head."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width)) for _ in "ab")
        self.head = nn.Linear(width, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


def rows(step: int, part: int = 0, parts: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, dtype=torch.float64, generator=draw)[part::parts]


def make(named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.05, weight_decay=0.1)


def said(call, *args, **kwargs) -> str:
    """What a ValueError says."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "nothing"


def far(found, wanted) -> float:
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    return max([(found[name].detach() - wanted[name].detach()).abs().max().item() for name in wanted] or [0.0])


def sharded(kind: str, model: nn.Module, group: Group, **how):
    """(what forward is called on, its optimizer) of ZeRO stage 1, 2 or 3."""
    build = how.pop("make", make)
    if kind == "fsdp":
        wrapped = FullyShard(model, group, **how)
        return wrapped, wrapped.optimizer(build)
    return model, ZeroOptimizer(model, group, int(kind[-1]), make=build, bucket_cap_mb=0.0004, **how)


KINDS = ("zero1", "zero2", "fsdp")


def one_process(steps: int = STEPS, max_norm: float | None = None, norm_type: float = 2.0, steps_of=rows):
    model, norms = Net(), []
    optimizer = make(model.named_parameters())
    for step in range(steps):
        model(rows(step)).backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


# Hybrid sharding: shards inside of a group, replicas across.


def hybrid(group: Group) -> dict:
    """Two groups of two: {kind: (distance to one process, bytes by group, largest difference between replicas)}."""
    inside = [group.subgroup([0, 1], "shard a"), group.subgroup([2, 3], "shard b")][group.rank // 2]
    across = [group.subgroup([0, 2], "replicas a"), group.subgroup([1, 3], "replicas b")][group.rank % 2]
    wanted, _ = one_process()
    found = {}
    for kind in KINDS:
        model, optimizer = sharded(kind, Net(seed=group.rank if group.rank else 0), inside, replicate_group=across)
        for step in range(STEPS):
            with ledger() as led:
                model(rows(step, group.rank, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
        sent = {name: led.bytes(group=each.name) for name, each in (("inside", inside), ("across", across))}
        shard = sum(part.nbytes for part in optimizer.slices.values())
        found[kind] = far(model.state_dict(), wanted), sent, dict(led.calls), shard
    return found


class Gate(nn.Module):
    """Backward goes on only when `opens` is set, or 60 s have passed; passed: what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.opens, self.passed = threading.Event(), []

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.register_hook(lambda _: self.passed.append(self.opens.wait(60)))
        return x


def hybrid_overlap(group: Group) -> dict:
    """{kind: whether an average over replicas comes to its end while backward still stands before earlier layers}."""
    inside = [group.subgroup([0, 1], "shard c"), group.subgroup([2, 3], "shard d")][group.rank // 2]
    across = [group.subgroup([0, 2], "replicas c"), group.subgroup([1, 3], "replicas d")][group.rank % 2]
    found, all_reduce = {}, across.all_reduce
    for kind in KINDS:
        gate = Gate()
        gated = nn.Sequential(gate, nn.Linear(16, 16)), nn.Linear(16, 16)
        # FullyShard reduces a block when backward reaches the one before it, the others at the block's last gradient.
        layers = [nn.Linear(16, 16), *(gated if kind == "fsdp" else gated[:1])]
        how = {"blocks": [str(index) for index in range(len(layers))]} if kind == "fsdp" else {}
        model, optimizer = sharded(kind, nn.Sequential(*layers), inside, replicate_group=across, **how)

        def announced(*args, opens=gate.opens, **how):
            result = all_reduce(*args, **how)
            opens.set()
            return result

        across.all_reduce = announced
        model(torch.ones(1, 16)).sum().backward()
        across.all_reduce = all_reduce
        found[kind] = gate.passed
        optimizer.step()
    return found


class Choosy(nn.Module):
    """Two branches, of which a call uses the first or both, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.layers[0](x)
        return (y + self.layers[1](x) if both else y).square().mean()


def hybrid_unused(group: Group) -> dict:
    """{kind: distance to one process} where only one replica uses the second branch."""
    inside = [group.subgroup([0, 1], "shard e"), group.subgroup([2, 3], "shard f")][group.rank // 2]
    across = [group.subgroup([0, 2], "replicas e"), group.subgroup([1, 3], "replicas f")][group.rank % 2]
    one, found = Choosy(), {}
    optimizer = make(one.named_parameters())
    for step in range(STEPS):
        sum(one(rows(step, rank, 4), rank < 2) / 4 for rank in range(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for kind in KINDS:
        how = {"blocks": []} if kind == "fsdp" else {}
        model, optimizer = sharded(kind, Choosy(), inside, replicate_group=across, find_unused=True, **how)
        for step in range(STEPS):
            model(rows(step, group.rank, 4), group.rank < 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = far(model.state_dict(), one.state_dict())
    return found


# Parameters that are parts of larger ones themselves.


def nested(group: Group) -> dict:
    """Rows over two tensor-parallel ranks, those parts over two data-parallel ranks: (norm, moments), the whole's."""
    tp_rank, dp_rank = group.rank % 2, group.rank // 2
    dp = [group.subgroup([0, 2], "dp a"), group.subgroup([1, 3], "dp b")][tp_rank]
    torch.manual_seed(0)
    whole = {"weight": torch.randn(5, 3).double(), "bias": torch.randn(5).double()}
    places = {name: Placement(tensor.shape, (Shard(0, tp_rank, 2),)) for name, tensor in whole.items()}
    x, found = torch.randn(4, 3).double(), {}
    for kind in KINDS:
        part = nn.Linear(3, 3).double()
        part.load_state_dict({name: places[name].cut(tensor) for name, tensor in whole.items()})
        how = {"blocks": []} if kind == "fsdp" else {}
        model, optimizer = sharded(kind, part, dp, placements=places, norm_group=group, **how)
        scale = torch.tensor([1.0, 1.0, 1.0 - tp_rank]).double()  # the last row of the second part is padding
        (model(x[dp_rank::2]) * scale).square().sum().backward()
        norm = optimizer.clip_grad_norm_(None).item()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        found[kind] = norm, {name: state[index]["exp_avg"] for index, name in enumerate(["weight", "bias"])}
    plain = nn.Linear(3, 5).double()
    plain.load_state_dict(whole)
    optimizer = make(plain.named_parameters())
    (sum(plain(x[rank::2]).square().sum() for rank in (0, 1)) / 2).backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm().item()
    optimizer.step()
    return found, (norm, {n: optimizer.state[p]["exp_avg"] for n, p in plain.named_parameters()})


# A second wrapper, and torch's tools.


def second_wrapper(group: Group) -> dict:
    """ZeRO over each form of DDP, and DDP over ZeRO's module: (distance to one process, collectives of a step)."""
    wanted, found = one_process()[0], {}
    for wrap in (BucketedDDP, NaiveDDP, FlatDDP):
        for stage in (1, 2):
            model = Net()
            module = wrap(model, group)
            optimizer = ZeroOptimizer(module, group, stage, make=make)
            for step in range(STEPS):
                with ledger() as led:
                    module(rows(step, group.rank, group.world_size)).backward()
                    module.finish()
                    optimizer.step()
                    optimizer.zero_grad()
            found[wrap.__name__, stage] = far(model.state_dict(), wanted), dict(led.calls)
    torchs = nn.parallel.DistributedDataParallel(Net())
    part = Net()
    NaiveDDP(part, group)
    whole, slices = FullyShard(Net(), group), {}
    wraps = {"zero": lambda m: ZeroOptimizer(m, group, make=make), "ddp": lambda m: BucketedDDP(m, group)}
    wraps["fsdp"] = lambda m: FullyShard(m, group, blocks=[])
    for name, wrap in wraps.items():
        slices[name] = said(wrap, torchs), said(wrap, whole), said(wrap, part.stem)
    return found, slices


def torch_tools(group: Group) -> dict:
    """torch's clipping, GradScaler and parameter groups on sharded gradients."""
    found = {}
    for kind in KINDS:
        model, optimizer = sharded(kind, Net(), group)
        model(rows(0, group.rank, 2)).backward()
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        clipped = said(nn.utils.clip_grad_norm_, parameters, 1.0)
        late = said(optimizer.add_param_group, {"params": [nn.Parameter(torch.ones(2))]})
        copies = [said(copy.deepcopy, optimizer), said(pickle.dumps, optimizer)]
        norms = {p: optimizer.clip_grad_norm_(None, norm_type=p).item() for p in (1.0, 2.0, 3.0, math.inf)}
        found[kind] = clipped, late, copies, norms, _grad_scaler(group, kind)
    model = Net()
    model(rows(0)).backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    return found, {p: torch.linalg.vector_norm(whole, p).item() for p in (1.0, 2.0, 3.0, math.inf)}


class Spiky(nn.Module):
    """A layer whose very first weight alone can be given a huge gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor, spike: float) -> Tensor:
        return self.linear(x).square().mean() + spike * self.linear.weight[0, 0]


def _grad_scaler(group: Group, kind: str) -> tuple:
    """(scale after a good step, after an overflow in one rank's shard alone, how far that moved the weights)."""
    model, optimizer = sharded(kind, Spiky(), group, **({"blocks": []} if kind == "fsdp" else {}))
    scaler, scales, before = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), [], {}
    for spike in (0.0, math.inf):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        scaler.scale(model(torch.ones(2, 5), spike)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return *scales, far(model.state_dict(), before)


def visits(group: Group) -> tuple[int, int]:
    """How many parameters the inner optimizer goes over in one step, and how many there are, in many buckets."""

    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            Counting.count += sum(len(each["params"]) for each in self.param_groups)
            return super().step(closure)

    model = Net()
    optimizer = ZeroOptimizer(model, group, make=lambda n: Counting([p for _, p in n], lr=0.1), bucket_cap_mb=1e-6)
    model(rows(0)).backward()
    optimizer.step()
    return Counting.count, len(optimizer.slices), len(optimizer.shards)


def optimizers(group: Group) -> dict:
    """What is said of optimizers that see slices where they need matrices, and of groups by the slices' own ndim."""
    found = {}
    for kind in KINDS:
        refused = [
            said(sharded, kind, Net(), group, make=lambda n, each=each: each([p for _, p in n]))
            for each in (torch.optim.Adafactor, torch.optim.LBFGS)
        ]

        def by_ndim(named):
            parameters = [parameter for _, parameter in named]
            return torch.optim.AdamW(
                [
                    {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
                    {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
                ]
            )

        warned = []
        for how in (by_ndim, lambda named: torch.optim.AdamW(decay_groups(named, 0.1))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, optimizer = sharded(kind, Net(), group, make=how)
            warned.append([str(each.message) for each in caught if "1-D slices" in str(each.message)])
        sizes = [len(each["params"]) for each in optimizer.param_groups]
        found[kind] = refused, warned, sizes
    return found


# Modules in every form.


class Normed(nn.Module):
    """A small convolutional network with BatchNorm, whose buffers follow each rank's own rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu().flatten(1)).square().mean()


def buffers(group: Group) -> dict:
    """Running statistics after three steps and one more forward in evaluation: ours of every form, and torch's."""
    forms = {
        "torch": lambda m: (nn.parallel.DistributedDataParallel(m), None),
        "ddp": lambda m: (BucketedDDP(m, group), None),
        "zero1": lambda m: sharded("zero1", m, group),
        "zero2": lambda m: sharded("zero2", m, group),
        "fsdp": lambda m: sharded("fsdp", m, group, blocks=[]),
    }
    found = {}
    for name, wrap in forms.items():
        model = Normed()
        module, optimizer = wrap(model)
        optimizer = optimizer or make(model.named_parameters())
        for step in range(3):
            draw = torch.Generator().manual_seed(10 * step + group.rank)
            module(torch.randn(5, 2, 4, 4, generator=draw, dtype=torch.float64) + group.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        loss = module(torch.ones(1, 2, 4, 4, dtype=torch.float64)).item()
        found[name] = loss, {key: buffer.clone() for key, buffer in model.named_buffers()}
    return found


def copies(group: Group) -> dict:
    """What deepcopy and pickle do with wrappers, and with a module after it was wrapped."""
    found = {}
    for name, wrapper in (("BucketedDDP", BucketedDDP(Net(), group)), ("FullyShard", FullyShard(Net(), group))):
        found[name] = [said(copy.deepcopy, wrapper), said(pickle.dumps, wrapper)]
    model = Net()
    ZeroOptimizer(model, group, make=make)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with ledger() as led:
            again(rows(0)).backward()
        assert not led.events and far(again.state_dict(), model.state_dict()) == 0
    return found


def reentrant(group: Group) -> dict:
    """Checkpointing with use_reentrant=True: distance to one process."""
    wanted, found = one_process()[0], {}
    for kind in ("ddp", "zero1", "zero2"):
        model = Net()
        for layer in model.layers:
            plain = layer.forward
            layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=True)
        if kind == "ddp":
            module, optimizer = BucketedDDP(model, group, bucket_cap_mb=0.0004), make(model.named_parameters())
        else:
            module, optimizer = sharded(kind, model, group)
        for step in range(STEPS):
            module(rows(step, group.rank, group.world_size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = far(model.state_dict(), wanted)
    return found


class Two(nn.Module):
    """Two stages of blocks with parameters of its own between them, used in any order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order.split():
            x = getattr(self, name)(x)
        return x.sum()


def refusals(group: Group) -> dict:
    orders = {"between": "a between b", "order": "b a", "twice": "a b a"}
    found = {
        name: said(FullyShard(Two(order), group, blocks=["a", "b"]), torch.ones(1, 2)) for name, order in orders.items()
    }
    found["nested"] = said(FullyShard, Two("a"), group, blocks=["pair", "pair.0"])
    found["nested twice"] = said(FullyShard, Two("a"), group, blocks=["pair.0", "pair"])
    return found


def two_ranks(group: Group) -> dict:
    programs = (second_wrapper, torch_tools, visits, optimizers, buffers, copies, reentrant, refusals)
    return {program.__name__: program(group) for program in programs}


def four_ranks(group: Group) -> dict:
    return {program.__name__: program(group) for program in (hybrid, hybrid_overlap, hybrid_unused, nested)}
