"""What a step costs beside the model: scheduling, inputs, greedy sampling, bookkeeping, at 1 to 256 sequences.

Two rows more: prompts of 2,048 tokens, for what long block tables add, and asynchronous scheduling beside plain, for
what its bookkeeping costs the host (what it hides behind a GPU, a CPU cannot show). The model is replaced by one whose
logits lie ready (`ready_model.py`), so that all that is timed is the host's work. The peer is the engine of another
checkout, named by MINILLM_PEER=/path/to/it; without one, this engine again, and the ratio says how far two equal runs
differ.

The last rows sample with top-p from logits over Llama 3's vocabulary: the batched sampler beside the one-by-one
reference, the same tokens but for rounding, whether the nucleus is two tokens or most of the vocabulary.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import torch

import minillm
from minillm.bench import ready_model
from minillm.bench.harness import BenchRow, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.model.draw import Draw
from minillm.serve.requests.params import SamplingParams
from minillm.serve.run.step_inputs import sampling_inputs
from minillm.serve.sample.batch import sample_on_device
from minillm.serve.sample.reference import filtered, sample

SEQUENCES, LONG = (1, 16, 64, 256), (64, 2048)
ROWS, VOCAB, TOP_P = 64, 128_256, 0.9
SPREADS = {"flat": 0.5, "typical": 2.5, "peaked": 8.0}  # standard deviation of the logits


def run(repeats: int = 5, sizes: Sequence[int] = SEQUENCES) -> list[BenchRow]:
    """A row for each number of sequences, in microseconds per step; by default the others, too."""
    check_repeats(repeats)
    here = str(Path(minillm.__file__).parents[1])
    peer = os.environ.get("MINILLM_PEER", here)
    name = "this engine" if peer == here else "another checkout's engine"
    with _engines(here, repeats) as ours, _engines(peer, repeats) as theirs:
        rows = [_engine_row(f"engine overhead, {n} sequences", name, (ours, n), (theirs, n), repeats) for n in sizes]
        if tuple(sizes) == SEQUENCES:
            title = "engine overhead, {} sequences of {:,} tokens".format(*LONG)
            rows.append(_engine_row(title, name, (ours, *LONG), (theirs, *LONG), repeats))
            title, plain = f"asynchronous scheduling, {LONG[0]} sequences", (ours, LONG[0], ready_model.PROMPT)
            rows.append(_engine_row(title, "without it", (*plain, 1), plain, repeats))
            rows += [_sampler_row(kind, spread, repeats) for kind, spread in SPREADS.items()]
    return rows


def _engine_row(title: str, peer: str, ours: tuple, theirs: tuple, repeats: int) -> BenchRow:
    """ours, theirs: an engine, then what `ready_model.microseconds_per_step` takes."""

    def sample(engine: Callable[..., float], *work: int) -> Callable[[], float]:
        return lambda: engine(*work)

    compared = side_by_side(lambda: True, sample(*ours), sample(*theirs), repeats)
    return bench_row(title, peer, compared, "µs per step", scale=1e6)


@contextmanager
def _engines(folder: str, count: int) -> Iterator[Callable[..., float]]:
    """As `_engine`, in so many processes by turns: of equal ones, one may be half as fast again as another."""
    with ExitStack() as stack:
        turns = cycle([stack.enter_context(_engine(folder)) for _ in range(count)])
        yield lambda *work: next(turns)(*work)


@contextmanager
def _engine(folder: str) -> Iterator[Callable[..., float]]:
    """A function that gives seconds per step of the engine in a folder, in one process of its own."""
    command, environment = [sys.executable, ready_model.__file__], os.environ | {"PYTHONPATH": folder}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, stderr=errors, **pipes) as process,
    ):

        def answer() -> str:
            if line := process.stdout.readline():
                return line
            process.wait()
            errors.seek(0)
            said = errors.read().strip().splitlines() or [f"it ended with status {process.returncode}"]
            raise ValueError(f"the engine in {folder} cannot be measured: {said[-1]}")

        def seconds(*work: int) -> float:
            print(*work, file=process.stdin, flush=True)
            return float(answer()) / 1e6

        answer()  # that it is ready
        yield seconds


def _sampler_row(kind: str, spread: float, repeats: int) -> BenchRow:
    """Milliseconds for the next tokens of ROWS sequences."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * spread
    params = SamplingParams(temperature=1.0, top_p=TOP_P)
    kept = int(filtered(logits[0], params, []).isfinite().sum())

    def ours() -> list:
        return sample_on_device(logits, sampling_inputs([(params, [], Draw(seed)) for seed in range(ROWS)])).read()

    def theirs(logits: torch.Tensor = logits) -> list:
        return [sample(logits[seed], params, [], Draw(seed)) for seed in range(ROWS)]

    def check() -> bool:
        """Beside the reference in float64: sums in float32 move a boundary past one random number in a hundred."""
        return sum(mine != its for mine, its in zip(ours(), theirs(logits.double()), strict=True)) <= ROWS // 50

    compared = side_by_side(check, seconds_per_call(ours), seconds_per_call(theirs), repeats)
    title = f"top-p {TOP_P} of {ROWS} x {VOCAB:,} logits, {kind} ({kept:,} kept)"
    return bench_row(title, "one by one", compared, "ms", scale=1e3)
