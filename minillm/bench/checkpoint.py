"""minillm's checkpoints against torch.distributed.checkpoint: the same model, layout, bytes and disk.

    save        from the call until everything is flushed to the disk and counts
    stall       of a background save: how long training waits          (torch: async_save)
    copy        the same bytes into memory that is there already: what a stall is at least
    restore     from files into a model and an optimizer that have run
    bytes       in the file of the rank that writes most

ZeRO stage 3 stands beside torch's fully_shard (FSDP2), replicas beside DistributedDataParallel. Each side restores into
spoiled weights before anything is timed. minillm computes a checksum of all that it writes and checks it when it reads;
torch.distributed.checkpoint has none.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from minillm.bench.comm import slowest
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.comm import Group, launch
from minillm.data import Tokens
from minillm.model import Transformer
from minillm.train import ParallelConfig, TrainConfig, Trainer, adamw, preset
from minillm.train.checkpoint.manifest import Manifest, committed
from minillm.train.checkpoint.reader import restore
from minillm.train.checkpoint.writer import Checkpointer
from minillm.train.strategies.hybrid import make_strategy

VOCAB, SEQ_LEN = 4096, 32
SHAPES = ("target", "medium")
WORLD_SIZES = (2,)
ZERO = {0: "replicas", 3: "ZeRO stage 3"}
PEER = "torch.distributed.checkpoint"


def run(
    world_sizes: Sequence[int] = WORLD_SIZES,
    shapes: Sequence[str] = SHAPES,
    repeats: int = 11,
    timeout: float = 600.0,
) -> list[BenchRow]:
    """Five rows for each layout, shape and number of ranks."""
    check_repeats(repeats)
    if not all(n > 1 for n in world_sizes):
        raise ValueError(f"world sizes {list(world_sizes)} must be 2 or more: a rank alone has nobody to share with")
    rows = []
    for world_size in world_sizes:
        for shape in shapes:
            for zero, layout in ZERO.items():
                with tempfile.TemporaryDirectory(prefix="minillm-bench-") as folder:
                    ranks = launch(
                        measure, world_size, Path(folder), shape, zero, repeats, timeout=timeout, device=None
                    )
                name = f"{layout}, {shape}, {world_size} ranks"
                for what, unit, scale, peer in ROWS:
                    times = slowest([found[what] for found in ranks])
                    rows.append(bench_row(f"{name}: {what}", peer, times, unit, scale=scale))
    return rows


ROWS = (  # what, unit, from seconds or bytes to it, compared with
    ("save", "ms", 1e3, PEER),
    ("stall", "ms", 1e3, f"{PEER}, async_save"),
    ("stall against copy", "ms", 1e3, "a copy to host memory alone"),
    ("restore", "ms", 1e3, PEER),
    ("bytes of a rank", "MB", 1e-6, PEER),
)


def measure(group: Group, folder: Path, shape: str, zero: int, repeats: int) -> dict[str, Comparison]:
    """On each rank, by row: seconds, or bytes."""
    torch.set_num_threads(1)
    ours, theirs = Ours(group, folder / "ours", shape, zero), Torch(group, folder / "torch", shape, zero)
    timed = partial(seconds_per_call, before=group.barrier)

    def checked(check: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: all(group.gather_objects(check()))

    right = checked(lambda: ours.comes_back() and theirs.comes_back())
    saves = side_by_side(right, timed(ours.save), timed(theirs.save), repeats)
    restores = side_by_side(lambda: True, timed(ours.restore), timed(theirs.restore), repeats)
    stalls = side_by_side(lambda: True, _stall(ours, group), _stall(theirs, group), repeats)
    copies = side_by_side(lambda: True, _stall(ours, group), timed(ours.copy), 3 * repeats)  # a few ms that scatter
    sizes = Comparison(True, ((ours.nbytes(), theirs.nbytes()),) * repeats)
    found = (saves, stalls, copies, restores, sizes)
    group.barrier()
    ours.trainer.close()
    return {what: times if saves.correct else saves for (what, *_), times in zip(ROWS, found, strict=True)}


def _stall(side: "Ours | Torch", group: Group) -> Callable[[], float]:
    """Seconds that a background save keeps training waiting; the writing itself is over before the next sample."""
    timed = seconds_per_call(side.save_in_background, before=group.barrier)

    def sample() -> float:
        seconds = timed()
        side.finish()
        return seconds

    return sample


class Ours:
    """A trainer after a step, and its checkpoints."""

    def __init__(self, group: Group, folder: Path, shape: str, zero: int) -> None:
        config = TrainConfig(preset(shape, VOCAB, SEQ_LEN), seq_len=SEQ_LEN, batch_size=2)
        tokens = Tokens(np.arange(VOCAB, dtype=np.uint16), VOCAB, 0, 1, VOCAB)
        strategy = make_strategy(group, ParallelConfig(dp=group.world_size, zero=zero))
        self.trainer = Trainer(config, tokens, device=group.device, parallel=strategy, workers=0)
        self.trainer.step()
        self.folder, self.group = folder, group
        self.now, self.later = (Checkpointer(folder, group, keep=1, background=late) for late in (False, True))
        self.parts = [part for part, _ in self.trainer.local_state().parts().values()]
        share = sum(part.nbytes for part in self.parts) // (1 if zero else group.world_size)
        self.buffer = torch.empty(share, dtype=torch.uint8, pin_memory=group.device.type == "cuda")

    def save(self) -> None:
        self.now.save(self.trainer)

    def save_in_background(self) -> None:
        self.later.save(self.trainer)

    def finish(self) -> None:
        self.later.finish()

    def restore(self) -> None:
        restore(self.trainer, self.folder)

    def copy(self) -> None:
        """As many bytes as this rank writes, from where they are."""
        at = 0
        for part in self.parts:
            some = part.reshape(-1).view(torch.uint8)[: self.buffer.numel() - at]
            self.buffer[at : at + some.numel()].copy_(some)
            at += some.numel()

    def comes_back(self) -> bool:
        """Whether what was spoiled after a save is as it was, bit by bit."""
        self.save()
        before = {name: part.clone() for name, (part, _) in self.trainer.local_state().parts().items()}
        _spoil(self.trainer.parallel.parts().values())
        self.restore()
        after = self.trainer.local_state().parts()
        return before.keys() == after.keys() and all(torch.equal(before[name], after[name][0]) for name in before)

    def nbytes(self) -> float:
        return float(max(Manifest.read(committed(self.folder)[-1]).files))


class Torch:
    """The same model and optimizer in torch's own form, and torch.distributed.checkpoint as its pages show it."""

    def __init__(self, group: Group, folder: Path, shape: str, zero: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        config = TrainConfig(preset(shape, VOCAB, SEQ_LEN), seq_len=SEQ_LEN, batch_size=2)
        self.model: nn.Module = Transformer(config.model, seed=0, device=group.device)
        if zero:
            mesh = DeviceMesh.from_group(group.process_group, group.device.type)
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        else:
            self.model = nn.parallel.DistributedDataParallel(self.model, process_group=group.process_group)
        self.optimizer = adamw(self.model.named_parameters(), config)
        tokens = torch.randint(VOCAB, (2, SEQ_LEN), device=group.device)
        nll, count = self.model(tokens, targets=tokens)
        (nll / count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.folder, self.group, self.future = folder, group, None

    def _state(self) -> dict[str, dict]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _writer(self) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.folder, overwrite=True)

    def save(self) -> None:
        dcp.save(self._state(), storage_writer=self._writer(), process_group=self.group.process_group)

    def save_in_background(self) -> None:
        state = self._state()
        self.future = dcp.async_save(state, storage_writer=self._writer(), process_group=self.group.process_group)

    def finish(self) -> None:
        self.future.result()

    def restore(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=self.folder, process_group=self.group.process_group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def comes_back(self) -> bool:
        self.save()
        before = [_local(parameter).clone() for parameter in self.model.parameters()]
        _spoil(_local(parameter) for parameter in self.model.parameters())
        self.restore()
        return all(torch.equal(a, _local(b)) for a, b in zip(before, self.model.parameters(), strict=True))

    def nbytes(self) -> float:
        return float(max(path.stat().st_size for path in self.folder.glob("*.distcp")))


def _local(parameter: nn.Parameter) -> Tensor:
    found = parameter.detach()
    return found.to_local() if hasattr(found, "to_local") else found


@torch.no_grad()
def _spoil(parts: Sequence[Tensor]) -> None:
    for part in parts:
        part.fill_(float("nan"))
