"""A learner's first hour, for real: run a lab, answer wrongly, take the hint, answer, go on to the next lab.

Then a terminal and a page of the documentation. No cell shows an error, and the page reports none of its own.
"""

import re
import shutil
import time

import nbformat
import pytest

from course.kit import course, masters
from tests.browser.jupyterlab import (
    REPO,
    STEP_S,
    cell_at,
    choose,
    errors_of,
    marks,
    opened,
    run_all,
    serving,
    shoot,
    wait_until_executed,
)

LAB, NEXT, EXERCISE = "00_start_here", "01_collectives", "matmul-cost"
WRONG = ("2 * m * k * n,", "m * k * n,")  # no additions
SAYS = "You counted multiplications only"
pytestmark = marks


@pytest.fixture
def home(tmp_path):
    """A course of two labs, unsolved, and the documentation that they link."""
    home = tmp_path / "course"
    for lab in (LAB, NEXT):
        master = course.masters(REPO)[lab]
        copy = home / "course" / master.parent.name / master.name
        copy.parent.mkdir(parents=True)
        shutil.copy(master, copy)
        (home / "labs").mkdir(exist_ok=True)
        (home / "labs" / f"{lab}.ipynb").write_text(masters.write(masters.lab(master)), encoding="utf-8")
    shutil.copytree(REPO / "docs", home / "docs")
    return home


@pytest.fixture
def address(home, tmp_path):
    with serving(home, LAB, tmp_path) as address:
        yield address


def test_first_hour(address, home):
    solved = masters.solution(course.masters(REPO)[LAB]).cells
    index = next(place for place, cell in enumerate(solved) if EXERCISE in masters.checked(cell))
    answer = solved[index].source
    with opened(address, 1280, 800) as page:
        complaints, printed = listen(page)
        shoot(page, "hour", "1-opened")
        run_all(page)
        notebook = wait_until_executed(page, home / "labs" / f"{LAB}.ipynb")
        assert not errors_of(notebook)

        assert WRONG[0] in answer
        cell = run_instead(page, index, answer.replace(*WRONG))
        cell.get_by_text(SAYS).wait_for()
        card = cell.locator(".jp-Cell-outputArea").inner_text()
        assert f"{EXERCISE}: not passed yet" in card
        shoot(page, "hour", "2-wrong")

        call = re.search(r'Stuck\? (hint\(".*?"\))', card)[1]
        page.keyboard.press("Escape")
        page.keyboard.press("b")
        below = cell_at(page, index + 1)
        below = run_instead(page, index + 1, call)
        below.get_by_text("Hint 1 of 3").wait_for()
        shoot(page, "hour", "3-hint")
        cell = cell_at(page, index)
        cell.get_by_role("button", name="Hint").click()
        cell.get_by_text("Hint 2 of 3").wait_for()

        cell = run_instead(page, index, answer)
        cell.get_by_text(f"✓ {EXERCISE}: passed").wait_for()
        shoot(page, "hour", "4-passed")

        last = len(notebook.cells)  # one cell more than at first
        finish = run_instead(page, last, f'finish("{LAB}")')
        finish.get_by_text(re.compile(rf"passed: {EXERCISE}")).wait_for()
        assert "1 of 5 exercises passed" in finish.inner_text()
        shoot(page, "hour", "5-finish")

        cell_at(page, last - 1).get_by_role("link", name="01 · Collectives").click()
        page.get_by_role("heading", name="01 · Collectives").wait_for()
        page.get_by_text("Python 3 | Idle").wait_for()
        shoot(page, "hour", "6-next-lab")

        cell_at(page, 0).get_by_role("link", name="docs/group.md").click()
        page.locator(".jp-MarkdownViewer").get_by_role("heading").first.wait_for()
        shoot(page, "hour", "7-docs")

        choose(page, "File", "New", "Terminal")
        page.locator(".jp-Terminal .xterm-helper-textarea").wait_for()
        page.locator(".jp-Terminal").click()
        page.keyboard.type("python -m minillm progress\n")
        wait_for(page, printed, r"00_start_here +1 of 5")
        shoot(page, "hour", "8-terminal")

        choose(page, "File", "Save All")
        for lab in (LAB, NEXT):
            assert not errors_of(nbformat.read(home / "labs" / f"{lab}.ipynb", as_version=4))
        assert not complaints, "\n".join(complaints)


def listen(page):
    """Errors that the page reports from now on, and what its terminals print: lists that grow."""
    complaints, printed = [], []
    page.on("pageerror", lambda error: complaints.append(f"page error: {error}"))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)

    def on_socket(socket):
        if "/terminals/" in socket.url:
            socket.on("framereceived", lambda frame: printed.append(frame))

    page.on("websocket", on_socket)
    return complaints, printed


def run_instead(page, index, source):
    """Replace what stands in a cell, run it, and return it."""
    cell = cell_at(page, index)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")
    return cell


def wait_for(page, printed, pattern):
    """Until a terminal has printed something that fits the pattern, escape sequences left out."""
    deadline = time.monotonic() + STEP_S
    while not re.search(pattern, text := re.sub(r"\x1b\[[\d;?]*\w", "", "".join(map(str, printed)))):
        assert time.monotonic() < deadline, f"the terminal shows no {pattern!r} but:\n{text}"
        page.wait_for_timeout(200)
