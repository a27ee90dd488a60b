"""Throughput against latency, drawn from the rows of `bench serve`: what more streams at once cost each of them.

python -m minillm bench serve --json bench_serve.json
python -m minillm.bench.serve_frontier bench_serve.json frontier.png
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from minillm.bench.serve import EACH_STREAM

ENGINES = {
    "ours": ("minillm", "o", "-", "#0072b2"),
    "theirs": (None, "s", "--", "#d55e00"),
}  # safe for the colour-blind


def view(rows: Sequence[dict[str, Any]]) -> Figure:
    """rows: of the JSON report; those of the frontier are picked. Left: tokens/s of one stream against streams at once.
    Right: of all streams against one, the frontier: up is throughput, right is speed for the reader."""
    found = {}
    for row in rows:
        if row["name"].endswith(EACH_STREAM) and row["correct"]:
            found[int(row["name"].split()[0])] = row
    if not found:
        raise ValueError(
            f"no rows named '... {EACH_STREAM}': make them with `python -m minillm bench serve --json FILE`."
        )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    alone, frontier = figure.subplots(1, 2)
    streams = sorted(found)
    for side, (name, marker, line, colour) in ENGINES.items():
        each = [found[number][side] for number in streams]
        look = {"marker": marker, "linestyle": line, "color": colour, "label": name or found[streams[0]]["peer"]}
        alone.plot(streams, each, **look)
        frontier.plot(each, [number * rate for number, rate in zip(streams, each, strict=True)], **look)
    alone.set_xscale("log", base=2)
    alone.set_xticks(streams, [str(number) for number in streams])
    alone.set(xlabel="streams at once", ylabel="tokens/s of each stream", ylim=(0, None))
    frontier.set(xlabel="tokens/s of each stream", ylabel="tokens/s of all", xlim=(0, None), ylim=(0, None))
    alone.legend()
    return figure


if __name__ == "__main__":
    source, target = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        view(json.load(file)["rows"]).savefig(target, dpi=120)
