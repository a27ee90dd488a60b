"""A batch of 16 sequences with adapters of several ranks in one pass, against three other ways to serve them.

    a loop over adapters    a pass for each adapter, over its own rows
    merged models           a model for each adapter, its own rows through each: as fast as the base, and as large
    peft, mixed batch       Hugging Face's peft around the same model, `adapter_names` for each row
    the base alone          no adapters at all: what all of them together cost

"decode" is one token of each sequence, "prefill" 16; all sixteen have one adapter, or 4 or 16 different ones, by turns,
of ranks 4 to 64 beside all layers. Sequences are sorted by adapter, as the engine sorts them. Logits have to be those
of the merged models, row by row, before anything is timed. Without a cache, so that a pass is matrix products alone.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from minillm.adapters import LoraConfig, attach, detach, merge
from minillm.adapters.peft_folder import load_peft, save_peft
from minillm.adapters.store import AdapterStore
from minillm.bench.harness import BenchRow, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.bench.quantize import TARGET, model_of
from minillm.model import Transformer

SEQUENCES = 16
RANKS = (4, 8, 16, 64)
WORK = {"decode": 1, "prefill": 16}  # tokens of each sequence
DIFFERENT = (1, 4, 16)
ALONE = "the base alone"
TOLERANCE = 1e-4  # of logits, relative, row by row


@dataclass(frozen=True)
class Contestants:
    """One model four times over. merged: by adapter; peft: None if it is not installed."""

    store: AdapterStore
    numbers: list[int]
    base: Transformer
    merged: list[Transformer]
    peft: torch.nn.Module | None


@dataclass(frozen=True)
class Batch:
    """tokens: [sequences, tokens]; which: the adapter of each sequence, ascending; rows: of each adapter in turn."""

    tokens: Tensor
    which: list[int]

    @property
    def rows(self) -> list[tuple[int, slice]]:
        found, start = [], 0
        for number in dict.fromkeys(self.which):
            count = self.which.count(number)
            found.append((number, slice(start, start + count)))
            start += count
        return found


def run(repeats: int = 7, sizes: Sequence[int] = (TARGET, 512)) -> list[BenchRow]:
    """sizes: hidden sizes of random Llamas, 0 = the committed target."""
    check_repeats(repeats)
    return [row for size in sizes for row in of_model(size, repeats)]


def of_model(size: int, repeats: int) -> list[BenchRow]:
    name, model = model_of(size)
    rows = []
    with contestants(model) as each:
        for work, tokens in WORK.items():
            for different in DIFFERENT:
                title = f"{work}, {name}, {SEQUENCES} sequences, {different} adapter{'s' if different > 1 else ''}"
                rows += compare(title, each, batch_of(model, different, tokens), repeats)
    return rows


def compare(title: str, each: Contestants, batch: Batch, repeats: int) -> list[BenchRow]:
    rows = []
    ours = seconds_per_call(partial(grouped, each, batch))
    for peer, call in peers_of(each, batch).items():
        check = partial(agrees, each, batch, None if peer == ALONE else call)
        found = side_by_side(check, ours, seconds_per_call(call), repeats=repeats)
        rows.append(bench_row(title, peer, found, "ms", scale=1e3))
    return rows


@contextmanager
def contestants(model: Transformer) -> Iterator[Contestants]:
    with tempfile.TemporaryDirectory() as root:
        folders = {f"adapter-{n}": write_adapter(model, n, Path(root, str(n))) for n in range(max(DIFFERENT))}
        merged = []
        for folder in folders.values():
            merged.append(copy.deepcopy(model))
            load_peft(merged[-1], folder)
            merge(merged[-1])
            detach(merged[-1])
        store = AdapterStore(copy.deepcopy(model), folders)
        numbers = [store.registered(name).number for name in folders]
        if failed := store.hold(numbers):
            raise ValueError(next(iter(failed.values())))
        yield Contestants(store, numbers, model, merged, by_peft(copy.deepcopy(model), folders))


def write_adapter(model: Transformer, number: int, folder: Path) -> Path:
    """Random numbers, since a B of zeros would hide what is wrong."""
    rank = RANKS[number % len(RANKS)]
    lora, changed = LoraConfig(rank, ("all",), alpha=rank / 4, zero_start=False), copy.deepcopy(model)
    attach(changed, lora, seed=number)
    save_peft(changed, lora, folder)
    return folder


def by_peft(model: Transformer, folders: dict[str, Path]) -> torch.nn.Module | None:
    """peft's layers around the same model's, with the same adapters."""
    if find_spec("peft") is None:
        return None
    from peft import LoraConfig as TheirConfig
    from peft import get_peft_model
    from peft.utils import set_peft_model_state_dict
    from safetensors.torch import load_file

    wrapped: torch.nn.Module | None = None
    for number, (name, folder) in enumerate(folders.items()):
        rank = RANKS[number % len(RANKS)]
        config = TheirConfig(r=rank, lora_alpha=rank / 4, target_modules=r".*blocks.*_proj")
        if wrapped is None:
            wrapped = get_peft_model(model, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
        state = {ours_of(key): value for key, value in load_file(folder / "adapter_model.safetensors").items()}
        set_peft_model_state_dict(wrapped, state, adapter_name=name)
    return wrapped.eval()


def ours_of(key: str) -> str:
    """Hugging Face's name of a layer within peft's, as the wrapped model has it."""
    return key.replace("model.model.layers.", "model.blocks.").replace(".self_attn.", ".attention.")


def batch_of(model: Transformer, different: int, tokens: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (SEQUENCES, tokens), generator=draw)
    return Batch(ids, sorted(n % different for n in range(SEQUENCES)))


@torch.no_grad()
def grouped(each: Contestants, batch: Batch) -> Tensor:
    numbers = [each.numbers[n] for n in batch.which]
    with each.store.routed(numbers, [batch.tokens.shape[1]] * SEQUENCES):
        return each.store.model(batch.tokens)


@torch.no_grad()
def one_by_one(each: Contestants, batch: Batch) -> Tensor:
    found = []
    for number, rows in batch.rows:
        tokens = batch.tokens[rows]
        with each.store.routed([each.numbers[number]], [tokens.numel()]):
            found.append(each.store.model(tokens))
    return torch.cat(found)


@torch.no_grad()
def by_merged(each: Contestants, batch: Batch) -> Tensor:
    return torch.cat([each.merged[number](batch.tokens[rows]) for number, rows in batch.rows])


@torch.no_grad()
def by_mixed_batch(each: Contestants, batch: Batch) -> Tensor:
    return each.peft(batch.tokens, adapter_names=[f"adapter-{number}" for number in batch.which])


@torch.no_grad()
def alone(each: Contestants, batch: Batch) -> Tensor:
    return each.base(batch.tokens)


def peers_of(each: Contestants, batch: Batch) -> dict[str, Callable[[], Tensor]]:
    ways = {"a loop over adapters": one_by_one, "merged models": by_merged}
    if each.peft is not None:
        ways["peft, mixed batch"] = by_mixed_batch
    ways[ALONE] = alone
    return {name: partial(way, each, batch) for name, way in ways.items()}


def agrees(each: Contestants, batch: Batch, peer: Callable[[], Tensor] | None) -> bool:
    """Whether ours, and the peer's if it has adapters, are the merged models' logits in every row."""
    right = by_merged(each, batch)
    found = [grouped(each, batch)] + ([] if peer is None else [peer()])
    off = [((one - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)).max() for one in found]
    return bool(max(off) < TOLERANCE)
