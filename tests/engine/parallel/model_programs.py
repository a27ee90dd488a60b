"""What ranks run in the tests of other people's modules: each form trains them as torch's DDP does."""

from functools import partial

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel import BucketedDDP, FullyShard, ZeroOptimizer
from minillm.parallel.sharding.gather import gather
from minillm.train import decay_groups

STEPS = 3


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


class Pictures(nn.Module):
    """A convolutional network with BatchNorm, in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for channels in (2, 4)
        )
        self.head = nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Oddities(nn.Module):
    """Parameters that are shared, strided, scalar, empty, unused on one rank and unused everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.shared.weight
        self.strided = nn.Parameter(torch.randn(4, 3).t())
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, also: bool) -> Tensor:
        y = self.tied(self.shared(x).tanh()) @ self.strided * self.scalar
        return (self.sometimes(y) if also else y).square().sum() + self.empty.sum()


def loss_of(name: str, module: nn.Module, step: int, group: Group) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + group.rank)
    random = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    if name == "llama":
        tokens = torch.randint(31, (2, 6), generator=draw)
        return module(input_ids=tokens, labels=tokens).loss
    if name == "transformer":
        return module(random(2, 5, 8), random(2, 4, 8)).square().mean()
    if name == "cnn":
        return module(random(4, 2, 5, 5)).square().mean()
    return module(random(2, 3), also=group.rank == 1)


MODELS = {"llama": llama, "transformer": Translator, "cnn": Pictures, "odd": Oddities}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def grouped(named) -> torch.optim.Optimizer:
    """Two parameter groups."""
    return torch.optim.AdamW(decay_groups(named, 0.3), lr=0.05)


def wrapped(form: str, model: nn.Module, group: Group, unused: bool):
    """(what forward is called on, optimizer, a function that tells whole gradients)."""
    if form in ("torch", "ddp"):
        torchs = nn.parallel.DistributedDataParallel
        module = torchs(model, find_unused_parameters=unused) if form == "torch" else BucketedDDP(
            model, group, bucket_cap_mb=0.001, find_unused=unused
        )  # fmt: skip
        own = lambda: {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}  # noqa: E731
        return module, grouped(model.named_parameters()), own
    if form == "fsdp":
        module = FullyShard(model, group, find_unused=unused, **({"blocks": []} if unused else {}))
        optimizer = module.optimizer(grouped)
        return module, optimizer, partial(gradients_of, optimizer)
    optimizer = ZeroOptimizer(model, group, int(form[-1]), make=grouped, bucket_cap_mb=0.001, find_unused=unused)
    return model, optimizer, partial(gradients_of, optimizer)


def gradients_of(optimizer) -> dict[str, Tensor]:
    """Whole gradients by name."""
    optimizer.prepare_gradients()
    return gather(optimizer.gradients_by_name(), optimizer.placements, optimizer.norm_group)


def trained(group: Group, name: str) -> dict:
    """form: (gradients of the first step, whole state at the end, names of the groups that were unsharded)."""
    found = {}
    for form in ("torch", "ddp", "zero1", "zero2", "fsdp"):
        module, optimizer, gradients = wrapped(form, build(name), group, unused=name == "odd")
        schedule, first = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), {}
        for step in range(STEPS):
            loss_of(name, module, step, group).backward()
            first = first or gradients()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        state = module.state_dict()
        found[form] = first, {key.removeprefix("module."): tensor.clone() for key, tensor in state.items()}
    found["blocks"] = [each.name for each in module.groups]
    return found


def everything(group: Group) -> dict:
    return {name: trained(group, name) for name in MODELS}
