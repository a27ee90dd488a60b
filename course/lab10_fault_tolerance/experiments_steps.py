"""Lab 10: steps that go wrong. Losses that a run must not learn from, and steps that are late now and then."""

import time
from statistics import median

import torch

from course.lab10_fault_tolerance.experiments import make
from minillm.train import ParallelConfig
from minillm.train.steptime import Step

SPOILED = {6: float("nan"), 13: 1000.0}  # after so many calls of step(): what the last norm's weights are multiplied by


def spoiled(calls: int = 18) -> list[Step]:
    """Steps of a run that guards against loss spikes and whose weights are spoiled twice."""
    trainer = make(None, ParallelConfig(), spike_nats=1.0)
    trainer.loss_spikes.every = 4
    found = []
    for call in range(calls):
        found.append(trainer.step())
        if call in SPOILED:
            with torch.no_grad():
                trainer.model.norm.weight.mul_(SPOILED[call])
    trainer.close()
    return found


def late_steps(steps: int = 100) -> list[dict[str, float]]:
    """Seconds of each step by part, on an emulated device: a save in every tenth, and one read that takes long."""
    found = []
    for step in range(steps):
        parts = {"input": 0.1 if step == 42 else 0.001, "compute": 0.006, "save": 0.03 if step % 10 == 9 else 0.0}
        for part, seconds in parts.items():
            start = time.perf_counter()
            time.sleep(seconds)
            parts[part] = time.perf_counter() - start
        found.append(parts)
    return found


def causes(steps: list[dict[str, float]], factor: float = 2.0) -> dict[str, int]:
    """How many steps take more than `factor` times the median, by the part that exceeds its own median most."""
    usual = {part: median(step[part] for step in steps) for part in steps[0]}
    most, found = factor * median(sum(step.values()) for step in steps), dict.fromkeys(usual, 0)
    for step in steps:
        if sum(step.values()) > most:
            found[max(usual, key=lambda part: step[part] - usual[part])] += 1
    return found
