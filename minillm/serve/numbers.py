"""Whole numbers as users give them: Python's or numpy's, never a truth value."""

import operator


def check_whole(name: str, value: object, least: int | None = None, *, optional: bool = False) -> int | None:
    """The value as an int; ValueError unless it is a whole number of at least `least`. optional: or None."""
    if optional and value is None:
        return None
    if (number := whole(value)) is None or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} {value!r} must be a whole number{at_least}{', or None' * optional}.")
    return number


def whole(value: object) -> int | None:
    """A whole number of Python's or numpy's as an int; None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_numbers(values: object) -> list[int] | None:
    """A list, an array or a tensor of whole numbers as ints; None if it is none."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple | set | frozenset):
        return None
    if all(type(value) is int for value in values):
        return list(values)
    numbers = [whole(value) for value in values]
    return None if None in numbers else numbers
