"""`python -m minillm oracle`: the matrix of layouts and corners, each compared with one process."""

from dataclasses import asdict
from itertools import product
from typing import Annotated

from typer import Option

from minillm.measure.provenance import JsonFile, provenance, summary, write_json
from minillm.oracle import CASES, TOLERANCE, Case, Layout, compare


def command(
    dp: Annotated[str, Option(help="Numbers of data-parallel ranks.")] = "1,2,4",
    zero: Annotated[str, Option(help="ZeRO stages, 0 for replicas.")] = "0,1,2,3",
    accumulate: Annotated[str, Option(help="Numbers of microbatches per rank.")] = "1,3",
    cases: Annotated[str, Option(help=f"Only these corners: {', '.join(CASES)}.")] = ",".join(CASES),
    json_file: JsonFile = None,
) -> int:
    """Compare every layout, on every corner, with one process in float64. Exit status 1 if an entry is off."""
    origin = provenance()
    chosen = {name: _case(name.strip()) for name in cases.split(",")}
    values = (_numbers("--dp", dp), _numbers("--zero", zero), _numbers("--accumulate", accumulate))
    layouts = [Layout(*combination) for combination in product(*values)]
    print(summary(origin), end="\n\n")
    rows = compare(layouts, chosen)
    print(f"{'layout':<44}  {'gradient':>8}  {'weight':>8}  {'norm':>8}  identical  worst parameter")
    for row in rows:
        numbers = "  ".join(f"{value:>8.1e}" for value in (row.worst_gradient, row.worst_weight, row.grad_norm))
        same = "yes" if row.identical else "NO"
        print(f"{row.layout:<44}  {numbers}  {same:<9}  {row.parameter}{'' if row.ok else '   OFF'}")
    off = sum(not row.ok for row in rows)
    print(f"\n{len(rows)} entries, {off or 'none'} off (largest error allowed {TOLERANCE:g}, bits equal on all ranks)")
    write_json(json_file, {"provenance": origin, "rows": [asdict(row) for row in rows]})
    return 1 if off else 0


def _case(name: str) -> Case:
    if name not in CASES:
        raise ValueError(f"--cases {name}: choose from {', '.join(CASES)}")
    return CASES[name]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text} is not a list of whole numbers: write it like 1,2") from None
