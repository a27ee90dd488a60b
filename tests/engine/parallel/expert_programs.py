"""What ranks run in the tests of expert parallelism: dispatch of tokens against one process that has every expert."""

from collections import Counter
from functools import partial
from itertools import combinations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minillm.comm import Group
from minillm.measure import ledger
from minillm.model import ModelConfig, MoEConfig, Transformer
from minillm.parallel.expert_parallel import ExpertDispatch, NodeDispatch, expert_parallel

EXPERTS, TOP_K, HIDDEN = 8, 2, 6
ROUTINGS = ("random", "one expert", "few experts", "dropped", "none on a rank", "equal", "every pair")
PAIRS = list(combinations(range(EXPERTS), TOP_K))
SIZES = {"equal": EXPERTS, "every pair": len(PAIRS)}  # tokens of every rank; of the others each has another number


def draw(routing: str, ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Of every rank: x: [tokens, hidden], chosen, weights: [tokens, k]; and the experts' weights [experts, h, h]."""
    generator = torch.Generator().manual_seed(len(routing))
    xs, chosen, weights = [], [], []
    for rank in range(ranks):
        tokens = 0 if (routing, rank) == ("none on a rank", 1) else SIZES.get(routing, 5 + 3 * rank)
        xs.append(torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64))
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
        if routing == "one expert":
            ids = torch.full_like(ids, 5)
            ids[:, 1] = -1
        elif routing == "few experts":
            ids = ids // 3
        elif routing == "dropped":
            ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
        elif routing == "equal":
            ids = (torch.arange(tokens)[:, None] + 3 * torch.arange(TOP_K)) % EXPERTS
        elif routing == "every pair":
            ids = torch.tensor(PAIRS)
        chosen.append(ids)
        weights.append(torch.rand(ids.shape, generator=generator, dtype=torch.float64))
    return xs, chosen, weights, torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)


def through_experts(rows: Tensor, counts: Tensor, known: list[int], matrices: Tensor) -> Tensor:
    assert known == counts.tolist()
    parts = rows.split(known)
    return torch.cat([torch.tanh(part @ matrix) for part, matrix in zip(parts, matrices, strict=True)])


def one_process(routing: str, ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Outputs, gradients of x and of the weights by rank, and of the matrices: token by token, expert by expert."""
    xs, chosen, weights, matrices = draw(routing, ranks)
    for leaf in (*xs, *weights, matrices):
        leaf.requires_grad_()
    outs = []
    for x, ids, weight in zip(xs, chosen, weights, strict=True):
        rows = [
            sum((w * torch.tanh(t @ matrices[e]) for e, w in zip(i, v, strict=True) if e >= 0), t * 0)
            for t, i, v in zip(x, ids.tolist(), weight, strict=True)
        ]
        outs.append(torch.stack([*rows, x.new_zeros(HIDDEN)])[:-1] + x.square())  # beside: x²
    sum((out * (1 + index)).sin().sum() for index, out in enumerate(outs)).backward()
    weight_gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]  # a rank without tokens
    return [out.detach() for out in outs], [x.grad for x in xs], weight_gradients, matrices.grad


def levels_of(group: Group, nodes: int) -> dict[str, Group]:
    """The ranks of this one's node, and those with its place in every node."""
    size = group.world_size // nodes
    node_ranks = [range(start, start + size) for start in range(0, group.world_size, size)]
    node = [group.subgroup(ranks, f"node {i} of {nodes}") for i, ranks in enumerate(node_ranks)][group.rank // size]
    places = [range(place, group.world_size, size) for place in range(size)]
    across = [group.subgroup(ranks, f"across {i} of {nodes}") for i, ranks in enumerate(places)][group.rank % size]
    return {"node": node, "across": across}


def dispatched(group: Group, nodes: int = 1) -> dict:
    """By routing: this rank's output and gradients, the ledger's calls and bytes of forward and of both."""
    found = {}
    dispatch = (
        ExpertDispatch(group, EXPERTS) if nodes == 1 else NodeDispatch(**levels_of(group, nodes), num_experts=EXPERTS)
    )
    for routing in ROUTINGS:
        xs, chosen, weights, matrices = draw(routing, group.world_size)
        each = EXPERTS // group.world_size
        x, weight = xs[group.rank].requires_grad_(), weights[group.rank].requires_grad_()
        own = matrices[each * group.rank :][:each].clone().requires_grad_()
        experts = partial(through_experts, matrices=own)
        with ledger() as led:
            answer = dispatch(experts, x, chosen[group.rank], weight)
            beside = x.square()
            out = answer() + beside
            calls, sent = dict(led.calls), led.bytes("all_to_all")
            (out * (1 + group.rank)).sin().sum().backward()
        receipt = calls, dict(led.calls), sent, led.bytes("all_to_all"), _crossing(led)
        found[routing] = [out.detach(), x.grad, weight.grad], own.grad, receipt
    return found


def flat_and_over_nodes(group: Group) -> tuple[dict, dict, dict]:
    return dispatched(group), dispatched(group, nodes=2), dispatched(group, nodes=4)


def _crossing(led) -> int:
    return sum(event.bytes for event in led.select("all_to_all") if event.group.startswith("across"))


class HostWaits(TorchFunctionMode):
    """Counts calls for which the host waits on a GPU: reads, and results whose size the device knows only."""

    READS = (Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__bool__, Tensor.nonzero, Tensor.cpu)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.count += func in self.READS
        is_repeat = func in (Tensor.repeat_interleave, torch.repeat_interleave)
        self.count += is_repeat and isinstance(args[1], Tensor) and kwargs.get("output_size") is None
        return func(*args, **kwargs)


def host_waits(group: Group) -> list[int]:
    """Of a layer, forward and backward, in one level and in two."""
    xs, chosen, weights, _ = draw("every pair", group.world_size)
    found = []
    for dispatch in (ExpertDispatch(group, EXPERTS), NodeDispatch(**levels_of(group, 2), num_experts=EXPERTS)):
        x, weight = xs[group.rank].requires_grad_(), weights[group.rank].requires_grad_()
        with HostWaits() as waits:
            dispatch(lambda rows, *_: rows.tanh(), x, chosen[group.rank], weight)().sum().backward()
        found.append(waits.count)
    return found


MODEL = ModelConfig(37, 8, 12, 3, 2, max_seq_len=16, moe=MoEConfig(8, 2, 6, shared_experts=1, dense_layers=(1,)))


def model_over_nodes(group: Group) -> dict:
    """A step of a model on two nodes: by layer of experts what its router chose; all-to-alls in order, by level, and
    how many were launched when the shared experts of the last layer were computed, forward and backward."""
    model = expert_parallel(Transformer(MODEL, seed=0, dtype=torch.float64), MODEL, group, **levels_of(group, 2))
    tokens = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(group.rank))
    chosen, seen = [], []
    for layer in (0, 2):
        model.blocks[layer].mlp.router.register_forward_hook(
            lambda *call: chosen.append(call[-1].experts.flatten(0, 1))
        )
    with ledger() as led:
        shared = model.blocks[2].mlp.shared
        for watch in (shared.register_forward_hook, shared.down_proj.weight.register_hook):
            watch(lambda *_: seen.append(len(led.select("all_to_all"))))
        total, _ = model(tokens, targets=tokens)
        forward = len(led.select("all_to_all"))
        total.backward()
    sent = [(event.group.split()[0], event.bytes) for event in led.select("all_to_all")]
    gathers = Counter(event.group.split()[0] for event in led.select("all_gather"))
    ways = {"forward": sent[:forward], "backward": sent[forward:]}
    return {"chosen": chosen, "seen": seen, "all_gathers": gathers, **ways}


def whole_model(group: Group) -> dict:
    """A model's layers of experts: the all-to-alls of a step with their bytes, and those launched when the shared
    experts of the last layer were computed, forward and backward."""
    torch.manual_seed(0)
    model = expert_parallel(Transformer(MODEL, seed=0, dtype=torch.float64), MODEL, group)
    tokens = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(group.rank))
    seen = []
    with ledger() as led:

        def look(*_) -> None:
            seen.append(len(led.select("all_to_all")))

        shared = model.blocks[2].mlp.shared
        shared.register_forward_hook(look)
        shared.down_proj.weight.register_hook(look)
        total, _ = model(tokens, targets=tokens)
        forward = [event.bytes for event in led.select("all_to_all", group.name)]
        total.backward()
        both = [event.bytes for event in led.select("all_to_all", group.name)]
    counts = [model.router_losses.counts[layer].view(group.world_size, -1).sum(1).tolist() for layer in (0, 2)]
    held = {name: list(parameter.shape) for name, parameter in model.named_parameters() if ".experts." in name}
    again = Transformer(MODEL, seed=3, dtype=torch.float64)  # a part drawn is the part of the whole one drawn
    name, each = "blocks.2.mlp.experts.down_proj", MODEL.moe.num_experts // group.world_size
    model.initialize(3)
    own = again.get_parameter(name)[each * group.rank :][:each]
    return {
        "forward": forward,
        "both": both,
        "rows": counts,
        "seen": seen,
        "held": held,
        "same": torch.equal(own, model.get_parameter(name)),
    }
