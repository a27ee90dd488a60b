"""What a step costs beside the model: scheduling, inputs, greedy sampling, bookkeeping, at 1 to 256 sequences.

A last row has prompts of 2,048 tokens: what long block tables add.

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

SEQUENCES, LONG = (1, 16, 64, 256), (64, 2048)


def run(repeats: int = 5, sizes: Sequence[int] = SEQUENCES) -> list[BenchRow]:
    """A row for each number of sequences, in microseconds per step."""
    check_repeats(repeats)
    here = str(Path(minillm.__file__).parents[1])
    peer = os.environ.get("MINILLM_PEER", here)
    name = "this engine" if peer == here else "another checkout's engine"
    found = []
    rows = {f"engine overhead, {number} sequences": (number,) for number in sizes}
    if tuple(sizes) == SEQUENCES:
        rows["engine overhead, {} sequences of {:,} tokens".format(*LONG)] = LONG
    for title, work in rows.items():
        ours, theirs = (lambda work=work, folder=folder: _measure(folder, *work) for folder in (here, peer))
        compared = side_by_side(lambda: True, ours, theirs, repeats)
        found.append(bench_row(title, name, compared, "µs per step", scale=1e6))
    return found


def _measure(folder: str, *work: int) -> float:
    """Seconds per step, in a process of its own. work: sequences, tokens of a prompt."""
    command = [sys.executable, ready_model.__file__, *map(str, work)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the engine in {folder} cannot be measured: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout) / 1e6
