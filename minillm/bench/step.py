"""minillm's training step against a plain loop around transformers' Llama, and against the same loop by accelerate.

All three train the same shape from the same weights on the same windows of text in the same order and precision, with
the same fused AdamW, clipping at the same norm; before anything is timed, their gradients have to agree.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from minillm.bench.harness import BenchRow, bench_row, check_repeats, side_by_side
from minillm.data import ShardedSampler, TokenDataset, Tokenizer, Tokens, corpus, tokenize
from minillm.model import save_hf
from minillm.model.hf.load import hf_name
from minillm.train import PRECISIONS, TrainConfig, Trainer, adamw, preset

TOLERANCE = 1e-3  # of a gradient's norm in float32; bfloat16 rounds to 2^-8 at every operation
SHAPES = ("target", "draft")


def run(
    shapes: Sequence[str] = SHAPES,
    precisions: Sequence[str] | None = None,
    batch_size: int = 8,
    seq_len: int = 256,
    steps: int = 2,
    repeats: int = 7,
    device: str | None = None,
) -> list[BenchRow]:
    """tokens/s of minillm and of both peers; steps: updates per sample. Precision float32, on a GPU bfloat16 too."""
    check_repeats(repeats)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precisions = precisions or (("fp32", "bf16") if where.type == "cuda" else ("fp32",))
    tokens = tokenize(corpus(), Tokenizer.load())
    rows = []
    for shape in shapes:
        model = preset(shape, tokens.vocab_size, seq_len)
        for precision in precisions:
            config = TrainConfig(model, seq_len=seq_len, batch_size=batch_size, precision=precision)
            for name, peer in PEERS.items():
                label = f"step, {shape}, {precision}, {batch_size} x {seq_len} tokens, {where.type}"
                rows.append(compare(label, name, peer, config, tokens, where, steps, repeats))
    return rows


def compare(
    label: str,
    name: str,
    peer: Callable[..., "Peer"],
    config: TrainConfig,
    tokens: Tokens,
    device: torch.device,
    steps: int = 2,
    repeats: int = 7,
) -> BenchRow:
    """One row: `Trainer` against one peer."""
    with Trainer(config, tokens, device=device) as ours:
        theirs = peer(ours, tokens)

        def sample(step: Callable[[], object]) -> Callable[[], float]:
            def tokens_per_second() -> float:
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                return steps * config.tokens_per_step / (time.perf_counter() - start)

            return tokens_per_second

        tolerance = TOLERANCE if config.precision == "fp32" else 0.1
        found = side_by_side(
            lambda: same_gradients(ours, theirs, tolerance), sample(ours.step), sample(theirs.step), repeats
        )
    return bench_row(label, name, found, "tokens/s", higher_is_better=True)


def same_gradients(ours: Trainer, theirs: "Peer", tolerance: float) -> bool:
    """Whether both make the same gradients of the same first batch, each parameter's to `tolerance` of its norm."""
    mine_loss, _ = ours.backward()
    other_loss = theirs.backward()
    named = dict(theirs.model.named_parameters())
    good = abs(mine_loss - other_loss) < tolerance * abs(other_loss)
    for name, parameter in ours.model.named_parameters():
        other = named[hf_name(name)].grad
        good &= bool((parameter.grad - other).norm() <= tolerance * other.norm())
    ours.optimizer.zero_grad()
    theirs.optimizer.zero_grad()
    return good


@dataclass
class Peer:
    """A transformers model in the loop that its documentation shows."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[list[Tensor]]
    config: TrainConfig
    device: torch.device

    def backward(self) -> float:
        inputs, targets = (part.to(self.device) for part in next(self.batches))
        with PRECISIONS[self.config.precision].context(self.device):
            logits = self.model(inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        return loss.item()

    def step(self) -> float:
        loss = self.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@dataclass
class AcceleratePeer(Peer):
    """The same under accelerate, which casts, moves and steps."""

    accelerator: object = None

    def backward(self) -> float:
        inputs, targets = next(self.batches)
        with self.accelerator.autocast():
            logits = self.model(inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        self.accelerator.backward(loss)
        return loss.item()

    def step(self) -> float:
        loss = self.backward()
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def plain(ours: Trainer, tokens: Tokens) -> Peer:
    model = _twin(ours)
    optimizer = _adamw(model, ours.config)
    return Peer(model, optimizer, iter(_loader(ours.config, tokens)), ours.config, ours.device)


def accelerated(ours: Trainer, tokens: Tokens) -> AcceleratePeer:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # a process has one precision, unless it is made to forget it
    mixed = {"fp32": "no"}.get(ours.config.precision, ours.config.precision)
    accelerator = Accelerator(cpu=ours.device.type == "cpu", mixed_precision=mixed)
    model = _twin(ours)
    parts = accelerator.prepare(model, _adamw(model, ours.config), _loader(ours.config, tokens))
    model, optimizer, loader = parts
    return AcceleratePeer(model, optimizer, iter(loader), ours.config, ours.device, accelerator)


PEERS = {"transformers, plain loop": plain, "transformers, accelerate loop": accelerated}


def _twin(ours: Trainer) -> nn.Module:
    """transformers' Llama with the weights of `ours`."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        save_hf(ours.model, folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(ours.device).train()


def _adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """The groups of minillm's optimizer, of a model that names its embedding otherwise."""
    named = [(name.replace("embed_tokens", "embedding"), parameter) for name, parameter in model.named_parameters()]
    return adamw(named, config)


def _loader(config: TrainConfig, tokens: Tokens) -> DataLoader:
    """torch's loader over the windows in the order that minillm's takes them."""
    dataset = TokenDataset(tokens, config.seq_len)
    sampler = ShardedSampler(len(dataset), config.batch_size, seed=config.seed)

    class Order(torch.utils.data.Sampler):
        def __iter__(self) -> Iterator[list[int]]:
            for step in count():
                yield np.asarray(sampler.indices(step * config.batch_size)).tolist()

    return DataLoader(dataset, batch_sampler=Order())
