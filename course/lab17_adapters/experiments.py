"""What lab 17 measures: bytes and FLOPs of training steps, what counts in each stage of training, rank against loss.

Fine-tuning starts from the committed target, which has read Python's standard library and nothing else. Two kinds of
text are new to it: such code indented with tabs, which is near, and such code in rot13, in which hardly a token is as
before.
"""

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from course.shared.measuring import count_flops, one_thread
from minillm.adapters import LoraConfig, attach, switched_off
from minillm.adapters.attach import adapter_parameters
from minillm.data import Tokenizer, Tokens, corpus
from minillm.data.conversations import encode
from minillm.data.dataset import IGNORE
from minillm.measure import memory
from minillm.model import ModelConfig, Transformer, dense, load_hf
from minillm.model.generate import folder_of
from minillm.predict.training.adapters import LAYERS, AdapterMemory, Adapters
from minillm.predict.training.memory import training_step
from minillm.train import TrainConfig, Trainer
from minillm.train.preference import Preference
from minillm.train.strategies.single_device import Microbatch


def target() -> Transformer:
    """A fresh copy of the committed model, float32 on the CPU."""
    return load_hf(folder_of("target"), dtype=torch.float32)


# FLOPs and memory of a step.


@one_thread()
def step_flops(layers: Sequence[str] | None, rank: int = 16, seq: int = 32) -> int:
    """Of a step of the target on one window, as torch counts them. layers: with adapters; None = all weights learn."""
    model = target()
    if layers is not None:
        attach(model, LoraConfig(rank, tuple(layers)))
    tokens = torch.arange(seq)[None]
    return count_flops(lambda: model(tokens, targets=tokens, attention=dense)[0].backward())


SMALL = ModelConfig(512, 256, 768, 4, 4, 2, head_dim=64, max_seq_len=256)
STEP = 2, 64  # windows and tokens of the measured steps
WAYS = ("all weights", "LoRA", "QLoRA")
PARTS = ("weights", "gradients", "optimizer", "activations", "temporaries")


@dataclass(frozen=True)
class StepBytes:
    """One way to train `SMALL`: bytes at the fullest moment of a step, by formula by part, and measured in all."""

    name: str
    predicted: dict[str, float]
    measured: int

    @property
    def total(self) -> float:
        return sum(self.predicted.values())


@lru_cache(maxsize=2)
@one_thread()
def step_bytes(rank: int = 8) -> tuple[StepBytes, ...]:
    """Adapters beside all layers; a second step is measured, when the moments are there."""
    batch, seq = STEP
    numbers = np.random.default_rng(0).integers(0, SMALL.vocab_size, 5000)
    tokens = Tokens(numbers, SMALL.vocab_size, 0, 1, 5000)
    found = []
    for name in WAYS:
        more = {} if name == WAYS[0] else {"lora": rank, "target": "all", "qlora": name == WAYS[2]}
        config = TrainConfig(SMALL, seq_len=seq, batch_size=batch, **more)
        with Trainer(config, tokens) as trainer:
            trainer.step()
            with memory(trainer.module, trainer.optimizer) as seen:
                trainer.step()
        found.append(StepBytes(name, predicted_bytes(name, rank), seen.peak.total))
    return tuple(found)


def predicted_bytes(name: str, rank: int, shape=SMALL, batch: int = STEP[0], seq: int = STEP[1]) -> dict[str, float]:
    """By part, for one of WAYS."""
    if name == WAYS[0]:
        peak = training_step(shape, batch, seq).peak
        return dict(
            zip(PARTS, (peak.weights, peak.gradients, peak.optimizer, peak.activations, peak.buffers), strict=True)
        )
    seen: AdapterMemory = Adapters(shape, rank, LAYERS).step_memory(batch, seq, nf4=name == WAYS[2])
    weights = seen.base + seen.adapters
    return dict(zip(PARTS, (weights, seen.gradients, seen.optimizer, seen.activations, seen.temporaries), strict=True))


def activation_shares(rank: int = 8) -> tuple[float, float]:
    """Activations at the loss of a LoRA step, over those of all weights: adapters on all layers, on q and v."""
    full = training_step(SMALL, *STEP).moments["loss"].activations
    all_layers, two = (
        Adapters(SMALL, rank, layers).step_memory(*STEP).activations for layers in (LAYERS, ("q_proj", "v_proj"))
    )
    return all_layers / full, two / full


# Stages of training.

TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)
QUESTION = {"role": "user", "content": "How do I open a file?"}
GOOD, BAD = "with open(path) as file:", "file = os.popen(path)"
BETA = 0.1


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _row(answer: str) -> tuple[Tensor, Tensor]:
    """(tokens, targets): [tokens], of which the answer's count."""
    found = encode([QUESTION, {"role": "assistant", "content": answer}], _tokenizer())
    ids, counts = torch.from_numpy(found.ids).long(), torch.from_numpy(found.counts)
    return ids[:-1], ids[1:].masked_fill(~counts[1:], IGNORE)


@dataclass(frozen=True)
class Stages:
    """tokens of one conversation, those of its answer alone, and how many count when answers are learnt; losses of a
    preferred pair, and the log-likelihoods of its two answers, by step; equal: whether the model with its adapters
    switched off still computes the base's logits, bit for bit."""

    tokens: int
    answer: int
    counted: int
    losses: tuple[float, ...]
    likelihoods: tuple[tuple[float, float], ...]
    equal: bool


@lru_cache(maxsize=1)
@one_thread()
def stages(steps: int = 6, lr: float = 3e-3) -> Stages:
    """One conversation and one pair of answers, for which the target's adapters are trained by preference."""
    rows = [_row(GOOD), _row(BAD)]
    length = max(len(tokens) for tokens, _ in rows)
    pad = lambda x, value: torch.cat([x, x.new_full((length - len(x),), value)])  # noqa: E731
    batch = Microbatch(
        torch.stack([pad(tokens, 0) for tokens, _ in rows]), torch.stack([pad(targets, IGNORE) for _, targets in rows])
    )
    model, base = target(), target()
    attach(model, LoraConfig(8, ("q", "v")))
    preference = Preference(BETA, model, model)
    optimizer = torch.optim.AdamW(adapter_parameters(model).values(), lr=lr, weight_decay=0.0)
    losses, likelihoods = [], []
    for _ in range(steps + 1):
        (weighted,), loss, pairs = preference.weighted([batch])
        losses.append(float(loss / pairs))
        with torch.no_grad():
            both = [
                -float(model(t[None], targets=y[None])[0]) for t, y in zip(batch.tokens, batch.targets, strict=True)
            ]
        likelihoods.append((both[0], both[1]))
        total, _ = model(weighted.tokens, targets=weighted.targets, weights=weighted.weights)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    with torch.no_grad(), switched_off(model):
        equal = torch.equal(model(batch.tokens), base(batch.tokens))
    first, answer = rows[0][1], _tokenizer().encode(f"{GOOD}\n")
    counted = int((first != IGNORE).sum())
    return Stages(len(first) + 1, len(answer), counted, tuple(losses), tuple(likelihoods), equal)


# Rank against loss.

NEAR, FAR = TASKS = ("indented with tabs", "rot13")
RANKS = (1, 8, 64)
WINDOW, BATCH, STEPS = 32, 4, 30
HELD_OUT = 40  # windows, spread evenly
LR, LR_ALL = 2e-3, {NEAR: 3e-4, FAR: 1e-3}  # of adapters; of all weights


@dataclass(frozen=True)
class Tuned:
    """Loss in nats per token of held-out text, before and after. numbers: that were trained; seconds of a step."""

    task: str
    rank: int | None
    numbers: int
    before: float
    after: float
    seconds: float


def written(task: str) -> str:
    """Held-out files of the standard library, as the task writes them."""
    text = "".join(document.text for document in corpus().documents("validation"))[:200_000]
    return codecs.encode(text, "rot13") if task == FAR else text.replace("    ", "\t")


@cache
def windows(task: str) -> tuple[Tensor, Tensor]:
    """(to train on, held out): [windows, WINDOW + 1] ids."""
    ids = torch.tensor(Tokenizer.load().encode(written(task)))
    count = len(ids) // (WINDOW + 1)
    found = ids[: count * (WINDOW + 1)].view(count, -1)
    is_held_out = torch.arange(count) % (count // HELD_OUT) == 0
    return found[~is_held_out], found[is_held_out]


@one_thread()
def tune(task: str, rank: int | None, steps: int = STEPS) -> Tuned:
    """Some steps from the target. rank: of adapters on all layers; None = all weights are trained."""
    model = target()
    if rank is None:
        trained, lr = list(model.parameters()), LR_ALL[task]
    else:
        attach(model, LoraConfig(rank, ("all",)))
        trained, lr = list(adapter_parameters(model).values()), LR
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    train, held_out = windows(task)
    draw = torch.Generator().manual_seed(0)
    before = _loss(model, held_out)
    start = time.process_time()
    for _ in range(steps):
        batch = train[torch.randint(len(train), (BATCH,), generator=draw)]
        total, count = model(batch[:, :-1], targets=batch[:, 1:])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    seconds = (time.process_time() - start) / steps
    return Tuned(task, rank, sum(p.numel() for p in trained), before, _loss(model, held_out), seconds)


@torch.no_grad()
def _loss(model: nn.Module, held_out: Tensor) -> float:
    total, count = model(held_out[:, :-1], targets=held_out[:, 1:])
    return float(total / count)


def rank_against_loss(ranks: Sequence[int | None] = (*RANKS, None)) -> list[Tuned]:
    return [tune(task, rank) for task in TASKS for rank in ranks]


# Cost of a batch.

TOKENS, LAYER, RANK = 16, 1024, 16


@dataclass(frozen=True)
class BatchCost:
    """A decode step of `TOKENS` requests through one layer. CPU seconds: grouped, with a merged weight for each
    different adapter, and of the base alone."""

    different: int
    grouped: float
    merged: float
    base: float


@torch.no_grad()
@one_thread()
def batch_costs(grouped: Callable, counts: Sequence[int] = (1, 4, 16), repeats: int = 7) -> list[BatchCost]:
    """grouped: as exercise 5 asks for. The least of runs that take turns."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        weight, x = torch.randn(LAYER, LAYER) / LAYER**0.5, torch.randn(TOKENS, LAYER)
        pairs = [(torch.randn(RANK, LAYER), torch.randn(LAYER, RANK), 0.1) for _ in range(max(counts))]
    merged = [weight + scale * b @ a for a, b, scale in pairs]
    found = []
    for different in counts:
        which = torch.arange(TOKENS) % different
        works = (
            lambda: grouped(x, weight, pairs, which),  # noqa: B023
            lambda: [x[which == n] @ merged[n].T for n in range(different)],  # noqa: B023
            lambda: x @ weight.T,
        )
        times: list[list[float]] = [[] for _ in works]
        for repeat in range(repeats + 1):  # the first is a warm-up
            for work, own in zip(works, times, strict=True):
                start = time.process_time()
                for _ in range(4):
                    work()
                if repeat:
                    own.append((time.process_time() - start) / 4)
        found.append(BatchCost(different, *map(min, times)))
    return found
