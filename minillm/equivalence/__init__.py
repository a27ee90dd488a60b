"""The equivalence oracle: any layout of ranks against one process in float64.

Reading path: cases.py (what is trained, and in which corners), oracle.py (one process, the ranks, and the comparison).
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
