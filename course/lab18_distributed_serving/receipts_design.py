"""Lab 18's numbers for the interview corner and the design question, by formula."""

from course.lab18_distributed_serving import formulas
from course.shared.table import Table, seconds, table
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.serving import decode_seconds
from minillm.predict.serving import handover


def interview() -> Table:
    """TPOT by tp, a hand-over's bytes and seconds."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 8)
    handed = handover.handed_bytes(formulas.shape_of("70B"), 4000)
    lines = [(f"one sequence: TPOT with tp {tp}", seconds(decode_seconds(model, machine, tp))) for tp in (2, 4, 8)]
    lines += [
        ("4,000 tokens handed over", f"{handed / 1e6:,.0f} MB"),
        ("    by four cards of 40 GB/s, before layers hide them", seconds(handed / 160e9)),
        ("    computed again with tp 4", seconds(formulas.recompute_seconds("70B", 4000, 0.0, 4))),
    ]
    return table("Llama 3 70B on H100; formula", ("numbers to say aloud", ""), lines)


def two_nodes() -> Table:
    """405B in 16 bits on 16 H100, by layout."""
    lines = [
        (each.layout, f"{each.weights / 1e9:.1f} GB", f"{each.tokens:,}", f"{each.tpot * 1e3:.1f} ms",
         f"{each.crossing / 1e6:.2f} MB")
        for each in formulas.two_nodes()
    ]  # fmt: skip
    columns = ("layout", "weights a card", "tokens in the cache", "TPOT of one", "a token sends across")
    return table("Llama 3 405B on two nodes of 8 H100, contexts of 1,000; formula", columns, lines)
