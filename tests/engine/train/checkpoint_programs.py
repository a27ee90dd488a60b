"""What ranks run in the tests of checkpoints: one launch saves in many layouts and restores each in all others."""

import copy
import errno
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch

from minillm.data import Tokens
from minillm.measure.ledger import ledger
from minillm.model import ModelConfig
from minillm.model.config import MoEConfig
from minillm.train import SingleDevice, TrainConfig, Trainer
from minillm.train.checkpoint import reader, shares
from minillm.train.checkpoint.manifest import committed
from minillm.train.checkpoint.reader import has_checkpoint, read_whole, restore
from minillm.train.checkpoint.writer import Checkpointer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

MODEL = ModelConfig(53, 16, 30, 4, 4, 2, max_seq_len=16, tie_embeddings=True, qk_norm=True)  # sizes do not divide
EXPERTS = replace(MODEL, moe=MoEConfig(4, 2, 8, bias_update_rate=0.01))  # whose routers' biases are buffers
WINDOWS = 12  # of a step, on any number of ranks up to 4
LAYOUTS = [
    ParallelConfig(dp=2, tp=2, zero=3),
    ParallelConfig(dp=3, zero=1),
    ParallelConfig(dp=2, pp=2, accumulate=2, schedule="zero_bubble_v"),  # a tied embedding twice on one rank
    ParallelConfig(tp=4),  # two ranks for each of the kv heads
    ParallelConfig(dp=4, zero=3, dp_replicate=2),
    ParallelConfig(dp=1),
    ParallelConfig(dp=4),
    ParallelConfig(dp=2, zero=2),
    ParallelConfig(dp=4, zero=3),
    ParallelConfig(dp=2, cp=2, zero=1),
    ParallelConfig(cp=4),
    ParallelConfig(dp=2, tp=2, sequence=True),
    ParallelConfig(dp=2, pp=2, accumulate=2, zero=3),
    ParallelConfig(pp=2, tp=2, accumulate=2, schedule="dualpipe"),
]
EXPERT_LAYOUTS = [
    ParallelConfig(dp=4, ep=2, zero=3),
    ParallelConfig(dp=2, ep=2, tp=2, zero=1),
    ParallelConfig(dp=2, pp=2, accumulate=2),
    ParallelConfig(dp=1),
]


def tokens() -> Tokens:
    return Tokens((np.arange(3000) ** 2 % 53).astype(np.uint16), 53, 0, 1, 9000)


def trainer(parallel=None, precision="fp32", model=MODEL, device="cpu", **options) -> Trainer:
    options = {"seq_len": 16, "batch_size": 4, "steps": 9, "lr": 1e-2} | options
    config = TrainConfig(model, precision=precision, **options)
    return Trainer(config, tokens(), workers=0, parallel=parallel, device=device)


def through_all(group, folder: Path, layouts, precision, model=MODEL):
    """From one process to each layout, and from each to all: (from, to, names that differ, read / held, file bytes)."""
    torch.set_num_threads(1)
    shares.SPLIT_FROM = 16  # so that replicas share the writing of this model's tensors too
    groups = {n: group.subgroup(list(range(n)), f"first {n}") for n in range(1, group.world_size)}
    groups[group.world_size] = group
    alone = trainer(SingleDevice(), precision, model, group.device, batch_size=1, accumulate=WINDOWS)
    for _ in range(2):
        alone.step()
    for part in alone.local_state().tensors.values():
        group.broadcast(part)  # GPUs may round differently
    whole = {name: part.clone() for name, part in alone.local_state().tensors.items()}
    numbers = alone.local_state().numbers()
    if group.rank == 0:
        Checkpointer(folder / "start").save(alone)
    group.barrier()
    trainers = {}
    for index, layout in enumerate(layouts):
        if group.rank < layout.world_size:
            strategy = make_strategy(groups[layout.world_size], layout)
            microbatches = WINDOWS // layout.dp
            trainers[index] = trainer(strategy, precision, model, group.device, batch_size=1, accumulate=microbatches)
            restore(trainers[index], folder / "start")
            saver = Checkpointer(folder / str(index), groups[layout.world_size], background=index % 2 == 0)
            saver.save(trainers[index])
            saver.finish()
        group.barrier()
    found = []
    for source in range(len(layouts)):
        for target, ours in trainers.items():
            _spoil(ours)
            done = restore(ours, folder / str(source))
            local = ours.local_state()
            wrong = [name for name, (part, at) in local.parts().items() if not torch.equal(part, at.cut(whole[name]))]
            mine = local.numbers()
            wrong += [name for name, counted in mine["counted"].items() if counted != numbers["counted"][name]]
            wrong += ["groups"] if _settings(mine) != _settings(numbers) else []
            wrong += ["steps"] if (ours.steps_done, ours.loader.position) != (2, 2 * WINDOWS) else []
            found.append((source, target, wrong, done.bytes_read, done.bytes_held, len(local.tensors)))
        group.barrier()
    return found


def _settings(numbers: dict) -> list[str]:
    return [str({key: value for key, value in group.items() if key != "params"}) for group in numbers["groups"]]


@torch.no_grad()
def _spoil(ours: Trainer) -> None:
    for part in ours.parallel.parts().values():
        part.fill_(float("nan"))
    for buffer in ours.parallel.buffers().values():
        buffer.fill_(float("nan"))
    ours.steps_done = 0


def saves_in_a_row(group, folder: Path) -> dict[str, object]:
    """Background saves of replicas, of which one fails. Of each: the checkpoint, names that differ from what the
    trainer held, and this rank's collectives while training waited."""
    torch.set_num_threads(1)
    shares.SPLIT_FROM, found = 16, {}
    parallel = make_strategy(group, ParallelConfig(dp=group.world_size))
    ours = trainer(parallel, batch_size=1, accumulate=WINDOWS // group.world_size, steps=40)
    killed = folder / "checkpoints/.save-0001-step-1"  # of a job that was killed when all ranks had left their notes
    if group.rank == 0:
        killed.mkdir(parents=True)
        [(killed / f"rank-{rank:04d}.json").write_text('{"error": "an old note"}') for rank in range(group.world_size)]
    group.barrier()
    saver, lost = Checkpointer(folder, group, background=True), {}

    def save(name: str, before: Callable[[], object] = lambda: None) -> None:
        ours.step()
        before()
        with ledger() as led:
            saver.save(ours)
        state = {name: part.clone() for name, part in ours.local_state().tensors.items()}
        ours.optimizer.state.update(lost)
        lost.clear()
        ours.step()  # while the save is written
        saver.finish()
        whole = read_whole(committed(folder)[-1])[1]
        wrong = [name for name, part in state.items() if not torch.equal(part, whole[name])]
        found[name] = (committed(folder)[-1].name, wrong, [(event.op, event.shape) for event in led.events])
        group.barrier()

    def forget(*ranks: int) -> None:
        """Their moments of the first weight, as of an expert that has seen no token there."""
        weight = next(iter(ours.model.parameters()))
        if group.rank in ranks:
            lost[weight] = ours.optimizer.state.pop(weight)

    def roll_back(*ranks: int) -> None:
        forget(*ranks)
        ours._unlearn(copy.deepcopy(ours._learnt()))

    def no_room() -> None:
        if group.rank == 1:
            saver._write_parts = _no_room

    save("first")
    save("same parts")
    for lacking in ((1,), (0, 1)):
        save(f"rolled back, {lacking} without moments", lambda: roll_back(*lacking))  # noqa: B023
        save(f"they came to {lacking}")
        save(f"after they came to {lacking}")
    for name, spoil in {"parts gone": lambda: forget(1), "full disk": no_room}.items():
        try:
            save(name, spoil)
        except OSError as error:
            found[name] = str(error)
        vars(saver).pop("_write_parts", None)
        restore(ours, folder)  # the rank has again what the other one had
        group.barrier()
    save("room again")
    return found | {"left": sorted(path.name for path in saver.folder.iterdir())}


def restored_together(group, folder: Path) -> tuple[int, list[str | None]]:
    """Restores of replicas: of how many bytes this rank has computed the checksum; then what it says to a flipped bit,
    and to the same bit flipped back, for some bits of each file."""
    torch.set_num_threads(1)
    shares.SPLIT_FROM, checked, said, draw = 16, [], [], Random(0)
    ours = _spread(group, ParallelConfig(dp=group.world_size))
    ours.step()
    Checkpointer(folder, group).save(ours)
    reader.crc32 = lambda data: checked.append(len(data)) or zlib.crc32(data)
    restore(ours, folder)
    first = sum(checked)
    for path in sorted(committed(folder)[-1].glob("*.bin")) * 4:
        at, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        for _ in range(2):
            group.barrier()
            if group.rank == 0:
                data = bytearray(path.read_bytes())
                data[at] ^= bit
                path.write_bytes(data)
            group.barrier()
            try:
                restore(ours, folder)
                said.append(None)
            except ValueError as error:
                said.append(str(error))
    return first, said


LONG = 4000  # steps, more than any attempt takes


def losses(steps: int) -> list[str]:
    """Of a run that nobody kills, bit by bit."""
    ours = trainer(steps=LONG)
    return [ours.step().loss.hex() for _ in range(steps)]


def train_and_save(folder: Path, background: bool) -> None:
    """Goes on with the run, if there is one, and saves after every step, until it is killed. Logs losses."""
    torch.set_num_threads(1)
    ours = trainer(steps=LONG)
    if has_checkpoint(folder):
        restore(ours, folder)
    saver = Checkpointer(folder, background=background)
    with (folder / "losses").open("a") as log:
        while ours.steps_done < LONG:
            step = ours.step()
            log.write(f"{step.step} {step.loss.hex()}\n")
            log.flush()
            saver.save(ours)


def _spread(group, layout: ParallelConfig) -> Trainer:
    return trainer(make_strategy(group, layout), batch_size=1, accumulate=WINDOWS // layout.dp)


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
