"""The process that tries candidates: a request in JSON on each line of its input, a verdict on each line of its output.

    {"exercise": ..., "text": the cell, "seeds": [...], "limit_s": ...}
    {"status": "passed" | "failed" | "hangs", "message": ..., "passes": of how many seeds, "seconds": of this process}

A candidate that takes too long is interrupted by an alarm: after `limit_s` of computing here (a loop without an end,
however busy the machine is), or WAITS times as long by the clock (a wait for a rank that never answers). One that the
alarm does not reach is the parent's to kill, with this whole process. What candidates print goes nowhere.
"""

import json
import linecache
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from course.kit import checks, exercises
from course.kit.answers import EDITED, answers_of

WAITS = 10
MOST_BYTES = 24 * 2**30  # of address space, which torch takes more of than it uses


class _TooLong(BaseException):
    """No answer's `except Exception` catches it."""


def main() -> None:
    with os.fdopen(os.dup(1), "w") as replies:
        _silence()
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        for line in sys.stdin:
            replies.write(json.dumps(tried(**json.loads(line))) + "\n")
            replies.flush()


def tried(exercise: str, text: str, seeds: list[int], limit_s: float) -> dict:
    """The verdict on a candidate; later seeds are for those that pass with the first."""
    known = exercises.find(exercise)
    assert known.reference is not None  # its imports are no part of what a candidate takes
    began, passes, outcome = time.process_time(), 0, None
    try:
        with _alarm(limit_s):
            answer = _built(exercise, text)
    except (Exception, _TooLong) as error:
        return {"status": "failed", "message": f"does not run: {error}", "passes": 0, "seconds": 0.0}
    for place, seed in enumerate(seeds):
        try:
            with _alarm(limit_s):
                outcome = checks.verify(known, answer, seed)
        except _TooLong:
            return _verdict("hangs", f"longer than {limit_s:.0f} s", passes, began)
        except Exception as error:  # the verifier itself, or SystemExit's like
            return _verdict("failed", f"the check stopped: {type(error).__name__}: {error}", passes, began)
        passes += outcome.status == "passed"
        if place == 0 and not passes:
            break
    return _verdict("passed" if passes else "failed", outcome.message, passes, began)


def _verdict(status: str, message: str, passes: int, began: float) -> dict:
    return {"status": status, "message": message, "passes": passes, "seconds": time.process_time() - began}


def _built(exercise: str, text: str) -> object:
    """What the master hands to the check with this cell; its lines are known to tracebacks and inspect."""
    answers = answers_of(exercises.find(exercise).lab)
    file, first = answers.place(exercise)
    lines = ["\n"] * first + text.splitlines(keepends=True)
    linecache.cache[f"{file}{EDITED}"] = (sum(map(len, lines)), None, lines, f"{file}{EDITED}")
    return answers.rewritten(exercise, text)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLong

    alarms = ((signal.ITIMER_REAL, signal.SIGALRM, WAITS * seconds), (signal.ITIMER_PROF, signal.SIGPROF, seconds))
    for timer, number, after in alarms:
        signal.signal(number, stop)
        signal.setitimer(timer, after, 1.0)
    try:
        yield
    finally:
        for timer, number, _ in alarms:
            signal.setitimer(timer, 0)
            signal.signal(number, signal.SIG_IGN)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


if __name__ == "__main__":
    main()
