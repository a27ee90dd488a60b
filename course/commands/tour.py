"""`python -m minillm tour`: every mechanism once on this machine, predicted beside measured, in about 90 seconds."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from course.kit import course
from course.kit.receipts import Receipt
from minillm.comm.launch.forkserver import load_ahead
from minillm.measure.provenance import JsonFile, provenance, summary, write_json


def command(
    labs: Annotated[str, typer.Option(help="Only these stops, by lab number: 00,01.", show_default="all")] = "",
    json_file: JsonFile = None,
) -> int:
    """Run every mechanism once and print its receipt. Exit status 1 if a verdict is off."""
    asked = [part.strip() for part in labs.split(",") if part.strip()]
    origin, start = provenance(), time.monotonic()
    print(summary(origin), end="\n\n")
    load_ahead(module for lab in asked or [""] for module in course.modules("receipts", lab))  # once, not in every rank
    rows: list[dict[str, Any]] = []
    for lab, result in tour(asked):
        print(result, end="\n\n", flush=True)
        rows += [{"lab": lab, **row} for row in result.to_json()]
    off = [row for row in rows if row["verdict"] == "off"]
    verdict = f"{len(off)} off" if off else "none off"
    print(f"{len(rows)} rows, {verdict}, {time.monotonic() - start:.0f} s")
    write_json(json_file, {"provenance": origin, "rows": rows})
    return 1 if off else 0


def tour(labs: Iterable[str] = ()) -> Iterator[tuple[str, Receipt]]:
    """(lab number, receipt) of every claim that the labs make, or those labs asked for."""
    known = course.numbers("receipts")
    for lab in labs:
        if lab not in known:
            raise ValueError(f"--labs {lab}: the tour has no such stop, choose from {', '.join(known)}")
    stops = [(lab, course.load("receipts", lab).CLAIMS) for lab in labs or known]  # while the ranks' server loads them
    for lab, claims in stops:
        for claim in claims:
            result = claim()
            yield lab, replace(result, title=f"lab {lab}: {result.title}")
