"""What a learner reads in every lab: at the start what it takes, code that fits the page, at the end the next lab."""

import itertools
import re
from pathlib import Path

import pytest

from course.kit import course, masters
from course.kit.minutes import lab_title

ROOT = Path(__file__).parents[3]
MASTERS = course.masters(ROOT)
COLUMNS = 100  # of code; JupyterLab cuts what is longer in a window of 1280 pixels


@pytest.mark.parametrize("lab", MASTERS)
def test_code_fits_the_page(lab):
    sources = [cell.source for cell in masters.solution(MASTERS[lab]).cells if cell.cell_type == "code"]
    if lab in course.scripts(ROOT):
        sources.append(course.scripts(ROOT)[lab].read_text(encoding="utf-8"))
    long = [line for source in sources for line in source.splitlines() if len(line) > COLUMNS]
    assert not long, f"{lab}: break these lines, at most {COLUMNS} columns fit:\n" + "\n".join(long)


@pytest.mark.parametrize("lab", MASTERS)
def test_the_first_cell_says_how_long_it_takes_and_what_it_stands_on(lab):
    text = masters.lab(MASTERS[lab]).cells[0].source
    assert re.search(r"\b(minutes|hours?)\b", text), f"{lab}: how long does it take?"
    stands = re.search(r"^Stands on (nothing|labs? (\d\d).*)", text, re.MULTILINE)
    assert stands, f"{lab}: write a line 'Stands on lab NN (what of it).' or 'Stands on nothing before it.'"
    named = re.findall(r"\b\d\d\b(?! bytes)", stands[0])
    assert all(number < lab[:2] and any(each.startswith(number) for each in MASTERS) for number in named), stands[0]


@pytest.mark.parametrize(("lab", "following"), itertools.pairwise([*MASTERS, None]))
def test_a_lab_ends_with_a_link_to_the_next(lab, following):
    text, last = masters.lab(MASTERS[lab]).cells[-2:]
    assert last.source == f'finish("{lab}")'
    link = "](../README.md)"
    if following is not None:
        link = f"[{lab_title(masters.lab(MASTERS[following]))}]({following}.ipynb)"
    assert link in text.source.split("\n\n")[-1], f"{lab}: the last paragraph should hold {link}"
