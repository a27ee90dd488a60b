"""Lab 20: what limits a run, from one page of numbers. Five runs by the planner's formulas, each with one thing wrong.

`limit` asks in the order in which an answer ends the search: does it fit, does it wait for input, for other ranks, for
other stages, and what does it reach while it computes?
"""

from dataclasses import dataclass

from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import Cluster, cluster
from minillm.predict.planner.compute import MODERN, Stack
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import memory
from minillm.predict.planner.step import mfu, step

SEQ = 8192
WAITS = 0.15  # share of a step that is worth an inquiry
SLOW = 0.4  # share of the peak that kernels of a large model reach, at least, while nothing else is waited for
CLASSES = ("memory", "input", "link", "bubble", "kernels", "none")


@dataclass(frozen=True)
class Ledger:
    """One step. memory: bytes held / usable. input, link, bubble: shares of the step that a rank waits for its batch,
    for messages that nothing hides, and for other stages. reached: share of the peak in the rest of the step."""

    memory: float
    input: float
    link: float
    bubble: float
    reached: float


def limit(ledger: Ledger) -> str:
    """One of CLASSES: what to look at first."""
    if ledger.memory > 1:
        return "memory"
    waits = {name: getattr(ledger, name) for name in ("input", "link", "bubble")}
    longest = max(waits, key=waits.get)
    if waits[longest] >= WAITS:
        return longest
    return "kernels" if ledger.reached < SLOW else "none"


@dataclass(frozen=True)
class Run:
    """A run by formula. tokens_per_s: what its loader makes for all ranks together, beside the computing."""

    model: str
    where: Cluster
    layout: Layout
    stack: Stack = MODERN
    tokens_per_s: float = 1e8

    @property
    def ledger(self) -> Ledger:
        model = architecture(self.model)
        took = step(model, self.layout, self.where, SEQ, self.stack)
        loading = self.layout.batch * SEQ / self.tokens_per_s
        whole = max(took.seconds, loading)  # the next batch is made while this one is computed
        exposed = took.tp + took.cp + took.ep + took.pp + took.dp
        working = took.compute + took.elementwise + took.optimizer
        return Ledger(
            memory(model, self.layout, SEQ).total / self.where.usable,
            (whole - took.seconds) / whole,
            exposed / whole,
            took.bubble / whole,
            mfu(model, self.layout, self.where, SEQ, working),
        )


EIGHT, FULL_SHARD = cluster("h100", 8), Layout(dp=8, zero=3, microbatches=8)
SLOW_NETWORK = cluster("h100", 16, network=3.125e9)  # 25 Gb/s
UNFUSED = Stack(flash=False, fused=False)
RUNS = {  # by letter, as a reader meets them: what is wrong with each, one of CLASSES
    "A": ("link", Run("llama-3-8b", SLOW_NETWORK, Layout(dp=16, zero=3, microbatches=4))),
    "B": ("kernels", Run("llama-3-8b", EIGHT, FULL_SHARD, UNFUSED)),
    "C": ("bubble", Run("llama-3-70b", cluster("h100", 64), Layout(tp=8, pp=8, microbatches=8, recompute="light"))),
    "D": ("memory", Run("llama-3-8b", EIGHT, Layout(dp=8, microbatches=8))),
    "E": ("input", Run("llama-3-8b", EIGHT, FULL_SHARD, tokens_per_s=4e4)),
}
