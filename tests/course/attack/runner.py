"""Runs candidates in worker processes and keeps every verdict in a file, so that a run that stops goes on where it was.

A verdict counts for a text of the answer, a seed and the files of the check: change any of them and it is tried anew.
"""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from course.kit import course, exercises
from tests.course.attack.cells import Candidate, cell_of
from tests.course.attack.cheats import HELPERS, Call, cheats
from tests.course.attack.mutants import mutants
from tests.course.attack.variants import variants

RECORDED = 990  # the seed of the run that tells what the check's cases are
CONFIRMATIONS = 2  # further seeds for what passes
LEAST_LIMIT_S = 0.8  # of computing
SLOWER = 8.0  # a candidate may compute so many times as long as the right answer
RIGHT_S = 120.0  # what is right may compute so long, in a process that has kept nothing from earlier runs
NOT_CHECKS = ("mistakes", "figures", "receipts", "notebook", "torchrun")


@dataclass(frozen=True)
class Verdict:
    """How a candidate fared. passes: of 1 + CONFIRMATIONS seeds, or 0 if the first refused it."""

    exercise: str
    kind: str
    edit: str
    digest: str
    status: str
    message: str
    passes: int
    seconds: float

    @property
    def key(self) -> tuple[str, str]:
        return self.exercise, self.edit

    @property
    def right(self) -> bool:
        """Whether the check was right: it refuses mutants and cheats, and always accepts a variant."""
        return self.passes >= 1 + CONFIRMATIONS if self.kind == "variant" else self.passes == 0


class Worker:
    """One process that tries candidates; killed with all that it started when it does not answer in time."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
        self._process = None

    def tried(self, exercise: str, text: str, seeds: list[int], limit_s: float) -> dict:
        """The worker's answer, or what became of it."""
        if self._process is None:
            self._process = _started()
        request = {"exercise": exercise, "text": text, "seeds": seeds, "limit_s": limit_s}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        # A first request also waits for the imports.
        ready, _, _ = select.select([self._process.stdout], [], [], 60 + 20 * limit_s * len(seeds))
        line = self._process.stdout.readline() if ready else b""
        if line:
            return json.loads(line)
        self.stop()
        return {
            "status": "hangs" if not ready else "failed",
            "message": "killed" if not ready else "the process died",
            "passes": 0,
            "seconds": limit_s,
        }


def candidates(exercise: str, worker: Worker, seed: int) -> tuple[list[Candidate], float]:
    """All of an exercise, and for how many seconds its check runs on the right answer, once it has run before."""
    cell = cell_of(exercise)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "calls")
        names = (
            ""
            if "tl." in cell.text
            else "\n".join(
                f"{function.name} = _wrappers.recorded({function.name}, {str(log)!r})" for function in cell.functions
            )
        )
        text = cell.prepared("variant", "recorded", before=HELPERS, change=names).text
        worker.tried(exercise, text, [RECORDED], RIGHT_S)  # not all checks stand the recording
        worker.tried(exercise, cell.text, _seeds(seed), RIGHT_S)  # what a check keeps is in no candidate's time
        reply = worker.tried(exercise, cell.text, [RECORDED], RIGHT_S)
        if reply["status"] != "passed":
            raise RuntimeError(f"the course's own answer to '{exercise}' does not pass: {reply['message']}")
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    calls = [Call(**json.loads(line)) for line in dict.fromkeys(lines)]
    return [*mutants(cell), *cheats(cell, calls), *variants(cell, calls)], reply["seconds"]


def attack(lab: str, state: Path, seed: int, worker: Worker, only: Iterable[str] = ()) -> Iterator[Verdict]:
    """The verdict on every candidate of a lab's exercises."""
    known = {verdict.digest: verdict for verdict in read(state)}
    for exercise in [each.name for each in exercises.all_exercises(lab)]:
        if only and exercise not in only:
            continue
        found, seconds = candidates(exercise, worker, seed)
        most_s = limit_s(seconds)
        for candidate in found:
            digest = _digest(candidate, seed)
            if digest not in known:
                known[digest] = verdict_on(candidate, seed, most_s, worker, digest)
                _append(state, known[digest])
            yield known[digest]


def limit_s(seconds: float) -> float:
    """How long a candidate may compute where the right answer takes `seconds`."""
    return max(LEAST_LIMIT_S, SLOWER * seconds)


def verdict_on(candidate: Candidate, seed: int, most_s: float, worker: Worker, digest: str = "") -> Verdict:
    """Tried in the worker; a variant that is refused is tried again in a fresh process, with more time."""
    for most in (most_s, RIGHT_S):
        reply = worker.tried(candidate.exercise, candidate.text, _seeds(seed), most)
        verdict = Verdict(candidate.exercise, candidate.kind, candidate.edit, digest, **reply)
        if verdict.right or candidate.kind != "variant":
            break
        worker.stop()
    return verdict


def _seeds(seed: int) -> list[int]:
    return [seed + 1000 * more for more in range(1 + CONFIRMATIONS)]


def read(state: Path) -> list[Verdict]:
    """The verdicts so far; a last line that was cut off is left out."""
    if not state.exists():
        return []
    lines = state.read_text(encoding="utf-8").split("\n")[:-1]
    return [Verdict(**json.loads(line)) for line in lines]


def _append(state: Path, verdict: Verdict) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")


def _digest(candidate: Candidate, seed: int) -> str:
    parts = (candidate.exercise, candidate.kind, candidate.edit, candidate.text, str(seed), _checks(candidate.exercise))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@cache
def _checks(exercise: str) -> str:
    """What the verdict of an exercise's check depends on: its lab's Python but for texts, and what labs share."""
    folder = course.folders(course.home())[exercises.find(exercise).lab]
    paths = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith(NOT_CHECKS)]
    paths += sorted((course.home() / "course" / "shared").glob("*.py"))
    paths += [course.home() / "course" / "kit" / name for name in ("checks.py", "untouched.py")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _started() -> subprocess.Popen:
    environment = os.environ | {"MINILLM_STRICT": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(course.home())}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.course.attack.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=course.home(),
        env=environment,
        start_new_session=True,
    )
