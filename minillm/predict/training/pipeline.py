"""What a pipeline costs, before anyone runs it: idle time, activations in flight, messages and their bytes.

Symbols: n = stages (ranks), s = stage (0 .. n-1), M = microbatches per step, v = chunks of the model per rank,
F = a stage's forward of one microbatch, B = its whole backward, W = the part of B that computes weight gradients,
I = B - W (seconds, or any unit). All stages take the same time unless said otherwise, and messages take none.

    GPipe and 1F1B, n = 3, M = 4, F = B = 1             idle per rank: (n - 1)(F + B), the *bubble*
    F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3                 work per rank: M(F + B)
    .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..                 idle share = bubble / (work + bubble) = (n - 1) / (M + n - 1)
    .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

Sources: Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019) and "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM" (2021); Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Idle time.


def idle_share(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Share of the step in which a rank computes nothing: (n-1)/(vM+n-1). GPipe and 1F1B alike (v = 1), or interleaved.

    4 stages, 8 microbatches: 3/11 = 27 %; with 2 chunks 3/19 = 16 %.
    """
    _check(stages=stages, microbatches=microbatches, chunks=chunks)
    return (stages - 1) / (chunks * microbatches + stages - 1)


def overhead(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time over *useful* time: (n-1)/(vM). Often printed as the idle share, which it exceeds; it can pass 1."""
    _check(stages=stages, microbatches=microbatches, chunks=chunks)
    return (stages - 1) / (chunks * microbatches)


def microbatches_needed(stages: int, most_idle: float, chunks: int = 1) -> int:
    """Least M with idle_share <= most_idle: (n-1)(1-x)/(xv), rounded up. For x = 1/4 that is 3(n-1), not 4n."""
    _check(stages=stages, chunks=chunks)
    if not 0 < most_idle < 1:
        raise ValueError(f"most_idle is {most_idle}; it is a share between 0 and 1, both excluded")
    return max(1, math.ceil((stages - 1) * (1 - most_idle) / (most_idle * chunks) - 1e-9))  # 1e-9: rounding


def makespan(stages: int, microbatches: int, forward: float, backward: float, chunks: int = 1) -> float:
    """Time of a step: M(F+B) of work and (n-1)(F+B)/v of bubble."""
    _check(stages=stages, microbatches=microbatches, chunks=chunks)
    return (microbatches + (stages - 1) / chunks) * (forward + backward)


def uneven_makespan(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """GPipe with one F and one B per stage: sum(F) + sum(B) + (M-1)(max F + max B).

    The first microbatch passes through every stage; each later one comes out one slowest stage's time after it. So the
    slowest stage sets the pace, and all others idle.
    """
    _check(stages=_same_length(forward, backward), microbatches=microbatches)
    return sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))


def zero_bubble_idle(stages: int, forward: float, backward: float, weight: float) -> float:
    """Idle time of each rank under ZB-H1, M >= n: (n-1) max(F+I-W, F, I); against (n-1)(F+I+W) without the split.

    From one rank to the next the schedule shifts by one F on the way down and one I on the way back; one W fills it.
    F = I = W: a third of 1F1B's. The paper prints (n-1)(F+I-W), which holds while W is no longer than F and I.
    """
    _check(stages=stages)
    wait = backward - weight
    return (stages - 1) * max(forward + wait - weight, forward, wait)


def zero_bubble_v_idle(stages: int, chunk_forward: float) -> float:
    """Idle time of each rank under ZB-V if F = I = W, M >= 2n-1: n-1 forwards of one *chunk*, half a stage each.

    It lies before a rank's first action and after its last: steps that follow each other without a pause have none.
    """
    _check(stages=stages)
    return (stages - 1) * chunk_forward


def dualpipe_idle(stages: int, forward: float, backward: float, weight: float) -> float:
    """Idle time of each rank under DualPipe if F, I and W are about equal, M >= 4n: (n/2-1)(F+B-2W).

    A forward beside a backward is counted as one after the other. DeepSeek prints (n/2-1)(F&B+B-3W) for pairs that run
    as one action, whose two results come out only when both are done.
    """
    _check(stages=stages)
    return (stages // 2 - 1) * (forward + backward - 2 * weight)


# What a rank holds.


def in_flight_gpipe(microbatches: int) -> int:
    """Microbatches whose activations every stage holds at its peak: all M."""
    return microbatches


def in_flight_1f1b(stages: int, stage: int, microbatches: int) -> int:
    """Peak of stage s: min(n-s, M). The first stage holds n stages' worth: a pipeline does not cut its activations."""
    _check(stages=stages, microbatches=microbatches, stage=stage)
    return min(stages - stage, microbatches)


def in_flight_interleaved(stages: int, chunks: int, microbatches: int, stage: int = 0) -> float:
    """Peak of stage s in stages' worth of one microbatch: ((v-1)n + 2(n-1-s) + 1)/v, at most M.

    s = 0: n(1 + (n-1)/(nv)), more than 1F1B's n (Narayanan et al. 2021, section 2.2).
    """
    _check(stages=stages, microbatches=microbatches, chunks=chunks, stage=stage)
    return min((chunks - 1) * stages + 2 * (stages - 1 - stage) + 1, chunks * microbatches) / chunks


def in_flight_zero_bubble(stages: int, microbatches: int) -> int:
    """Peak of every stage under ZB-H1 and ZB-V (M >= 2n-1 for the latter): min(n, M), 1F1B's first stage's."""
    _check(stages=stages, microbatches=microbatches)
    return min(stages, microbatches)


def in_flight_dualpipe(stages: int) -> int:
    """Peak of every rank under DualPipe, M >= 4n: n + 1."""
    return stages + 1


def parameter_copies(schedule: str) -> int:
    """How often the model exists in one pipeline: twice under DualPipe, whose ranks hold two stages, else once."""
    return 2 if schedule == "dualpipe" else 1


def weight_versions(stages: int, stage: int) -> int:
    """Versions of its weights that stage s keeps in an asynchronous pipeline (PipeDream), M >= 2n: n-s. Else: 1."""
    _check(stages=stages, stage=stage)
    return stages - stage


def staleness(stages: int, stage: int) -> int:
    """How many updates late, in PipeDream, the weights are that a microbatch meets at stage s: n-1-s. Synchronous
    schedules: 0."""
    return weight_versions(stages, stage) - 1


# What travels.


def sends(stages: int, microbatches: int, chunks: int = 1) -> int:
    """Messages of all ranks per step: 2M(nv-1), one activation and one gradient across each border of two chunks.

    A single stage sends nothing. ZB-V: 4M(n-1), since its turning point needs no message.
    """
    _check(stages=stages, microbatches=microbatches, chunks=chunks)
    return 2 * microbatches * (stages * chunks - 1) if stages > 1 else 0


def sent_bytes(stages: int, batch: int, seq_len: int, hidden_size: int, itemsize: int, chunks: int = 1) -> int:
    """Bytes that all ranks send per step: 2(nv-1)·batch·seq_len·hidden_size·itemsize.

    batch: sequences per step, all microbatches together. Neither their number nor the layers matter.
    """
    _check(stages=stages, chunks=chunks)
    borders = stages * chunks - 1 if stages > 1 else 0
    return 2 * borders * batch * seq_len * hidden_size * itemsize


def _same_length(forward: Sequence[float], backward: Sequence[float]) -> int:
    if len(forward) != len(backward):
        raise ValueError(f"{len(forward)} forward and {len(backward)} backward times: give one of each per stage")
    return len(forward)


def _check(stages: int, stage: int = 0, **counts: int) -> None:
    for name, count in {"stages": stages, **counts}.items():
        if count < 1:
            raise ValueError(f"{name} is {count}: a pipeline has at least one")
    if not 0 <= stage < stages:
        raise ValueError(f"stage is {stage}; with {stages} stages it lies in 0..{stages - 1}")
