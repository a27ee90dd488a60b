"""What a schedule makes each rank hold. Orders alone decide it, whatever the durations.

A forward leaves activations behind for its backward. They are held until that backward is done, or, where it is split,
until its second half W is: the weight gradient needs the layer's input too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.parallel.pipeline_parallel.schedule.actions import Place, Schedule


def peak_in_flight(schedule: Schedule) -> list[float]:
    """Per rank: the most microbatches it holds activations of at once, in stages' worth (1 / ranks of the model each).

    With interleaving a chunk's activations count 1 / chunks.
    """
    return [count * schedule.ranks / schedule.num_parts for count in peak_bytes(schedule, 1)]


def peak_bytes(schedule: Schedule, activation: float | Sequence[float]) -> list[float]:
    """Per rank: the most bytes of activations it holds at once.

    activation: bytes that one microbatch leaves in a part of the model, one number for all parts or one for each.
    """
    peaks = []
    for rank in range(schedule.ranks):
        held = peak = 0
        for action in schedule.actions(rank):
            part = schedule.part_of[Place(rank, action.chunk)]
            size = activation[part] if isinstance(activation, Sequence) else activation
            held += size * {"F": 1, "B": -1, "I": 0, "W": -1, "U": 0}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


@dataclass(frozen=True)
class WeightVersions:
    """held: the most versions of its weights a rank has to keep at once; late[microbatch]: how many updates, made from
    earlier microbatches, the weights it met on this rank did not have yet."""

    held: int
    late: tuple[int, ...]


def weight_versions(schedule: Schedule) -> list[WeightVersions]:
    """Per rank, if every microbatch goes back through the weights it came through (PipeDream's weight stashing).

    Schedules without updates of their own are updated after their last action, all microbatches at once: one version.
    """
    found = []
    for rank in range(schedule.ranks):
        now, held, met, late = 0, 1, {}, {}
        asynchronous = any(action.kind == "U" for action in schedule.actions(rank))
        for action in schedule.actions(rank):
            key = action.microbatch, action.chunk
            if action.kind == "F":
                met[key] = now
                late[action.microbatch] = action.microbatch - now if asynchronous else 0
            elif action.kind in "BI":  # a W needs activations and gradients, not the weights
                del met[key]
            elif action.kind == "U":
                now += 1
            held = max(held, len({now, *met.values()}))
        found.append(WeightVersions(held, tuple(late[microbatch] for microbatch in sorted(late))))
    return found
