"""Whether two answers are wrong in the same way: the same complaint, with the same evidence.

Numbers are compared to six digits, since the same mistake may be computed in another order. Two complaints are the same
if they differ in numbers only; the numbers are compared in the evidence.
"""

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,.]*(e[+-]?\d+)?")


def alike(one: Any, other: Any) -> bool:
    """Whether two failed outcomes of one check, on the same inputs, are one mistake."""
    if one.evidence is None and other.evidence is None:
        return one.message == other.message
    if _NUMBER.sub("#", one.message) != _NUMBER.sub("#", other.message):
        return False
    return same(one.evidence, other.evidence)


def same(one: Any, other: Any) -> bool:
    """Equal values of equal shape, to six digits; NaN equals NaN, and a list equals a tuple of the same."""
    if hasattr(one, "detach") and hasattr(other, "detach"):
        return one.shape == other.shape and same(one.detach().flatten().tolist(), other.detach().flatten().tolist())
    if isinstance(one, Number) and isinstance(other, Number):
        both_nan = one != one and other != other
        return both_nan or one == other or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if _is_list(one) and _is_list(other):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
