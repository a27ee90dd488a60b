"""`python -m minillm oracle`: the matrix of layouts and corners, each compared with one process."""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from typing import Annotated

from typer import Option

from minillm.equivalence import CASES, SPLIT_CASES, TOLERANCE, Case, ParallelConfig, compare
from minillm.measure.provenance import JsonFile, provenance, summary, write_json
from minillm.parallel.pipeline_parallel.schedules import SCHEDULES


def command(
    dp: Annotated[str, Option(help="Numbers of data-parallel ranks.")] = "1,2,4",
    zero: Annotated[str, Option(help="ZeRO stages, 0 for replicas.")] = "0,1,2,3",
    dp_replicate: Annotated[str, Option(help="Numbers of groups that hold the same ZeRO shards (HSDP).")] = "1",
    accumulate: Annotated[
        str, Option("--accumulate", "--microbatches", help="Numbers of microbatches per rank, or through the pipeline.")
    ] = "1,3",
    tp: Annotated[str, Option(help="Numbers of tensor-parallel ranks.")] = "1",
    sp: Annotated[str, Option(help="Sequence parallelism among those: 0 for off, 1 for on.")] = "0",
    pp: Annotated[str, Option(help="Numbers of pipeline stages.")] = "1",
    schedule: Annotated[str, Option(help=f"Pipeline schedules: {', '.join(SCHEDULES)}.")] = "1f1b",
    cases: Annotated[
        str, Option(help=f"Only these corners: {', '.join(CASES)}; with --tp or --pp {', '.join(SPLIT_CASES)}.")
    ] = "",
    json_file: JsonFile = None,
) -> int:
    """Compare every layout, on every corner, with one process in float64. Exit status 1 if an entry is off."""
    origin = provenance()
    numbers = {"--dp": dp, "--zero": zero, "--accumulate": accumulate, "--tp": tp, "--sp": sp, "--pp": pp}
    numbers["--dp-replicate"] = dp_replicate
    axes = [_numbers(option, text) for option, text in numbers.items()]
    *axes, replicates = axes
    layouts, left_out = _layouts(*axes, [name.strip() for name in schedule.split(",")], replicates)
    chosen = [name.strip() for name in cases.split(",") if name.strip()]
    split = [layout for layout in layouts if layout.is_hybrid]
    print(summary(origin), end="\n\n")
    rows = compare([layout for layout in layouts if not layout.is_hybrid], _cases(chosen, CASES))
    rows += compare(split, _cases(chosen, SPLIT_CASES))
    width = max(44, *(len(row.layout) for row in rows))
    print(f"{'layout':<{width}}  {'gradient':>8}  {'weight':>8}  {'norm':>8}  identical  worst parameter")
    for row in rows:
        numbers = "  ".join(f"{value:>8.1e}" for value in (row.worst_gradient, row.worst_weight, row.grad_norm))
        same = "yes" if row.identical else "NO"
        print(f"{row.layout:<{width}}  {numbers}  {same:<9}  {row.parameter}{'' if row.ok else '   OFF'}")
    off = sum(not row.ok for row in rows)
    print(f"\n{len(rows)} entries, {off or 'none'} off (largest error allowed {TOLERANCE:g}, bits equal on all ranks)")
    if left_out:
        print(f"{len(left_out)} combinations left out because there is no such layout, the first: {left_out[0]}")
    write_json(json_file, {"provenance": origin, "rows": [asdict(row) for row in rows]})
    return 1 if off else 0


def _layouts(*axes: list) -> tuple[list[ParallelConfig], list[str]]:
    """All combinations that there are, and why the others are not. ValueError if none is left.

    axes: what dp, zero, accumulate, tp, sequence, pp, schedule and dp_replicate may be.
    """
    layouts: dict[ParallelConfig, None] = {}
    left_out: list[str] = []
    for *counts, tensor, sequence, stages, schedule, replicate in product(*axes):
        sequence, schedule = bool(sequence) and tensor > 1, schedule if stages > 1 else "1f1b"
        try:
            layout = ParallelConfig(*counts, tensor, sequence, stages, schedule, replicate)
            for case in SPLIT_CASES.values() if layout.is_hybrid else ():
                layout.check(case.config, case.batch.tokens.shape[1])
        except ValueError as error:
            left_out.append(str(error))
        else:
            layouts[layout] = None
    if not layouts:
        raise ValueError(f"no layout is left to compare: {left_out[0]}")
    return list(layouts), left_out


def _cases(names: list[str], known: Mapping[str, Case]) -> dict[str, Case]:
    for name in names:
        if name not in CASES | SPLIT_CASES:
            raise ValueError(f"--cases {name}: choose from {', '.join(CASES | SPLIT_CASES)}")
    return {name: case for name, case in known.items() if not names or name in names}


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text} is not a list of whole numbers: write it like 1,2") from None
