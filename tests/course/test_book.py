"""What the book is made of: every text has a page, every link leads to one, and a lab's page leaves nothing out."""

import os
import re
from pathlib import Path

import nbformat
import pytest

from course.book.lab_page import lab_page, split_opening
from course.book.pages import as_glossary, contents, figures_page, linked
from course.book.reference import PACKAGES, to_rst
from course.kit import course, exercises, masters
from course.kit.minutes import core_minutes

ROOT = Path(__file__).parents[2]
NAMES = list(course.masters(ROOT))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def test_every_lab_guide_and_package_is_in_the_table_of_contents():
    pages = [page for part in contents(ROOT).values() for page in part]
    assert len(pages) == len(set(pages))
    assert {page for page in pages if page.startswith("labs/")} == {f"labs/{name}" for name in NAMES}
    assert {page for page in pages if page.startswith("docs/")} == {f"docs/{p.stem}" for p in ROOT.glob("docs/*.md")}
    exporting = {p.parent.name for p in ROOT.glob("minillm/*/__init__.py") if "__all__" in p.read_text()}
    assert exporting == set(PACKAGES)


def test_every_committed_figure_is_shown_with_what_it_says():
    page = figures_page(ROOT)
    for path in ROOT.glob("figures/[0-9][0-9]_*.png"):
        shown = re.search(rf"^(.+)\n\n```{{image}} figures/{path.name}\n:alt: (.+)$", page, re.MULTILINE)
        assert shown and shown[1] == shown[2] and not shown[1].startswith("##"), f"{path.name} has no caption"


def test_links_of_every_text_lead_to_pages_and_their_headings(tmp_path):
    pages = {f"{page}.md" for part in contents(ROOT).values() for page in part} | {"index.md"}
    wrong = []
    for path in TEXTS:
        beside = path.parent.relative_to(ROOT)
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", linked(text, beside, ROOT, tmp_path)):
            target, _, anchor = link.partition("#")
            page = os.path.normpath(beside / target) if target else path.relative_to(ROOT).as_posix()
            page = page.replace("README.md", "index.md")
            if page not in pages and not (tmp_path / page).is_file():
                wrong.append(f"{path.name}: {link} is no page")
            elif anchor and not page.startswith("labs/") and anchor not in slugs(page):
                wrong.append(f"{path.name}: {link} has no such heading")
    assert not wrong, "\n".join(wrong)


def slugs(page: str) -> set[str]:
    """Anchors of a guide's headings."""
    text = (ROOT / page.replace("index.md", "README.md")).read_text(encoding="utf-8")
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("name", NAMES)
def test_page_of_a_lab(name, tmp_path):
    """Each word of the lab, each answer under its stub, each stored picture, and the box at the top."""
    page = lab_page(ROOT, name, NAMES, tmp_path)
    solved = nbformat.read(ROOT / "solutions" / f"{name}.ipynb", as_version=4)
    stubs = {cell.id: cell.source for cell in masters.lab(course.masters(ROOT)[name]).cells}
    for cell in solved.cells[1:]:
        assert cell.source.strip() in page
        if stubs.get(cell.id, cell.source) != cell.source:
            below = page.partition(stubs[cell.id].strip())[2]
            assert "<summary>Solution</summary>" in below.partition(cell.source.strip())[0]
    shown = re.findall(r"^```\{image\} (images/\S+)\n:alt: \S", page, re.MULTILINE)
    outputs = [output for cell in solved.cells for output in cell.get("outputs", [])]
    assert len(shown) == sum("image/png" in output.get("data", {}) for output in outputs)
    assert all((tmp_path / image).is_file() for image in shown)
    box = page.partition("{container} glance")[2].partition("`" * 6)[0]
    core, _ = core_minutes(masters.lab(course.masters(ROOT)[name]))
    assert all(f"**{label}:**" in box for label in ("Before it", "Needs", "Open it")) and f"**Time:** {core} " in box
    place = NAMES.index(name)
    beside = NAMES[max(place - 1, 0) : place] + NAMES[place + 1 : place + 2]
    assert all(f"]({lab}.md)" in box for lab in beside)


def test_no_hint_has_what_markdown_would_change():
    """Hints are plain text, and the website takes them for Markdown: `**` begins bold type, `$` a formula."""
    hints = {exercise.name: exercise.hints for exercise in exercises.all_exercises()}
    assert not [name for name, each in hints.items() if re.search(r"\*\*|``|\$|\]\(", " ".join(each))]


@pytest.mark.parametrize("name", NAMES)
def test_the_opening_of_a_lab_is_taken_apart_and_nothing_is_lost(name):
    opening = nbformat.read(ROOT / "solutions" / f"{name}.ipynb", as_version=4).cells[0].source.partition("\n")[2]
    claim, stands_on, time, rest = split_opening(opening)
    assert claim.startswith("**") and stands_on and re.search("hour|minutes", time)
    assert sorted(f"{claim} Stands on {stands_on} {time} {rest}".split()) == sorted(opening.split())


@pytest.mark.parametrize(
    "plain, rst",
    [
        ("One `word` of *many*, 2*n*m.", r"One \ ``word``\  of *many*, 2\*n\*m."),
        ("Reads this:\n- a `b`\n  and c\n- d_", "Reads this:\n\n- a \\ ``b``\\ \n  and c\n- d\\_"),
        ("A picture:\n    a    b\n    c    d\nEnd.", "A picture:\n\n::\n\n        a    b\n        c    d\n\nEnd."),
    ],
)
def test_a_docstring_in_plain_text_keeps_its_meaning(plain, rst):
    assert "\n".join(to_rst(plain.splitlines())).strip() == rst


def test_terms_of_the_glossary_are_sorted_and_all_become_entries():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", text, re.MULTILINE)
    assert len(terms) > 60 and terms == sorted(terms, key=str.lower) and len(terms) == len(set(terms))
    glossary = as_glossary(text)
    assert "\n- " not in glossary and all(f"\n{term}\n  " in glossary for term in terms)
