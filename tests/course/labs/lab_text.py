"""What a lab says in its text, for tests that hold its sentences to numbers."""

import re
from collections.abc import Callable

from course.kit import course, masters


def numbers_of(lab: str) -> Callable[[str], tuple[float, ...]]:
    """A function that returns the numbers of the sentence in a lab's text that a pattern of it finds."""
    cells = masters.lab(course.masters(course.home())[lab]).cells
    text = " ".join("\n".join(cell.source for cell in cells if cell.cell_type == "markdown").split())

    def said(pattern: str) -> tuple[float, ...]:
        found = re.search(pattern, text)
        assert found, pattern
        return tuple(float(group.replace(",", "")) for group in found.groups())

    return said
