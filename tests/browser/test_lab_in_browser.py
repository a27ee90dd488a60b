"""A learner's first minutes, for real: JupyterLab on loopback, headless Chromium, run all, move a slider.

The unsolved lab is copied into a temporary course, so nothing in labs/ is written. Screenshots stay under
test-artifacts/. It is lab 00; MINILLM_BROWSER_LAB=05_tensor_parallel,... names others. A mock interview is taken in lab
24. Skipped where Chromium or playwright is missing; nothing is installed here.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

REPO = Path(__file__).parents[2]
LABS = os.environ.get("MINILLM_BROWSER_LAB", "00_start_here").split(",")
ARTIFACTS = REPO / "test-artifacts"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]  # fmt: skip
PATIENCE_S = 300  # for a whole lab on a busy machine
STEP_S = 60  # for one reaction

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
]


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
def address(course, tmp_path, lab):
    """The address that `python -m minillm lab` prints; afterwards the server is stopped, and nothing of it is left."""
    folders = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "JUPYTER_CONFIG_DIR")
    variables = os.environ | {name: str(tmp_path / name.lower()) for name in folders}
    variables |= {"PYTHONPATH": str(REPO), "MINILLM_PROGRESS": str(tmp_path / "progress.json"), "PYTHONUNBUFFERED": "1"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "minillm", "lab", lab, "--no-browser", "--port", str(port)]
    output = tmp_path / "output.txt"
    with open(output, "w") as file:
        server = subprocess.Popen(
            command, cwd=course, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield wait_for_address(output, server)
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=STEP_S) == 0, output.read_text()
        _, left = psutil.wait_procs(children, timeout=STEP_S)
        assert not left, f"still running after the server was stopped: {left}"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture
def page(address):
    """The lab's page, open, its kernel ready."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(STEP_S * 1e3)
        page.goto(address)
        page.get_by_text("Python 3 | Idle").wait_for()
        yield page
        browser.close()


def test_unsolved_lab_runs_to_its_end_and_every_slider_redraws(page, course, lab):
    shoot(page, lab, "opened")
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
    notebook = wait_until_executed(page, course / "labs" / f"{lab}.ipynb")
    errors = [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "error"]
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
    """The session that the lab begins, item by item in new cells; half-way the kernel forgets it and it is resumed."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
    wait_until_executed(page, course / "labs" / f"{lab}.ipynb")
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")

    def kept():
        return json.loads((tmp_path / "progress.json").read_text())["interview"]

    session = kept()["sessions"][-1]
    total, done = len(session["items"]), len(session["done"])
    assert session["minutes"] == 45 and total > 10 and done == 3, "a task, a drill and a card were answered by the lab"
    for place in range(done, total):
        if place == total // 2:
            run_in_new_cell(page, "interview = Interview(); interview.ask()", rf"\[{place + 1} of {total},")
        reply = "1e9" if session["items"][place][0] == "drill" else ""
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


def scroll_to(page, cell):
    """JupyterLab draws only the cells near the view: turn the page until this one is there."""
    page.keyboard.press("Escape")
    for _ in range(200):
        if cell.count():
            cell.scroll_into_view_if_needed()
            return
        page.mouse.wheel(0, 600)
        page.wait_for_timeout(100)
    raise AssertionError("the slider's cell is nowhere on the page")


def wait_for_address(output, server):
    deadline = time.monotonic() + STEP_S
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/\S+\n", output.read_text())):
        assert server.poll() is None, output.read_text()
        assert time.monotonic() < deadline, f"no address after {STEP_S} s: {output.read_text()}"
        time.sleep(0.1)
    return found[0].strip()


def wait_until_executed(page, path):
    """Save the page's notebook until every code cell in the file has been run; returns it."""
    deadline = time.monotonic() + PATIENCE_S
    page.locator(".jp-InputPrompt", has_text=re.compile(r"\[[*1]\]")).first.wait_for()
    while True:
        page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=PATIENCE_S * 1e3)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(500)
        with contextlib.suppress(nbformat.reader.NotJSONError):  # read while it is written: look again
            notebook = nbformat.read(path, as_version=4)
            waiting = [cell for cell in code_cells(notebook) if cell.execution_count is None]
            if not waiting:
                return notebook
        assert time.monotonic() < deadline, f"{len(waiting)} cells not run, the first of them: {waiting[0].source}"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shoot(page, lab, name):
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{lab}-{name}.png")
