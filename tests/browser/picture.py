"""Draws figures/lab_at_work.png, README's first picture: lab 01 in JupyterLab, one exercise solved and checked.

python -m tests.browser.picture
"""

import shutil
import tempfile
from pathlib import Path

from course.kit import course, masters
from course.kit.execute import execute
from minillm.drawing import small
from tests.browser.jupyterlab import REPO, choose, opened, serving

LAB, EXERCISE = "01_collectives", "ring-reduce-scatter"
PICTURE = REPO / "figures" / "lab_at_work.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "course")
        master = home / "course" / f"lab{LAB}" / "notebook.py"
        master.parent.mkdir(parents=True)
        shutil.copy(course.masters(REPO)[LAB], master)
        notebook = masters.lab(master, solved=[EXERCISE])
        checked = next(i for i, cell in enumerate(notebook.cells) if EXERCISE in masters.checked(cell))
        imports = next(cell for cell in notebook.cells if cell.cell_type == "code")
        drawn, answered = notebook.cells[checked - 2], notebook.cells[checked]
        notebook.cells = [imports, drawn, answered]
        (home / "labs").mkdir()
        notebook = execute(notebook, home / "labs", strict=False)
        notebook.cells = notebook.cells[1:]  # the page begins with the exercise
        (home / "labs" / f"{LAB}.ipynb").write_text(masters.write(notebook), encoding="utf-8")
        shoot(home, Path(folder))


def shoot(home: Path, scratch: Path) -> None:
    """Open the lab and photograph the exercise: its picture, the answer and the check's receipt."""
    with serving(home, LAB, scratch) as address, opened(address, 1240, 900, scale=1.25) as page:
        choose(page, "View", "Appearance", "Show Left Sidebar")  # closes it
        page.get_by_text(f"✓ {EXERCISE}: passed").wait_for()
        page.wait_for_timeout(1000)
        PICTURE.write_bytes(small(page.screenshot()))


if __name__ == "__main__":
    main()
