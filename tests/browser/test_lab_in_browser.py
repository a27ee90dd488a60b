"""A learner's first minutes, for real: JupyterLab on loopback, headless Chromium, run all, move a slider.

The unsolved lab is copied into a temporary course, so nothing in labs/ is written. Screenshots stay under
test-artifacts/. It is lab 00; MINILLM_BROWSER_LAB=05_tensor_parallel,... names others. A mock interview is taken in lab
24. Skipped where Chromium or playwright is missing; nothing is installed here.
"""

import json
import os
import re
import shutil

import pytest

from tests.browser.jupyterlab import (
    REPO,
    errors_of,
    marks,
    opened,
    run_all,
    scroll_to,
    serving,
    shoot,
    wait_until_executed,
)

LABS = os.environ.get("MINILLM_BROWSER_LAB", "00_start_here").split(",")
pytestmark = marks


@pytest.fixture(params=LABS)
def lab(request):
    return request.param


@pytest.fixture
def course(tmp_path, lab):
    """A course of one lab, unsolved, in a temporary folder."""
    for path in (f"labs/{lab}.ipynb", f"course/lab{lab}/notebook.py"):
        (tmp_path / "course" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / path, tmp_path / "course" / path)
    return tmp_path / "course"


@pytest.fixture
def page(course, tmp_path, lab):
    with serving(course, lab, tmp_path) as address, opened(address, 1280, 900) as page:
        yield page


def test_unsolved_lab_runs_to_its_end_and_every_slider_redraws(page, course, lab):
    shoot(page, lab, "opened")
    run_all(page)
    notebook = wait_until_executed(page, course / "labs" / f"{lab}.ipynb")
    errors = errors_of(notebook)
    assert not errors, f"the unsolved lab shows an error: {errors[0].ename}: {errors[0].evalue}"

    cells = [index for index, cell in enumerate(notebook.cells) if re.search(r"^sliders\(", cell.source, re.MULTILINE)]
    if not cells:  # a lab of questions and answers has none
        shoot(page, lab, "executed")
        return
    for number, index in enumerate(cells):
        cell = page.locator(f'.jp-Cell[data-windowed-list-index="{index}"]')
        scroll_to(page, cell)
        figure = picture_of(page, notebook, index)
        figure.scroll_into_view_if_needed()
        before = figure.get_attribute("src")
        shoot(page, lab, f"slider-{number}-before")
        scroll_to(page, cell)
        change(page, cell)
        figure.and_(page.locator(f'img:not([src="{before}"])')).wait_for()
        shoot(page, lab, f"slider-{number}-after")


@pytest.mark.parametrize("lab", ["24_interview"])
def test_a_mock_interview_is_taken_to_its_end_in_the_browser(page, course, tmp_path, lab):
    """Running the lab keeps nothing. A session is begun in a new cell and goes on item by item; half-way the kernel
    forgets it and it is resumed."""
    run_all(page)
    wait_until_executed(page, course / "labs" / f"{lab}.ipynb")
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")

    def kept():
        file = tmp_path / "progress.json"
        return (json.loads(file.read_text()) if file.exists() else {}).get("interview", {})

    assert not kept().get("sessions") and not kept().get("cards"), "the lab was only run"
    begin = 'interview = Interview(minutes=30, topic="collectives", seed=7, round="concepts"); interview.ask()'
    run_in_new_cell(page, begin, r"\[1 of \d+,")
    session = kept()["sessions"][-1]
    total = len(session["items"])
    assert session["minutes"] == 30 and total > 5 and not session["done"]
    for place in range(total):
        if place == total // 2:
            run_in_new_cell(page, "interview = Interview(); interview.ask()", rf"\[{place + 1} of {total},")
        reply = {"drill": "1e9", "claim": "true"}.get(session["items"][place][0], "")
        grade = "" if reply else " interview.grade(3);"
        shown = rf"\[{place + 2} of {total}," if place + 1 < total else "Done in"
        run_in_new_cell(page, f"interview.answer({reply!r});{grade} interview.ask()", shown)
        assert len(kept()["sessions"]) == int(place + 1 < total)
    shoot(page, lab, "done")
    assert len(kept()["cards"]) == sum(kind == "card" for kind, _ in session["items"])


def run_in_new_cell(page, code, shown):
    """Write into the last, empty cell and run it, which opens another one below; wait for what it shows."""
    page.keyboard.insert_text(code)
    page.keyboard.press("Shift+Enter")
    page.locator(".jp-OutputArea-output", has_text=re.compile(shown)).last.wait_for()


def picture_of(page, notebook, index):
    """The picture that the sliders of cell `index` redraw: the still one of the same view above them, or their own."""
    view = re.search(r"^sliders\(\s*([\w.]+)", notebook.cells[index].source, re.MULTILINE)[1]
    shown = re.compile(rf"^show\({re.escape(view)}\b", re.MULTILINE)
    still = [at for at, cell in enumerate(notebook.cells[:index]) if shown.search(cell.source)]
    cell = page.locator(f'.jp-Cell[data-windowed-list-index="{still[-1] if still else index}"]')
    return cell.locator(".jp-OutputArea img" if still else "img.widget-image").last


def change(page, cell):
    """Move the first slider of a cell by one, or choose something else from its list."""
    handle, choice = cell.locator(".noUi-handle").first, cell.locator("select").first
    if cell.locator(".noUi-handle").count():
        at = handle.get_attribute("aria-valuenow")
        handle.focus()
        page.keyboard.press("ArrowLeft")
        if handle.get_attribute("aria-valuenow") == at:  # it was at its lower end
            page.keyboard.press("ArrowRight")
    else:
        choice.select_option(index=int(choice.evaluate("list => list.selectedIndex == 0")))
