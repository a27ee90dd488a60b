"""A mixture of experts against transformers' Mixtral block and against computing every expert for every token.

    grouped    transformers' block as a loaded model has it: sorted tokens, torch's grouped matmul
    a loop     the same block when it is built alone: a loop over experts with tokens picked by a mask
    dense      every expert over every token, weights 0 where it was not chosen: experts / top_k times the FLOPs

Routing is set through the first dimensions of the input. "balanced": every token's two experts at random. "skewed":
every token to the first expert, so that it has half of all rows, and to one of the others, the likelier the earlier.
All have the same weights, and outputs and gradients have to agree before anything is timed. Two rows beside the peers:
what a routed token costs when the routing is skewed, against balanced; and the bytes autograd keeps for backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minillm.bench.counts import settling
from minillm.bench.harness import BenchRow, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.model import ModelConfig, MoEConfig
from minillm.model.moe import MoE
from minillm.model.transformer import mixture

NUM_EXPERTS, TOP_K = 8, 2
SHAPES = {"cpu": (1024, 256, 512), "cuda": (16384, 2048, 4096)}  # tokens, hidden, intermediate size of an expert
ROUTINGS = ("balanced", "skewed")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number


def run(repeats: int = 7, sizes: tuple[int, int, int] | None = None, device: str | None = None) -> list[BenchRow]:
    """sizes: tokens, hidden size, intermediate size of an expert; None: by device."""
    check_repeats(repeats)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokens, hidden, intermediate = sizes or SHAPES[where.type]
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    ours, peers = contestants(hidden, intermediate, where, dtype)
    inputs = {routing: routed(routing, tokens, hidden, where, dtype) for routing in ROUTINGS}
    label = f"{tokens} tokens, hidden {hidden}, {NUM_EXPERTS} experts of {intermediate}, {where.type}"
    rows = []
    for routing, x in inputs.items():
        for what, work in (("forward", forward), ("forward and backward", forward_backward)):
            for name, peer in peers.items():
                found = side_by_side(
                    lambda peer=peer, x=x: agree(ours, peer, x),
                    *(sample(work, layer, x) for layer in (ours, peer)),
                    repeats=repeats,
                )
                rows.append(bench_row(f"{what}, {routing}: {label}", name, found, "ms", scale=1e3))
    mine, other = (sample(forward_backward, ours, inputs[routing]) for routing in ("skewed", "balanced"))
    found = side_by_side(lambda: True, mine, other, repeats=repeats)
    scale = 1e9 / (tokens * TOP_K)
    rows.append(bench_row(f"per routed token, skewed: {label}", "itself, balanced", found, "ns", scale=scale))
    for name, peer in peers.items():
        kept = (lambda layer=layer: kept_bytes(layer, inputs["balanced"]) for layer in (ours, peer))
        found = side_by_side(lambda: True, *kept, repeats=repeats)
        rows.append(bench_row(f"kept for backward: {label}", name, found, "MiB", scale=2**-20))
    return rows


def contestants(
    hidden: int, intermediate: int, device: torch.device, dtype: torch.dtype
) -> tuple[MoE, dict[str, nn.Module]]:
    """Our layer and the peers, all with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    ours = mixture(ModelConfig(8, hidden, intermediate, 1, 1, moe=MoEConfig(NUM_EXPERTS, TOP_K)), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (ours.experts.gate_up_proj, ours.experts.down_proj):
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        ours.router.weight.copy_(torch.eye(NUM_EXPERTS, hidden))
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate)
    peers: dict[str, nn.Module] = {}
    for name, kind in (("transformers, grouped", "grouped_mm"), ("transformers, a loop", "eager")):
        config = MixtralConfig(**sizes, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K)
        config._experts_implementation = kind
        block = peers[name] = MixtralSparseMoeBlock(config)
        with torch.no_grad():
            block.gate.weight.copy_(ours.router.weight)
            block.experts.gate_up_proj.copy_(ours.experts.gate_up_proj.flatten(1, 2))
            block.experts.down_proj.copy_(ours.experts.down_proj)
    peers["dense"] = Dense(ours)
    for layer in (ours, *peers.values()):
        layer.to(device, dtype)
    return ours, peers


class Dense(nn.Module):
    """Every expert over every token, one after the other."""

    def __init__(self, layer: MoE):
        super().__init__()
        self.router = nn.Parameter(layer.router.weight.detach().clone())
        self.gate_up = nn.Parameter(layer.experts.gate_up_proj.detach().flatten(1, 2).clone())
        self.down = nn.Parameter(layer.experts.down_proj.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.router.T).float().softmax(-1)
        best, experts = scores.topk(TOP_K, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, experts, best / best.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up.unbind(), self.down.unbind(), strict=True)):
            gate, up = (x @ gate_up.T).chunk(2, dim=-1)
            y = y + weights[..., expert, None] * ((nn.functional.silu(gate) * up) @ down.T)
        return y


def routed(routing: str, tokens: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, tokens, hidden], whose first dimensions are the router's logits."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, tokens, hidden, generator=generator)
    if routing == "skewed":
        x[..., :NUM_EXPERTS] -= torch.arange(1, NUM_EXPERTS + 1).log()  # the others as 1/2, 1/3, ...
        x[..., 0] += 20
    return x.to(device, dtype).requires_grad_()


@torch.no_grad()
def forward(layer: nn.Module, x: Tensor) -> None:
    layer(x)


def forward_backward(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of the input and of all parameters."""
    y = layer(x)
    return (y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y)))


def sample(work: Callable[[nn.Module, Tensor], object], layer: nn.Module, x: Tensor) -> Callable[[], float]:
    return seconds_per_call(lambda: work(layer, x), after=settling(x.device))


def agree(ours: nn.Module, peer: nn.Module, x: Tensor) -> bool:
    """Output and gradients, those of parameters by their sizes, which differ."""
    mine, theirs = (forward_backward(layer, x) for layer in (ours, peer))
    pairs = [*zip(mine[:2], theirs[:2], strict=True)]
    pairs += zip(*(sorted(each[2:], key=Tensor.numel) for each in (mine, theirs)), strict=True)
    tolerance = TOLERANCE[x.dtype]
    return all(bool((a.flatten() - b.flatten()).abs().max() <= tolerance * b.abs().max()) for a, b in pairs)


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for backward, without parameters and the input; each piece of memory once."""
    known = {each.untyped_storage().data_ptr() for each in (x, *layer.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    del y
    return sum(kept.values())
