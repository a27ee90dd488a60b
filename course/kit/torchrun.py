"""How a lab's torchrun script ends: its parts run on every rank, and one receipt judges them for all ranks together.

def rank_program(group): return attempt({"ring": try_ring, "exchange": try_exchange}, group)
def judge(name, ranks): yield row(f"{name}: bytes sent by all ranks", predicted[name], sum(ranks), "B")

if __name__ == "__main__":
    run("lab 07", rank_program, judge)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from course.kit.receipts import Row, receipt, row
from minillm.comm import Group, is_root, launch


def attempt(parts: Mapping[str, Callable[..., Any]], *given: Any) -> dict[str, Any]:
    """By name, what each part returns if it is called with `given`; None if it is not written yet."""
    results = {}
    for name, part in parts.items():
        try:
            results[name] = part(*given)
        except NotImplementedError:
            results[name] = None
    return results


def run(
    lab: str,
    program: Callable[[Group], dict[str, Any]],
    judge: Callable[[str, list[Any]], Iterable[Row]],
    *,
    device: str | None = None,
) -> None:
    """Run `program` on 4 ranks, or on torchrun's, and print the receipt on rank 0; exit status 1 if it is off.

    program: returns what `attempt` does. judge: (name of a part, what it returned on each rank) -> rows.
    """
    ranks = launch(program, nproc=4, device=device)
    if not is_root():
        return
    rows: list[Row] = []
    for name in ranks[0]:
        results = [rank[name] for rank in ranks]
        unwritten = [row(f"{name}: not written yet", None, None)]
        rows += unwritten if None in results else judge(name, results)
    result = receipt(f"{lab} on {len(ranks)} ranks", rows)
    print(result)
    raise SystemExit(0 if result.ok else 1)
