"""`python -m minillm oracle`: the matrix of layouts and corners, each compared with one process."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Annotated

from typer import Option

from minillm.equivalence import (
    CASES,
    CONTEXT_CASES,
    EXPERT_CASES,
    SPLIT_CASES,
    TOLERANCE,
    ParallelConfig,
    cases_of,
    compare,
)
from minillm.measure.provenance import JsonFile, provenance, summary, write_json
from minillm.parallel.context_parallel import CONTEXTS
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES

DEFAULT = ParallelConfig()
DATA_PARALLEL, MODEL_PARALLEL, CORNERS = (
    partial(Option, rich_help_panel=panel)
    for panel in ("Data, ZeRO and experts", "Tensor, pipeline and context", "Corners")
)
OPTIONS = {"sequence": "--sp"}  # options that are not called what the field is


def command(
    dp: Annotated[str, DATA_PARALLEL(help="Numbers of data-parallel ranks.")] = "1,2,4",
    zero: Annotated[str, DATA_PARALLEL(help="ZeRO stages, 0 for replicas.")] = "0,1,2,3",
    dp_replicate: Annotated[str, DATA_PARALLEL(help="Numbers of groups that hold the same ZeRO shards (HSDP).")] = "1",
    accumulate: Annotated[
        str,
        DATA_PARALLEL(
            "--accumulate", "--microbatches", help="Numbers of microbatches per rank, or through the pipeline."
        ),
    ] = "1,3",
    ep: Annotated[
        str, DATA_PARALLEL(help="Numbers of those data-parallel ranks that share the experts of a layer.")
    ] = "1",
    ep_nodes: Annotated[str, DATA_PARALLEL(help="Numbers of nodes that these lie on; above 1, in two levels.")] = "1",
    tp: Annotated[str, MODEL_PARALLEL(help="Numbers of tensor-parallel ranks.")] = "1",
    sp: Annotated[str, MODEL_PARALLEL(help="Sequence parallelism among those: 0 for off, 1 for on.")] = "0",
    pp: Annotated[str, MODEL_PARALLEL(help="Numbers of pipeline stages.")] = "1",
    schedule: Annotated[str, MODEL_PARALLEL(help=f"Pipeline schedules: {', '.join(SCHEDULES)}.")] = "1f1b",
    cp: Annotated[str, MODEL_PARALLEL(help="Numbers of context-parallel ranks.")] = "1",
    context: Annotated[str, MODEL_PARALLEL(help=f"Their attention: {', '.join(CONTEXTS)}.")] = ",".join(CONTEXTS),
    cases: Annotated[
        str,
        CORNERS(
            help=f"Only these corners: {', '.join(CASES)}; with --tp or --pp {', '.join(SPLIT_CASES)}; with --cp "
            f"{', '.join(CONTEXT_CASES)}; with --ep {', '.join(EXPERT_CASES)}.",
            show_default="all of a layout",
        ),
    ] = "",
    json_file: JsonFile = None,
) -> int:
    """Compare every layout, on every corner, with one process in float64. Exit status 1 if an entry is off."""
    origin = provenance()
    numbers = {"dp": dp, "zero": zero, "accumulate": accumulate, "tp": tp, "sequence": sp, "pp": pp, "cp": cp}
    numbers |= {"dp_replicate": dp_replicate, "ep": ep, "ep_nodes": ep_nodes}
    axes = {name: _numbers(OPTIONS.get(name, f"--{name.replace('_', '-')}"), text) for name, text in numbers.items()}
    if not set(axes["sequence"]) <= {0, 1}:
        raise ValueError(f"--sp {sp}: choose from 0, 1")
    axes |= {"schedule": _names("--schedule", schedule, SCHEDULES), "context": _names("--context", context, CONTEXTS)}
    layouts, left_out = _layouts(axes)
    known = {case: None for layout in layouts for case in cases_of(layout)}
    chosen = _names("--cases", cases, known) if cases else list(known)
    print(summary(origin), end="\n\n")
    rows = compare(layouts, lambda layout: {name: case for name, case in cases_of(layout).items() if name in chosen})
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


def _layouts(axes: Mapping[str, list]) -> tuple[list[ParallelConfig], list[str]]:
    """All combinations that there are, and why the others are not. ValueError if none is left.

    axes: what each field of a layout may be.
    """
    layouts: dict[ParallelConfig, None] = {}
    left_out: list[str] = []
    seen: set[tuple] = set()
    for values in product(*axes.values()):
        fields = dict(zip(axes, values, strict=True))
        fields["sequence"] = bool(fields["sequence"]) and fields["tp"] > 1
        if fields["pp"] == 1:
            fields["schedule"] = DEFAULT.schedule
        if fields["cp"] == 1:
            fields["context"] = DEFAULT.context
        if tuple(fields.values()) in seen:
            continue
        seen.add(tuple(fields.values()))
        try:
            layout = ParallelConfig(**fields, pad=fields["cp"] > 1)
            for case in cases_of(layout).values() if layout.is_hybrid else ():
                layout.check(case.config, case.batch.tokens.shape[1])
        except ValueError as error:
            left_out.append(str(error))
        else:
            layouts[layout] = None
    if not layouts:
        raise ValueError(f"no layout is left to compare: {left_out[0]}")
    return list(layouts), left_out


def _names(option: str, text: str, known: Iterable[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {text}: choose from {', '.join(known)}")
    return names


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text} is not a list of whole numbers: write it like 1,2") from None
