"""What `python -m minillm doctor` asks of a machine for the course: a kernel, sliders, a place for progress."""

import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from course.kit import progress
from minillm.cli.doctor import PIP, Line, first_line, version_of, writable


def kernel(run_cell: Callable[[], None] | None = None) -> Line:
    """Start this interpreter's notebook kernel and run a cell in it."""
    repair = f'{PIP} "jupyterlab>=4.2,<5" "nbclient>=0.10,<1" ipykernel'
    start = time.monotonic()
    try:
        (run_cell or _run_one_cell)()
    except ImportError as error:
        return Line("kernel", "off", f"{error.name or error} is not installed", repair)
    except Exception as error:
        return Line("kernel", "off", f"a notebook kernel did not run a cell: {first_line(error)}", repair)
    return Line("kernel", "ok", f"ran a cell in this interpreter, {time.monotonic() - start:.1f} s with its start")


def widgets(version: Callable[[str], str] = metadata.version) -> Line:
    """Sliders need a package in the kernel and its other half in JupyterLab."""
    found = {name: version_of(name, version) for name in ("ipywidgets", "jupyterlab_widgets")}
    if missing := [name for name, there in found.items() if not there]:
        repair = f'{PIP} "ipywidgets>=8.1,<9" jupyterlab_widgets, then reload the JupyterLab page'
        return Line("widgets", "off", f"{' and '.join(missing)} not installed: figures have no sliders", repair)
    return Line("widgets", "ok", ", ".join(f"{name} {there}" for name, there in found.items()))


def data_folder(progress_file: Path | None = None) -> Line:
    """Where your progress is kept."""
    return writable("data folder", (progress_file or progress.path()).parent, "XDG_DATA_HOME")


CHECKS = (kernel, widgets, data_folder)


def _run_one_cell() -> None:
    import nbformat

    from course.kit.execute import execute

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 6 * 7 == 42")])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    execute(notebook, Path(tempfile.gettempdir()), timeout_s=60)
