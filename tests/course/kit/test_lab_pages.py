"""What a learner reads in every lab: at the start what it takes, code that fits the page, at the end the next lab."""

import itertools
import re
from pathlib import Path

import nbformat
import pytest

from course.kit import course, masters
from course.kit.card import Card
from course.kit.minutes import lab_title
from course.kit.receipts import receipt, row

ROOT = Path(__file__).parents[3]
MASTERS = course.masters(ROOT)
COLUMNS = 100  # of code; JupyterLab cuts what is longer in a window of 1280 pixels
FEW = 25  # rows of receipts that a lab keeps open
WORDS = 2_800  # of prose in a notebook
RECEIPT, CARD = "border-collapse:collapse;margin:4px 0", "border-left:4px solid"


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


def prose(source: str) -> int:
    """Words of a Markdown cell, headings, lists and folded answers included: what stands between spaces and holds a
    letter. Code in fences, tables, addresses of links and HTML tags do not count."""
    source = re.sub(r"^```.*?^```", "", source, flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r"^\|.*", "", source, flags=re.MULTILINE)
    source = re.sub(r"\]\([^)]*\)|<[^>]+>", " ", source)
    return sum(bool(re.search(r"[^\W\d_]", word)) for word in source.split())


@pytest.mark.parametrize("lab", MASTERS)
def test_a_notebook_has_few_words(lab):
    cells = masters.lab(MASTERS[lab]).cells
    words = sum(prose(cell.source) for cell in cells if cell.cell_type == "markdown")
    assert words <= WORDS, f"{lab}: {words} words of prose are too many: cut what repeats, down to {WORDS}"


def test_words_are_counted_as_a_reader_meets_them():
    text = "## A title\n\n| a | table |\n\n- [two words](https://example.org/a-b), `code`\n\n$6P = 3$ <b>bold</b> 7 · 8"
    assert prose(text + "\n\n```bash\nls -l\n```\n") == 7


@pytest.mark.parametrize(("lab", "following"), itertools.pairwise([*MASTERS, None]))
def test_a_lab_ends_with_a_link_to_the_next(lab, following):
    text, last = masters.lab(MASTERS[lab]).cells[-2:]
    assert last.source == f'finish("{lab}")'
    link = "](../README.md)"
    if following is not None:
        link = f"[{lab_title(masters.lab(MASTERS[following]))}]({following}.ipynb)"
    assert link in text.source.split("\n\n")[-1], f"{lab}: the last paragraph should hold {link}"


def open_rows(notebook: nbformat.NotebookNode) -> int:
    """Rows of receipts that a reader sees without opening anything; those of checks and those that are off are not
    counted, since a card shows one row and what is off is never folded."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = ["".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]
    receipts = [page for page in pages if RECEIPT in page and CARD not in page]
    shown = [re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL) for page in receipts]
    rows = [row for page in shown for body in page.split("<tbody>")[1:] for row in body.split("<tr ")[1:]]
    return sum("✗" not in row for row in rows)


@pytest.mark.parametrize("lab", MASTERS)
def test_receipts_show_what_the_text_speaks_of(lab):
    shown = open_rows(nbformat.read(ROOT / "solutions" / f"{lab}.ipynb", as_version=4))
    assert shown <= FEW, f"{lab}: {shown} rows are open: fold those of which no text speaks"


def test_open_rows_are_counted_as_a_page_shows_them():
    rows = [row(name, 1, 1) for name in "abcde"]
    pages = [receipt("", [*rows, row("wrong", 1, 2)])._repr_html_(), repr(Card("", receipt=receipt("", rows)))]
    card = Card("passed", receipt=receipt("", rows))._repr_html_()
    cells = [
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", {"text/html": page})])
        for page in (*pages, card)
    ]
    assert open_rows(nbformat.v4.new_notebook(cells=cells)) == 3
