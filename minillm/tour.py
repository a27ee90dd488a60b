"""`python -m minillm tour`: every mechanism once on this machine, predicted beside measured, in under a minute."""

import pkgutil
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Annotated, Any

import typer

from minillm.labkit import stops
from minillm.labkit.receipts import Row, receipt
from minillm.measure.provenance import JsonFile, provenance, summary, write_json


def command(
    labs: Annotated[str, typer.Option(help="Only these stops, by lab number: 00,01.")] = "",
    json_file: JsonFile = None,
) -> int:
    """Run every mechanism once and print its receipt. Exit status 1 if a verdict is off."""
    origin, start = provenance(), time.monotonic()
    print(summary(origin), end="\n\n")
    rows: list[dict[str, Any]] = []
    for lab, stop in tour([part.strip() for part in labs.split(",") if part.strip()]):
        found = receipt(f"lab {lab}", stop)
        print(found, end="\n\n", flush=True)
        rows += [{"lab": lab, **row} for row in found.to_json()]
    off = [row for row in rows if row["verdict"] == "off"]
    verdict = f"{len(off)} off" if off else "none off"
    print(f"{len(rows)} rows, {verdict}, {time.monotonic() - start:.0f} s")
    write_json(json_file, {"provenance": origin, "rows": rows})
    return 1 if off else 0


def tour(labs: Iterable[str] = ()) -> Iterator[tuple[str, Iterator[Row]]]:
    """(lab number, its rows) of every stop, or of the stops asked for."""
    modules = {module.name.removeprefix("lab_"): module.name for module in pkgutil.iter_modules(stops.__path__)}
    wanted = list(labs) or sorted(modules)
    for lab in wanted:
        if lab not in modules:
            raise ValueError(f"--labs {lab}: the tour has no such stop, choose from {', '.join(sorted(modules))}")
    for lab in wanted:
        yield lab, import_module(f"{stops.__name__}.{modules[lab]}").rows()
