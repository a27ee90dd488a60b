"""What a step costs beside the model: scheduling, inputs, greedy sampling, bookkeeping, at 1 to 256 sequences.

The model is replaced by one whose logits lie ready (`ready_model.py`), so that all that is timed is the host's work.
The peer is the engine of another checkout, named by MINILLM_PEER=/path/to/it; without one, this engine again, and the
ratio says how far two equal runs differ.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import minillm
from minillm.bench import ready_model
from minillm.bench.harness import BenchRow, bench_row, check_repeats, side_by_side

SEQUENCES = (1, 16, 64, 256)


def run(repeats: int = 5, sizes: Sequence[int] = SEQUENCES) -> list[BenchRow]:
    """A row for each number of sequences, in microseconds per step."""
    check_repeats(repeats)
    here = str(Path(minillm.__file__).parents[1])
    peer = os.environ.get("MINILLM_PEER", here)
    name = "this engine" if peer == here else "another checkout's engine"
    found = []
    for number in sizes:
        ours, theirs = (lambda n=number, folder=folder: _measure(folder, n) for folder in (here, peer))
        compared = side_by_side(lambda: True, ours, theirs, repeats)
        found.append(bench_row(f"engine overhead, {number} sequences", name, compared, "µs per step", scale=1e6))
    return found


def _measure(folder: str, sequences: int) -> float:
    """Seconds per step, in a process of its own."""
    command = [sys.executable, ready_model.__file__, str(sequences)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the engine in {folder} cannot be measured: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout) / 1e6
