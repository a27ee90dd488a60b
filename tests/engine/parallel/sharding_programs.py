"""What ranks run in the tests of ZeRO stage 3."""

import dataclasses
import functools
import hashlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minillm.measure import ledger, memory
from minillm.model import ModelConfig, Transformer
from minillm.model.initialise import initial
from minillm.parallel import FullyShard
from minillm.parallel.sharding.gather import gather
from minillm.parallel.zero.optimizer import ZeroOptimizer
from minillm.train import checkpoint_blocks, decay_groups
from tests.engine.parallel.seam_programs import said

SMALL = ModelConfig(
    vocab_size=67, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2, max_seq_len=16, tie_embeddings=True
)
UNTIED = dataclasses.replace(SMALL, tie_embeddings=False, qkv_bias=True)
CASES = {  # (config, options of the model and of the step, options of FullyShard)
    "tied": (SMALL, {}, {}),
    "untied": (UNTIED, {}, {"prefetch": 0}),
    "accumulated": (SMALL, {"microbatches": 3}, {"prefetch": 2}),
    "recomputed": (SMALL, {"recompute": True}, {}),
    "frozen": (UNTIED, {"frozen": ("embedding.", "blocks.0.", "blocks.2.mlp")}, {}),
    "by name": (UNTIED, {}, {"blocks": ["embedding", "blocks.0", "blocks.1", "blocks.2"]}),
    "one unit": (SMALL, {}, {"blocks": []}),
}


def make(named):
    return torch.optim.AdamW(decay_groups(named, 0.1), lr=1e-2)


def build(config, seed=0, dtype=torch.float64, recompute=False, frozen=(), **_):
    model = Transformer(config, seed=seed, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return checkpoint_blocks(model) if recompute else model


def batch(step, rows=12, vocab_size=SMALL.vocab_size):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(vocab_size, (2, rows, 8), generator=draw)


def backward(model, step, group=None, microbatches=1):
    """Gradients of the mean over all rows, of which a rank has every world_size-th, in microbatches."""
    tokens, targets = batch(step)[:, group.rank :: group.world_size] if group else batch(step)
    for inputs, wanted in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
        nll, _ = model(inputs, targets=wanted)
        (nll / targets.numel()).backward()


def far(found, wanted):
    """The largest relative distance between tensors of the same names."""
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    return max(((found[k].double() - wanted[k]).norm() / (wanted[k].norm() + 1e-30)).item() for k in wanted)


def gradients_of(sharded):
    """Whole gradients by name."""
    parts = {
        name: part.grad.as_subclass(torch.Tensor) for name, part in sharded.named_parameters() if part.grad is not None
    }
    return gather(parts, sharded.placements, sharded.norm_group)


def compare(group, case):
    """Steps of AdamW, sharded and in this process alone. Every rank starts from weights of its own, rank 0's count."""
    config, options, shard = CASES[case]
    start = 0 if group.rank == 0 else 99
    plain, sharded = build(config, **options), FullyShard(build(config, seed=start, **options), group, **shard)
    alone = make([(name, parameter) for name, parameter in plain.named_parameters() if parameter.requires_grad])
    optimizer, worst = sharded.optimizer(make), {"gradient": 0.0, "norm": 0.0}
    for step in range(5 if case in ("tied", "accumulated") else 2):
        backward(plain, step)
        with ledger() as led:
            backward(sharded, step, group, options.get("microbatches", 1))
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        worst["gradient"] = max(worst["gradient"], far(gradients_of(sharded), wanted))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        worst["norm"] = max(worst["norm"], abs(optimizer.clip_grad_norm_(0.5) / norm - 1).item())
        for each in (alone, optimizer):
            each.step()
            each.zero_grad()
    weights = sharded.state_dict()
    worst["weight"] = far(weights, plain.state_dict())
    mine, theirs = optimizer.state_dict(), alone.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    worst["state"] = max(far(mine["state"][place], entry) for place, entry in theirs["state"].items())
    with torch.no_grad():
        tokens = batch(9)[0]
        worst["evaluated"] = (sharded.eval()(tokens) - plain(tokens)).abs().max().item()
    return {
        "worst": worst,
        "calls": dict(led.calls),
        "bytes": led.bytes(),
        "peak_groups": sharded.unshard_stats.peak_groups,
        "peak_bytes": sharded.unshard_stats.peak_bytes,
        "left": [*sharded.unshard_stats.groups, *(p for p in sharded.module.parameters() if not p.is_meta)],
        "digest": hashlib.sha256(b"".join(x.numpy().tobytes() for x in weights.values())).hexdigest(),
    }


def against_one_process(group):
    """All cases on 4 ranks, some on 2 and on 1."""
    pairs = [group.subgroup([0, 1], "first"), group.subgroup([2, 3], "second")]
    single = [group.subgroup([rank], f"rank{rank}") for rank in range(group.world_size)][group.rank]
    results = {(4, case): compare(group, case) for case in CASES}
    results |= {(2, case): compare(pairs[group.rank // 2], case) for case in ("tied", "untied")}
    return results | {(1, "tied"): compare(single, "tied")}


# What is held, in which precision, where, and how it comes back.

DEEP = dataclasses.replace(UNTIED, num_layers=8, hidden_size=32, intermediate_size=64)


def resources(group, folder):
    pair = [group.subgroup([0, 1], "first"), group.subgroup([2, 3], "second")][group.rank // 2]
    return {
        "held": {4: held(group), 2: held(pair)},
        "whole gradients": whole_gradients(group),
        "meta": deferred(group),
        "precision": precision(group),
        "offload": offloaded(group, folder),
        "state": restored(group, pair),
        "peer": against_fully_shard(group),
    }


def held(group):
    """The tracker of a step of Adam in float32, after one that made the state."""
    sharded = FullyShard(build(DEEP, dtype=torch.float32), group)
    optimizer = sharded.optimizer(make)
    for step in range(2):
        with memory(sharded, optimizer) as tracker:
            backward(sharded, step, group)
            optimizer.step()
            optimizer.zero_grad()
    return tracker.peak, sum(buffer.nbytes for buffer in sharded.module.buffers()), len(optimizer.state)


def whole_gradients(group):
    """The most bytes of whole gradients at any time: those of weights, and flat ones on their way."""
    sharded, seen, flying = FullyShard(build(DEEP, dtype=torch.float32), group), [], []

    def look(*_):
        mine = [param.full.grad for param in sharded.params.values() if param.full.grad is not None]
        seen.append(sum(x.nbytes for x in mine) + sum(flying))

    def start(flat, then):
        flying.append(flat.nbytes)
        look()
        return then()

    def finish(flat, then):
        flying.remove(flat.nbytes)
        return then()

    for flat in sharded.flats:
        flat.start_reduce = functools.partial(start, flat, flat.start_reduce)
        flat.finish_reduce = functools.partial(finish, flat, flat.finish_reduce)
        for param in flat.params:
            param.full.register_post_accumulate_grad_hook(look)
    backward(sharded, 0, group)
    return max(seen), flying


def deferred(group):
    """Built on "meta": equal to the model built whole, and at no time much of it in memory."""
    whole = build(DEEP, seed=3, dtype=torch.float32)
    with memory() as tracker:
        model = Transformer(DEEP, device="meta")
        sharded = FullyShard(model, group, initialize=lambda name, shape: initial(DEEP, name, shape, seed=3))
    wanted, found = whole.state_dict(), sharded.state_dict()
    tokens = batch(0)[0]
    with torch.no_grad():
        same_output = torch.equal(sharded(tokens), whole(tokens))
    same = list(wanted) == list(found) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    largest = max(each.nbytes for each in sharded.groups)
    return same, same_output, tracker.peak.total, sum(p.nbytes for p in sharded.parameters()), largest


def precision(group):
    """bfloat16 weights with float32 shards; gradients travel in either."""
    sent, dtypes = {}, set()
    for reduce_dtype in (None, torch.float32):
        sharded = FullyShard(build(DEEP, dtype=torch.bfloat16), group, master=True, reduce_dtype=reduce_dtype)
        optimizer = sharded.optimizer(make)
        with ledger() as led:
            backward(sharded, 0, group)
        sent[reduce_dtype] = led.bytes()
        optimizer.step()
        dtypes |= {x.dtype for p in sharded.parameters() for x in (p, p.grad, *optimizer.state[p].values())}
        dtypes |= {p.dtype for name, p in optimizer.state_dict()["masters"].items()}
    return sent, dtypes, {x.dtype for x in sharded.state_dict().values()}


def offloaded(group, folder):
    """The weights after three steps, by where the shards lie."""
    results, mapped = {}, set()
    for where in (None, "cpu", folder):
        sharded = FullyShard(build(SMALL), group, offload=where)
        optimizer = sharded.optimizer(make)
        for step in range(3):
            backward(sharded, step, group)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        results[where] = sharded.state_dict()
        if where == folder:
            kept = [x for p in optimizer.parameters for x in (p, *optimizer.state[p].values()) if x.dim()]
            mapped = {x.untyped_storage().filename is not None for x in kept}
    same = all(torch.equal(results[None][name], results[w][name]) for w in results for name in results[None])
    return same, mapped, sharded.home.file_bytes, sum(3 * p.nbytes for p in sharded.parameters())


def restored(group, pair):
    """Two steps, then one more: on the same 4 ranks, and on 2 or 4 from the whole state."""

    def step(sharded, optimizer, number, ranks):
        backward(sharded, number, ranks)
        optimizer.step()
        optimizer.zero_grad()

    first = FullyShard(build(SMALL), group)
    optimizer = first.optimizer(make)
    for number in range(2):
        step(first, optimizer, number, group)
    whole = first.state_dict(), optimizer.state_dict()
    step(first, optimizer, 2, group)
    wanted, distance = first.state_dict(), {}
    for name, ranks in (("on 2 ranks", pair), ("on 4 ranks", group)):
        second = FullyShard(build(SMALL, seed=7), ranks)
        again = second.optimizer(make)
        second.load_state_dict(whole[0])
        again.load_state_dict(whole[1])
        step(second, again, 2, ranks)
        distance[name] = far(second.state_dict(), wanted)
    other = build(SMALL, seed=7)
    zero = ZeroOptimizer(other, pair, 2, make=make)
    other.load_state_dict(whole[0])
    zero.load_state_dict(whole[1])
    back = FullyShard(build(SMALL, seed=7), group)
    again_back = back.optimizer(make)
    back.load_state_dict(other.state_dict())
    again_back.load_state_dict(zero.state_dict())
    step(other, zero, 2, pair)
    step(back, again_back, 2, group)
    distance |= {"in stage 2": far(other.state_dict(), wanted), "from stage 2": far(back.state_dict(), wanted)}
    errors = []
    for load, state in (
        (second.load_state_dict, {k: v for k, v in wanted.items() if k != "norm.weight"}),
        (second.load_state_dict, wanted | {"norm.weight": torch.ones(3)}),
        (again.load_state_dict, whole[1] | {"names": ["other", *whole[1]["names"][1:]]}),
    ):
        errors.append(said(load, state))
    return distance, errors


def against_fully_shard(group):
    """Torch's own FSDP2 on the same batches: (distance of weights, of the last norm)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (group.world_size,))
    peer, sharded = build(SMALL), FullyShard(build(SMALL), group)
    for block in peer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(peer, mesh=mesh)
    optimizers = make(peer.named_parameters()), sharded.optimizer(make)
    for step in range(3):
        for model in (peer, sharded):
            backward(model, step, group)
        norms = nn.utils.clip_grad_norm_(peer.parameters(), 0.5).full_tensor(), optimizers[1].clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = {name: tensor.full_tensor() for name, tensor in peer.state_dict().items()}
    return far(sharded.state_dict(), theirs), abs(norms[1] / norms[0] - 1).item()


# Models that are not used as one would like.


class Toy(nn.Module):
    """A stem whose backward reads weights, blocks that may be left out, a parameter of the module's own."""

    def __init__(self, width=5, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.scale = (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, width)),
            nn.Parameter(torch.ones(1)),
        )
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 2)
        self.order, self.around = (0, 1, 2, 3), lambda block, x: block(x)

    def forward(self, x):
        x = self.stem(x)
        for place in self.order:
            x = torch.tanh(self.around(self.blocks[place], x))
        return self.head(x) * self.scale


def corners(group):
    errors = {
        "model": said(FullyShard, Toy(5 + group.rank), group),
        "frozen": said(FullyShard, _frozen(Toy(), "head.bias" if group.rank else ""), group),
        "tied": said(FullyShard, _tied(Toy()), group),
        "blocks": said(FullyShard, Toy(), group, blocks=["stem.9"]),
        "no blocks": said(FullyShard, nn.Linear(2, 2), group),
        "prefetch": said(FullyShard, Toy(), group, prefetch=-1),
        "meta": said(FullyShard, Transformer(SMALL, device="meta"), group),
        "shape": said(FullyShard, Transformer(SMALL, device="meta"), group, initialize=lambda n, s: torch.ones(1)),
        "nothing": said(FullyShard, nn.ModuleList(), group, blocks=[]),
    }
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    mine = x[group.rank :: group.world_size]
    sharded = FullyShard(Toy(), group)
    early, late = sharded(mine), sharded(mine)
    errors["moved"] = said(sharded.double)
    errors["earlier pass"] = said(early.sum().backward)
    late = sharded(mine).sum()
    errors["twice"] = said(late.backward, retain_graph=True) + said(late.backward)
    twice = gradients_of(sharded)["head.weight"]
    sharded.zero_grad()
    sharded(mine).sum().backward()
    once = gradients_of(sharded)["head.weight"]
    sharded.zero_grad()
    sharded.module.order = (0, 2, 1)
    errors["out of order"] = said(sharded, mine)
    errors["outside"] = said(FullyShard(Toy(), group).module, mine)
    orders = {
        "plain": ([(0, 1, 2, 3)] * 2, False),
        "skipped on one rank": ([(0, 1, 2, 3), (0, 2)], True),
        "first and last on one rank": ([(0, 1, 2, 3), (1, 2)], True),
        "skipped by all": ([(0, 1, 3)] * 2, True),
        "again and again": ([(0, 1, 1, 1, 2, 3)] * 2, False),
    }
    found = {name: _by_order(group, x, each, unused) for name, (each, unused) in orders.items()}
    for reentrant in (False, True):  # recomputation from outside of the blocks
        around = functools.partial(checkpoint, use_reentrant=reentrant)
        found[f"checkpoint {reentrant}"] = _by_order(group, x, orders["plain"][0], False, around)
    lacking = FullyShard(Toy(), group)
    lacking.module.order = [(0, 1, 2, 3), (0, 2)][group.rank]
    errors["lacking"] = said(lacking(mine).sum().backward)
    return errors, (once, twice), found, _overflow(group, mine)


def _by_order(group, x, orders, find_unused, around=None):
    """One step of AdamW on ranks that run their blocks in these orders: (distance to one process, gathers)."""
    plain, sharded = Toy().double(), FullyShard(Toy().double(), group, find_unused=find_unused)
    optimizers = make(plain.named_parameters()), sharded.optimizer(make)
    for rank, order in enumerate(orders):
        plain.order = order
        (plain(x[rank :: len(orders)].double()).square().mean() / len(orders)).backward()
    sharded.module.order, sharded.module.around = orders[group.rank], around or plain.around
    with ledger() as led:
        sharded(x[group.rank :: len(orders)].double()).square().mean().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    distance = far(gradients_of(sharded), wanted)
    for optimizer in optimizers:
        optimizer.step()
    return (
        max(distance, far(sharded.state_dict(), plain.state_dict())),
        led.calls["all_gather"],
        sharded.unshard_stats.peak_groups,
    )


def _overflow(group, x):
    """Whether the norm is finite when all gradients are, and when one rank alone has one that is not."""
    sharded = FullyShard(Toy(), group)
    sharded(x).sum().backward()
    clip = sharded.optimizer(make).clip_grad_norm_
    norms = clip(None), clip(1.0, loss_scale=4.0), clip(None)
    sharded.zero_grad()
    (sharded(x).sum() * (float("inf") if group.rank else 1.0)).backward()
    return [norm.item() for norm in (*norms, clip(1.0))]


def _frozen(model, name):
    for each, parameter in model.named_parameters():
        parameter.requires_grad_(each != name)
    return model


def _tied(model):
    model.blocks[1].weight = model.blocks[3].weight
    return model
