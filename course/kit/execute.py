"""Run a notebook from top to bottom and keep of its outputs what is worth committing.

The kernel is this very interpreter, whatever kernels the machine has registered. Checks are strict, so a solution that
fails its own check stops the build; the learner's progress file is never touched.
"""

import base64
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from minillm.drawing import small

_WIDGET = "application/vnd.jupyter.widget-view+json"
# Kineto (torch's profiler) marks start and stop on stderr; its log level would hide errors along with these two lines.
_PROFILER_MARK = re.compile(
    r"^USDT:[-\d]+ [:\d]+ \d+:\d+ SyncActivityProfilerHandler\.cpp:\d+\] profiler_(?:start|stop)\n", re.MULTILINE
)
_UNDER_LOAD = re.compile(r"busy \(load [\d.]+ per core\)")  # in a machine card: measure again when it is quiet
_WIDGET_NOTE = "(Sliders appear here while the notebook runs.)\n"


class NotebookFailed(Exception):
    """A notebook that stopped before its end; the text names the cell and the error."""


class ThisInterpreter(KernelSpecManager):
    """Knows one kernel, `python3`: the interpreter that is running now."""

    def find_kernel_specs(self) -> dict[str, str]:
        from ipykernel.kernelspec import RESOURCES

        return {"python3": str(RESOURCES)}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "--log-level=ERROR", "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
            resource_dir=self.find_kernel_specs()["python3"],
            metadata={"debugger": True},
        )


def execute(
    notebook: NotebookNode,
    folder: Path,
    *,
    timeout_s: float = 180.0,
    strict: bool = True,
    progress_file: Path | None = None,
) -> NotebookNode:
    """A copy of the notebook, run in `folder` and cleaned; raises NotebookFailed at the first error.

    timeout_s: the longest a single cell may take. progress_file: where its checks record their outcomes.
    """
    notebook = nbformat.from_dict(notebook)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())
    running = []
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=timeout_s,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=lambda cell, cell_index: running.append(cell),
    )
    with tempfile.TemporaryDirectory(prefix="minillm-notebook-") as scratch:
        try:
            variables = environment(strict) | {"MINILLM_PROGRESS": str(progress_file or f"{scratch}/progress.json")}
            client.execute(env=variables, cleanup_kc=True)
        except CellExecutionError as error:
            _refuse_errors(notebook)
            raise NotebookFailed(f"cell '{_head(running)}' raised {error.ename}: {error.evalue}") from error
        except CellTimeoutError as error:
            raise NotebookFailed(f"cell '{_head(running)}' took longer than {timeout_s:g} s") from error
        except DeadKernelError as error:
            raise NotebookFailed(f"the kernel died in cell '{_head(running)}'") from error
    _refuse_errors(notebook)
    _clean(notebook, folder)
    return notebook


def off_rows(executed: NotebookNode) -> list[tuple[str, str]]:
    """(name, "formula 110 ms, measured 156 ms") of each row that is off in a stored receipt, folded or not."""
    found = []
    for output in (output for cell in executed.cells for output in cell.get("outputs", ())):
        heads: list[str] = []
        for cells in _table_rows(output):
            if cells[-1:] == ["verdict"]:
                heads = cells
            elif cells[-1:] == ["off"] and len(cells) == len(heads):
                values = (f"{head} {cell}" for head, cell in zip(heads[1:-1], cells[1:-1], strict=True) if cell != "—")
                found.append((cells[0], ", ".join(values)))
    return found


def under_load(executed: NotebookNode) -> bool:
    """Whether an output shows a machine card that was measured while other work kept the machine busy."""
    outputs = (output for cell in executed.cells for output in cell.get("outputs", ()))
    return any(_UNDER_LOAD.search(str(output)) for output in outputs)


def _table_rows(output: NotebookNode) -> Iterator[list[str]]:
    """Cells of each row of the receipts in an output: of HTML, which has all rows, or of what was printed."""
    if output.output_type == "stream":
        yield from (re.split(" {3,}", line.strip()) for line in output.text.splitlines())
    for kind in ("text/html", "text/markdown"):  # Markdown may hold HTML
        for row in re.findall("<tr.*?</tr>", output.get("data", {}).get(kind, ""), re.DOTALL):
            cells = (unescape(re.sub("<.*?>", "", cell)) for cell in re.findall("<t[hd].*?</t[hd]>", row, re.DOTALL))
            yield [cell.strip("✗ \N{NO-BREAK SPACE}") for cell in cells]


def environment(strict: bool) -> dict[str, str]:
    """Variables of a lab's kernel and terminals: this interpreter, this copy of minillm, checks strict or not."""
    package = str(Path(__file__).resolve().parents[2])
    variables = {key: value for key, value in os.environ.items() if key != "MINILLM_STRICT"}
    variables |= {"PYTHONPATH": _before(package, "PYTHONPATH"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    variables["PATH"] = _before(str(Path(sys.executable).parent), "PATH")
    if sys.prefix != sys.base_prefix:
        variables["VIRTUAL_ENV"] = sys.prefix
    return variables | ({"MINILLM_STRICT": "1"} if strict else {})


def _before(first: str, variable: str) -> str:
    """What a variable that lists folders is with `first` in front of them."""
    return os.pathsep.join([first, *filter(None, [os.environ.get(variable)])])


def _head(running: list[NotebookNode]) -> str:
    return (running[-1].source.strip().splitlines() or [""])[0] if running else "(none yet)"


def _refuse_errors(notebook: NotebookNode) -> None:
    """NotebookFailed for the first error shown, be it one of display(), after which the kernel counts a cell as run."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                raise NotebookFailed(f"cell '{_head([cell])}' raised {output.ename}: {output.evalue}")


def _clean(notebook: NotebookNode, folder: Path) -> None:
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            tidy = (_tidy(output, folder) for output in cell.outputs)
            cell.outputs = [output for output in tidy if output.get("text") != ""]


def _tidy(output: NotebookNode, folder: Path) -> NotebookNode:
    if _WIDGET in output.get("data", {}):
        return nbformat.v4.new_output("stream", name="stdout", text=_WIDGET_NOTE)
    if output.output_type == "stream":
        output.text = _anonymous(_PROFILER_MARK.sub("", output.text), folder)
    for kind, content in output.get("data", {}).items():
        if kind == "image/png":
            output.data[kind] = base64.b64encode(small(base64.b64decode(content))).decode()
        elif isinstance(content, str):
            output.data[kind] = _anonymous(content, folder)
    return output


def _anonymous(text: str, folder: Path) -> str:
    """Paths of this machine, as they stand in tracebacks, made relative to the course."""
    text = text.replace(f"{folder.resolve().parent}{os.sep}", "").replace(f"{sys.prefix}{os.sep}", "")
    return text.replace(f"{Path(__file__).resolve().parents[2]}{os.sep}", "")
