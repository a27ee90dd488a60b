"""Run a notebook from top to bottom and keep of its outputs what is worth committing.

The kernel is this very interpreter, whatever kernels the machine has registered. Checks are strict, so a solution that
fails its own check stops the build; the learner's progress file is never touched.
"""

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

_WIDGET = "application/vnd.jupyter.widget-view+json"
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


def execute(notebook: NotebookNode, folder: Path, *, timeout_s: float = 180.0, strict: bool = True) -> NotebookNode:
    """A copy of the notebook, run in `folder` and cleaned; raises NotebookFailed at the first error.

    timeout_s: the longest a single cell may take.
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
            variables = environment(strict) | {"MINILLM_PROGRESS": f"{scratch}/progress.json"}
            client.execute(env=variables, cleanup_kc=True)
        except CellExecutionError as error:
            raise NotebookFailed(f"cell '{_head(running)}' raised {error.ename}: {error.evalue}") from error
        except CellTimeoutError as error:
            raise NotebookFailed(f"cell '{_head(running)}' took longer than {timeout_s:g} s") from error
        except DeadKernelError as error:
            raise NotebookFailed(f"the kernel died in cell '{_head(running)}'") from error
    _clean(notebook, folder)
    return notebook


def environment(strict: bool) -> dict[str, str]:
    """Variables of a lab's kernel: this copy of minillm first, checks strict or not."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {key: value for key, value in os.environ.items() if key != "MINILLM_STRICT"}
    variables |= {"PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return variables | ({"MINILLM_STRICT": "1"} if strict else {})


def _head(running: list[NotebookNode]) -> str:
    return (running[-1].source.strip().splitlines() or [""])[0] if running else "(none yet)"


def _clean(notebook: NotebookNode, folder: Path) -> None:
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [_tidy(output, folder) for output in cell.outputs]


def _tidy(output: NotebookNode, folder: Path) -> NotebookNode:
    if _WIDGET in output.get("data", {}):
        return nbformat.v4.new_output("stream", name="stdout", text=_WIDGET_NOTE)
    if output.output_type == "stream":
        output.text = _anonymous(output.text, folder)
    for kind, content in output.get("data", {}).items():
        if kind == "image/png":
            output.data[kind] = _small_png(content)
        elif isinstance(content, str):
            output.data[kind] = _anonymous(content, folder)
    return output


def _anonymous(text: str, folder: Path) -> str:
    """Paths of this machine, as they stand in tracebacks, made relative to the course."""
    text = text.replace(f"{folder.resolve().parent}{os.sep}", "").replace(f"{sys.prefix}{os.sep}", "")
    return text.replace(f"{Path(__file__).resolve().parents[2]}{os.sep}", "")


def _small_png(content: str) -> str:
    """The picture with at most 128 colours where that is smaller; figures of flat colour lose nothing visible."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(content)))
    if picture.mode == "RGBA" and picture.getextrema()[3] != (255, 255):
        return content
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    small = base64.b64encode(buffer.getvalue()).decode()
    return small if len(small) < len(content) else content
