"""Faults that shipped in known projects, each once: what the bug museum, the labs and the tests plant in minillm.

1. patches.py         a patch: other code in the place of one of minillm's functions, for as long as a run lasts
2. training.py        faults of training
3. serving.py         faults of serving
4. verification.py    wrong ways to verify draft tokens, which are functions of their own
5. strategy.py        a training strategy with patches planted on every rank, as the oracle takes one

    with planted([serving.NO_SALT]):
        llm = LLM(model)
        ...
"""

from course.shared.faults.patches import Fault, Patch, planted

__all__ = ["Fault", "Patch", "planted"]
