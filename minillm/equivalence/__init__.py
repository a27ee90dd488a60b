"""What is claimed of any layout of ranks, held to runs: its gradients, and the planner's bytes, memory and seconds.

Reading path of the oracle, any layout against one process in float64:
    cases.py      what is trained, and in which corners
    oracle.py     one process, the ranks, and the comparison

Reading path of the planner's check, `predict.planner` against the trainer on emulated links:
    planner.py    the machine measured, layouts predicted and run, and both side by side
    placement.py  the same layout with its ranks seated in other orders
    scaling.py    more and more ranks, within a node and beyond
"""

from minillm.equivalence.cases import (
    CASES,
    CONTEXT_CASES,
    EVEN_EXPERT_CASES,
    EXPERT_CASES,
    SPLIT_CASES,
    Batch,
    Case,
    cases_of,
)
from minillm.equivalence.oracle import TOLERANCE, Comparison, Reference, compare, reference
from minillm.train.parallel_config import ParallelConfig

__all__ = [
    "CASES",
    "CONTEXT_CASES",
    "EVEN_EXPERT_CASES",
    "EXPERT_CASES",
    "SPLIT_CASES",
    "TOLERANCE",
    "Batch",
    "Case",
    "Comparison",
    "ParallelConfig",
    "Reference",
    "cases_of",
    "compare",
    "reference",
]
