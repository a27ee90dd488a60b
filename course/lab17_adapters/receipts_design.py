"""Lab 17's arithmetic as tables: numbers for the interview, 70B on one node, 1,000 tenants."""

from itertools import product

from course.lab17_adapters import formulas
from course.shared.table import Table, seconds, table


def interview() -> Table:
    """Numbers that the questions rest on."""
    tenancy = formulas.tenancy()
    eight, seventy = (formulas.of_model(name, 16) for name in ("llama-3-8b", "llama-3-70b"))
    return table(
        "by formula",
        ("quantity", "formula"),
        [
            ("4,096 x 4,096, rank 16: share of the numbers", f"{16 * 8192 / 4096**2:.2%}"),
            ("Llama 3 8B, rank 16, all layers: numbers", f"{eight.parameters:,}"),
            ("    in 16 bits", f"{eight.nbytes() / 1e6:.1f} MB"),
            ("    FLOPs of a training step, of those of all weights", f"{formulas.step_share(eight, 1024):.2f}"),
            ("Llama 3 70B, rank 16, all layers: numbers", f"{seventy.parameters:,}"),
            ("NF4 with double quantization: bits per weight", formulas.NF4_BITS),
            ("1,000 tenants on a card, 64 requests: different adapters expected", f"{tenancy.different:.1f}"),
        ],
    )


def design_node(guess_states: float | None = None) -> Table:
    """D1: Llama 3 70B on eight cards of 80 GB."""
    token, lines = formulas.token_bytes(), []
    for way in formulas.fine_tunes():
        left, tokens = (
            (f"{way.left / 1e9:.1f} GB", f"{way.left / token:,.0f}") if way.left > 0 else ("does not fit", "—")
        )
        lines.append((way.name, f"{way.states / 1e9:.1f} GB", left, tokens))
    title = f"D1: 70B on 8 cards of 80 GB, 10 % kept free (your guess for LoRA: {guess_states} GB a card), by formula"
    room = f"tokens, {token / 1e6:.1f} MB each"
    return table(title, ("what is trained", "states on a card", "left for activations", room), lines)


def design_tenants() -> Table:
    """D2: 1,000 tenants on four cards, if each card serves all of them, and if each serves a quarter."""
    lines = []
    for tenants, sequences in product((1000, 250), (16, 64, 256)):
        found = formulas.tenancy(tenants=tenants, sequences=sequences)
        times = (seconds(each) for each in (found.base_step, found.step, found.merged))
        lines.append((f"{tenants:,}", sequences, f"{found.different:.1f}", *times))
    times = ("base alone", "with adapters", "merged models in turn")
    columns = ("tenants of a card", "requests in a step", "different adapters", *times)
    return table("D2: Llama 3 8B on one H100, contexts of 1,024, a decode step by formula", columns, lines)
