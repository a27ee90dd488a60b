"""docs/gpu.md: what was measured on which GPUs, and what never was, from the files that `make cuda` leaves.

python -m minillm.bench.gpu_page            writes the page anew; a test compares it with figures/cuda_*.json
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minillm.bench.cuda import PARTS, ROOT, RUN, Part
from minillm.bench.harness import BenchReport, BenchRow

PAGE, FIGURES = ROOT / "docs" / "gpu.md", ROOT / "figures"
HEAD = """# On GPUs

`make cuda` proves on the GPUs of a machine, one, two or eight, what the rest of these pages claims of GPUs, in about a
quarter of an hour. It runs each part as a process of its own with a limit of time, says what it skips and why, and ends
with status 1 if a part failed. What was measured goes to `figures/`, into files whose names begin with "cuda_", and
`python -m minillm.bench.gpu_page` makes this page of them.

Without a GPU the same code is proven on fake devices, in Triton's interpreter and on a process group that keeps NCCL's
rules: values are right and launches, host waits and messages are counted, but nothing says how fast it is.
"""
NEVER = """## What `make cuda` does not measure

More than one node, NVLink beyond one node, other accelerators than CUDA GPUs, models above 8 billion parameters, and
serving on several GPUs.
"""


def page(figures: Path = FIGURES) -> str:
    """The page for what lies in this folder."""
    run = _read(figures / RUN)
    results = {part.name: _read(figures / part.file) for part in PARTS if part.file}
    parts = [HEAD, _overview(run, results)]
    parts += [_section(part, results[part.name]) for part in PARTS if results.get(part.name)]
    return "\n".join([*parts, NEVER])


def _overview(run: dict[str, Any] | None, results: dict[str, dict | None]) -> str:
    """A line for each part: how it ended the last time, or that it never ran."""
    if run is None and not any(results.values()):
        said = "**Nothing of this has been measured on a GPU yet**: no run of `make cuda` has been kept."
    elif run is None:
        said = "No complete run of `make cuda` has been kept, only results of some parts."
    else:
        said = "What is kept was run " + "; ".join(_machines(run["parts"])) + "."
    ended = {outcome["name"]: outcome for outcome in run["parts"]} if run else {}
    lines = ["| part | what it proves or measures | GPUs | how it ended |", "| :-- | :-- | --: | :-- |"]
    lines += [f"| {part.name} | {part.about} | {part.gpus}+ | {_ended(ended.get(part.name))} |" for part in PARTS]
    return "\n".join(["## What was run", "", said, "", *lines, ""])


def _machines(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """The machines of these parts, and where there are several, which part ran on which."""
    parts: dict[str, list[str]] = {}
    for each in outcomes:
        gpus = f"{each['gpus']} GPU" + "s" * (each["gpus"] > 1)
        parts.setdefault(f"on {gpus} ({each['where']})", []).append(each["name"])
    return [machine if len(parts) == 1 else f"{machine}: {', '.join(names)}" for machine, names in parts.items()]


def _ended(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "never ran"
    if outcome["status"] == "skipped":
        return f"skipped: {outcome['note']}"
    note = outcome["note"].replace("|", "\\|") if outcome["status"] != "passed" or "passed" in outcome["note"] else ""
    return f"{outcome['status']} in {outcome['seconds']:.0f} s" + (f": {note}" if note else "")


def _section(part: Part, found: dict[str, Any]) -> str:
    """What a part measured: the rows of a benchmark, or the card of a machine."""
    title = f"## {part.about[0].upper()}{part.about[1:]}"
    if "rows" in found:
        rows: Sequence[BenchRow] = [BenchRow(**row) for row in found["rows"]]
        table = BenchReport(part.about, found["provenance"], tuple(rows), tuple(found.get("notes", ()))).markdown()
        return "\n".join([title, "", table, ""])
    gpu = found.get("gpu")
    if not gpu:
        return "\n".join([title, "", "The card names no GPU.", ""])
    facts = {
        "GPU": gpu["name"],
        "memory": f"{gpu['memory_bytes'] / 2**30:.0f} GiB",
        "matrix products in bfloat16": f"{gpu['peak_flops_bf16'] / 1e12:,.0f} TFLOP/s",
        "matrix products in float32": f"{gpu['peak_flops_fp32'] / 1e12:,.1f} TFLOP/s",
        "memory bandwidth": f"{gpu['memory_bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s",
        "measured": f"{found['measured']} UTC, torch {found['torch']}",
    }
    return "\n".join(
        [title, "", "| what | value |", "| :-- | :-- |", *(f"| {a} | {b} |" for a, b in facts.items()), ""]
    )


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.exists() else None


if __name__ == "__main__":
    PAGE.write_text(page())
