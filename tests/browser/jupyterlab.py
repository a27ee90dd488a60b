"""JupyterLab as a learner has it: `python -m minillm lab` on loopback, its page in headless Chromium.

Everything happens in a temporary course whose home is temporary, too, so nothing in labs/ and no progress is touched.
Screenshots stay under test-artifacts/.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest

REPO = Path(__file__).parents[2]
ARTIFACTS = REPO / "test-artifacts"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
PATIENCE_S = 300  # for a whole lab on a busy machine
STEP_S = 60  # for one reaction

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
marks = [
    pytest.mark.browser,
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
]


@contextlib.contextmanager
def serving(course: Path, lab: str, scratch: Path) -> Iterator[str]:
    """The address that `python -m minillm lab` prints; afterwards the server is stopped, and nothing of it is left."""
    folders = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "JUPYTER_CONFIG_DIR")
    variables = os.environ | {name: str(scratch / name.lower()) for name in folders}
    variables |= {"PYTHONPATH": str(REPO), "MINILLM_PROGRESS": str(scratch / "progress.json"), "PYTHONUNBUFFERED": "1"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "minillm", "lab", lab, "--no-browser", "--port", str(port)]
    output = scratch / "output.txt"
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


@contextlib.contextmanager
def opened(address: str, width: int, height: int, scale: float = 1.0) -> Iterator["playwright.Page"]:
    """The lab's page, open, its kernel ready. scale: pixels of the screen to one of the page."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=scale)
        page.set_default_timeout(STEP_S * 1e3)
        page.goto(address)
        page.get_by_text("Python 3 | Idle").wait_for()
        yield page
        browser.close()


def run_all(page):
    choose(page, "Run", "Run All Cells")


def choose(page, menu, *items):
    """Click an entry of a menu, the last of `items`; those before it are submenus."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
    for item in items:
        page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{item}$")).click()


def cell_at(page, index):
    """The cell of that place in the notebook that is in front, scrolled into view."""
    cell = page.locator(f'.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell[data-windowed-list-index="{index}"]')
    scroll_to(page, cell)
    return cell


def scroll_to(page, cell):
    """JupyterLab draws only the cells near the view: turn the page until this one is there, from its beginning on."""
    page.keyboard.press("Escape")
    for step in range(400):
        if cell.count():
            cell.scroll_into_view_if_needed()
            return
        page.mouse.wheel(0, -1e6 if step == 200 else 600)
        page.wait_for_timeout(100)
    raise AssertionError("the cell is nowhere on the page")


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


def errors_of(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "error"]


def shoot(page, lab, name):
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{lab}-{name}.png")
