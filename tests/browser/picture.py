"""Draws figures/lab_at_work.png, README's first picture: lab 01 in JupyterLab, one exercise solved and checked.

python -m tests.browser.picture
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from minillm.labkit import course, masters
from minillm.labkit.execute import execute
from tests.browser.test_lab_in_browser import CHROMIUM, FLAGS, playwright, wait_for_address

ROOT = Path(__file__).parents[2]
LAB, EXERCISE = "01_collectives", "ring-reduce-scatter"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "course")
        master = home / "course" / f"lab{LAB}" / "notebook.py"
        master.parent.mkdir(parents=True)
        shutil.copy(course.masters(ROOT)[LAB], master)
        notebook = masters.lab(master, solved=[EXERCISE])
        checked = next(i for i, cell in enumerate(notebook.cells) if EXERCISE in masters.checked(cell))
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        notebook.cells = [first, *notebook.cells[checked - 5 : checked + 1]]
        (home / "labs").mkdir()
        text = masters.write(execute(notebook, home / "labs", strict=False))
        (home / "labs" / f"{LAB}.ipynb").write_text(text, encoding="utf-8")
        shoot(home, Path(folder), ROOT / "figures" / "lab_at_work.png")


def shoot(home: Path, scratch: Path, picture: Path) -> None:
    """Open the lab and photograph the cell of the check."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = os.environ | {"HOME": str(scratch), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "minillm", "lab", LAB, "--no-browser", "--port", str(port)]
    output = scratch / "output.txt"
    with open(output, "w") as file:
        server = subprocess.Popen(command, cwd=home, env=variables, stdout=file, stderr=file, start_new_session=True)
    try:
        address = wait_for_address(output, server)
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = browser.new_page(viewport={"width": 1100, "height": 760})
            page.set_default_timeout(120e3)
            page.goto(address)
            receipt = page.get_by_text(f"✓ {EXERCISE}: passed")
            receipt.wait_for()
            receipt.scroll_into_view_if_needed()
            page.wait_for_timeout(1000)
            page.screenshot(path=picture)
            browser.close()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


if __name__ == "__main__":
    main()
