"""A step as one row of numbers, and its way from rank 0 to the others: one small message for each.

    │ length │ what it is │ lengths of its arrays │ tokens │ starts │ counts │ ...        int64; floats by their bits

The first message has a fixed size, in which a step of some hundred decoding sequences fits; a longer one, of a prompt,
is followed by its rest. No collective carries them: on the CPU's own connections such a message takes a third of the
time of a broadcast, and ranks on GPUs must read it on the host while the device still computes.
"""

from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist

from minillm.comm import Group
from minillm.serve.run.penalties import Penalties
from minillm.serve.run.step_inputs import SamplingInputs, StepInputs

FIRST = 1024  # numbers of the first message
# In place of a length: there are no more steps; rank 0 is there and has none; a number is asked of every rank.
END, BEAT, REPORT = -1, 0, -2
OF_STEP = tuple(field.name for field in fields(StepInputs) if field.type in (np.ndarray, np.ndarray | None))
OF_SAMPLING = tuple(field.name for field in fields(SamplingInputs) if field.type == np.ndarray | None)
OF_PENALTIES = tuple(field.name for field in fields(Penalties))
HEAD = 4 + len(OF_STEP) + len(OF_SAMPLING) + len(OF_PENALTIES)  # numbers before the arrays


def to_numbers(step: StepInputs) -> np.ndarray:
    """[n] int64."""
    sampling = step.sampling
    penalties = None if sampling is None else sampling.penalties
    arrays = [getattr(step, name) for name in OF_STEP]
    arrays += [getattr(sampling, name, None) for name in OF_SAMPLING]  # None has none of them
    arrays += [getattr(penalties, name, None) for name in OF_PENALTIES]
    head = [step.hidden, step.largest_only, -1 if sampling is None else sampling.count, penalties is not None]
    head += [-1 if array is None else 2 * array.size + (array.dtype == np.float64) for array in arrays]
    there = [array.reshape(-1).view(np.int64) for array in arrays if array is not None]
    return np.concatenate([np.array(head, np.int64), *there])


def from_numbers(numbers: np.ndarray) -> StepInputs:
    hidden, largest_only, count, has_penalties, *sizes = numbers[:HEAD].tolist()
    arrays: list[np.ndarray | None] = []
    start = HEAD
    for size in sizes:
        if size < 0:
            arrays.append(None)
            continue
        array = numbers[start : start + size // 2]
        arrays.append(array.view(np.float64) if size % 2 else array)
        start += size // 2
    of_step = dict(zip(OF_STEP, arrays, strict=False))
    of_sampling = dict(zip(OF_SAMPLING, arrays[len(OF_STEP) :], strict=False))
    penalties = Penalties(*arrays[-len(OF_PENALTIES) :]) if has_penalties else None
    sampling = None if count < 0 else SamplingInputs(count, penalties=penalties, **of_sampling)
    of_step["moves"] = of_step["moves"].reshape(-1, 3)
    return StepInputs(**of_step, hidden=bool(hidden), sampling=sampling, largest_only=bool(largest_only))


class Channel:
    """From rank 0 of a group to the others. On GPUs the ranks make a group on the CPU for it, so every rank makes one.

    told: messages that were sent or heard; numbers: of the steps in them.
    """

    def __init__(self, group: Group) -> None:
        self.group = group if group.backend == "gloo" and group.device.type == "cpu" else _on_cpu(group)
        self.group.connect()
        self.told = self.numbers = 0

    def tell(self, numbers: np.ndarray) -> None:
        """A step, as numbers. Returns when it has left."""
        self._send(len(numbers), numbers)
        self.numbers += len(numbers)

    def tell_sign(self, sign: int) -> None:
        """END, BEAT or REPORT."""
        self._send(sign, np.zeros(0, np.int64))

    def hear(self) -> np.ndarray | int:
        """The next step, as numbers; END, BEAT or REPORT."""
        first = torch.empty(FIRST, dtype=torch.int64, device="cpu")
        self.group.exchange(recv=(first, 0), eager=True)
        self.told += 1
        length, numbers = int(first[0]), first[1:]
        if length <= 0:
            return length
        self.numbers += length
        if length > len(numbers):
            rest = torch.empty(length - len(numbers), dtype=torch.int64, device="cpu")
            self.group.exchange(recv=(rest, 0), eager=True)
            numbers = torch.cat((numbers, rest))
        return numbers[:length].numpy()

    def answer(self, number: float) -> None:
        """What REPORT has asked for."""
        self.group.exchange(send=(torch.tensor([number], dtype=torch.float64, device="cpu"), 0), eager=True)

    def answers(self) -> list[float]:
        """On rank 0: what the others answer, in rank order."""
        numbers = torch.empty(self.group.world_size - 1, 1, dtype=torch.float64, device="cpu")
        for rank, number in enumerate(numbers, 1):
            self.group.exchange(recv=(number, rank), eager=True)
        return numbers.flatten().tolist()

    def close(self, group: Group) -> None:
        """Lets go of a group that was made for it. group: what it was made from."""
        if self.group is not group:
            self.group.world.close()

    def _send(self, length: int, numbers: np.ndarray) -> None:
        row = np.zeros(max(FIRST, 1 + len(numbers)), np.int64)
        row[0], row[1 : 1 + len(numbers)] = length, numbers
        others = range(1, self.group.world_size)
        for part in (row[:FIRST], row[FIRST:]):
            if len(part) and len(others):
                self.group.exchange(send=[(torch.from_numpy(part), rank) for rank in others], eager=True)
        self.told += 1


def _on_cpu(group: Group) -> Group:
    """The same ranks, on the CPU."""
    process_group = dist.new_group(group.ranks, timeout=group.world.timeout, backend="gloo")
    seconds = group.world.timeout.total_seconds()
    return Group.from_process_group(process_group, f"{group.name}: steps", "cpu", seconds)
