"""docs/debugging.md says what the exhibits of the bug museum show: each once, with the measurements that solve it."""

import re
from pathlib import Path

from course.lab22_bug_museum.museum import EXHIBITS, MODULES

GUIDE = Path(__file__).parents[3] / "docs" / "debugging.md"
LINK = re.compile(r"\[([\w-]+)\]\(\.\./course/lab22_bug_museum/(\w+)\.py\)")


def rows():
    """(cells of a line of the guide, the names and files of its exhibits)."""
    lines = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if LINK.search(line)]
    return [([cell.strip() for cell in line.strip("|").split(" | ")], LINK.findall(line)) for line in lines]


def test_every_exhibit_stands_in_one_line_with_its_file():
    found = [each for _, exhibits in rows() for each in exhibits]
    right = {its.name: module.__name__.rpartition(".")[2] for module in MODULES for its in module.EXHIBITS}
    assert len(found) == len(right) and dict(found) == right


def test_a_line_orders_what_solves_its_exhibits_and_nothing_that_misleads():
    for (symptom, first, second, culprits, _), exhibits in rows():
        named = set(re.findall(r"`([\w-]+)`", first + second))
        solving = {clue.measurement for name, _ in exhibits for clue in EXHIBITS[name].investigation}
        assert named == solving, (symptom, named ^ solving)
        assert symptom and culprits
