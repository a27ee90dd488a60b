"""Attack the exercises: every mutant and cheat must be refused, every right variant must pass.

    python -m tests.course.attack              every lab; goes on where an earlier run stopped
    python -m tests.course.attack 12 13        these labs
    python -m tests.course.attack --only nucleus --seed 7

Verdicts are kept in build/attack.jsonl. Prints what the checks got wrong and is not in survivors.txt, then a table by
lab; the exit status is 1 if there is any.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from course.kit import course, exercises
from tests.course.attack import runner, table

UNEXPLAINED = "(raised where the check used what your code returned)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.course.attack", description=__doc__.splitlines()[0])
    parser.add_argument("labs", nargs="*", help="numbers or names; none means all")
    parser.add_argument("--seed", type=int, default=1, help="what the checks draw (default 1)")
    parser.add_argument("--only", nargs="+", default=(), metavar="EXERCISE")
    parser.add_argument("--state", type=Path, default=course.home() / "build" / "attack.jsonl")
    parser.add_argument("--unexplained", action="store_true", help="also list refusals whose message names no cause")
    options = parser.parse_args(arguments)
    labs = course.pick(options.labs, sorted({exercise.lab for exercise in exercises.all_exercises()}))
    entries, wrong, began = table.read(), [], time.monotonic()
    with runner.Worker() as worker:
        for lab in labs:
            counts = Counter()
            for verdict in runner.attack(lab, options.state, options.seed, worker, options.only):
                counts[verdict.kind] += 1
                if options.unexplained and UNEXPLAINED in verdict.message:
                    print(f"?\t{verdict.exercise}\t{verdict.edit}\t{verdict.message[:150]!r}", flush=True)
                if verdict.right:
                    continue
                known = table.excused(entries, verdict.kind, verdict.key)
                counts["in the table" if known else "open"] += 1
                if not known:
                    wrong.append(verdict)
                    said = f": {verdict.message[:150]!r}" if verdict.kind == "variant" else ""
                    print(
                        f"{verdict.exercise}\t{verdict.kind}\t{verdict.edit}\t"
                        f"passes {verdict.passes} of {1 + runner.CONFIRMATIONS}{said}",
                        flush=True,
                    )
            print(f"# {lab}: " + ", ".join(f"{name} {count}" for name, count in counts.items()), flush=True)
    print(f"# {len(wrong)} open; {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
