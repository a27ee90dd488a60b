"""Lab 18's numbers for the interview corner and the design question, by formula."""

from course.kit.receipts import Receipt, formula, receipt
from course.lab18_distributed_serving import formulas
from course.shared.table import Table, table
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.serving import decode_seconds
from minillm.predict.serving import handover


def interview() -> Receipt:
    """TPOT by tp, a hand-over's bytes and seconds."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 8)
    rows = [
        formula(f"Llama 3 70B, one sequence: TPOT with tp {tp}", decode_seconds(model, machine, tp), "s")
        for tp in (2, 4, 8)
    ]
    handed = handover.handed_bytes(formulas.shape_of("70B"), 4000)
    rows.append(formula("4,000 tokens: bytes handed over", handed, "B"))
    rows.append(formula("    over four cards of 40 GB/s, before layers hide them", handed / 160e9, "s"))
    rows.append(formula("    computed again with tp 4", formulas.recompute_seconds("70B", 4000, 0.0, 4), "s"))
    return receipt("numbers to say aloud", rows, open_rows=1, show="handed")


def two_nodes() -> Table:
    """405B in 16 bits on 16 H100, by layout."""
    lines = [
        (f"tp {each.tp}, pp {each.pp}", f"{each.weights / 1e9:.1f} GB", f"{each.tokens:,}", f"{each.tpot * 1e3:.1f} ms",
         f"{each.crossing / 1e6:.2f} MB")
        for each in formulas.two_nodes()
    ]  # fmt: skip
    columns = ("layout", "weights a card", "tokens in the cache", "TPOT of one", "a token sends across")
    return table("Llama 3 405B on two nodes of 8 H100, contexts of 1,000; formula", columns, lines)
