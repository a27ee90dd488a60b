"""`python -m minillm lab`: JupyterLab on this machine only, on the lab asked for.

Loopback address, a fresh token, this interpreter as the only kernel, and none of JupyterLab's own traffic: no news, no
update check, no extension manager.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from course.kit import course
from course.kit.execute import environment

_CONFIG = Path(course.__file__).parent / "jupyter"  # no question about news, Markdown as a page, whole file names
_QUIET = (
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--ServerApp.allow_root=True",  # containers; the token and the loopback address are what protects it
    "--Application.log_level=WARN",
    "--ServerApp.kernel_spec_manager_class=course.kit.execute.ThisInterpreter",
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)


def command(
    name: Annotated[
        str | None, typer.Argument(help="A lab, such as 01 or 01_collectives; default 00_start_here.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8888, or a free one.", min=1, max=65535)] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> int:
    """Open a lab in JupyterLab."""
    home = course.root()
    built = sorted(path.stem for path in (home / "labs").glob("*.ipynb"))
    if not built:
        raise ValueError(f"{home / 'labs'} holds no notebook yet; build them with: python -m minillm notebooks")
    lab = course.pick([name or ("00_start_here" if "00_start_here" in built else built[0])], built)[0]
    return serve(home, lab, _choose_port(port), open_browser=browser)


def serve(home: Path, lab: str, port: int, *, open_browser: bool) -> int:
    """Run JupyterLab until it is stopped; returns its exit status."""
    token = secrets.token_hex(16)
    page = f"/lab/tree/labs/{lab}.ipynb"
    command = [sys.executable, "-m", "jupyterlab", *_QUIET, f"--ServerApp.port={port}", f"--ServerApp.root_dir={home}"]
    command += [f"--ServerApp.terminado_settings={ {'shell_command': _shell()} }"]
    command += [f"--LabApp.default_url={page}", *([] if open_browser else ["--no-browser"])]
    variables = environment(strict=False) | {"JUPYTER_TOKEN": token}  # by environment: command lines are public
    variables["JUPYTER_CONFIG_PATH"] = os.pathsep.join(
        filter(None, [str(_CONFIG), os.environ.get("JUPYTER_CONFIG_PATH")])
    )
    server = subprocess.Popen(command, env=variables, cwd=home, stdin=subprocess.DEVNULL)
    with _forward_signals(server):
        if not _answers(server, port):
            return server.wait() or 1
        print(f"\n  {lab}:  http://127.0.0.1:{port}{page}?token={token}\n  Ctrl-C stops it.\n", flush=True)
        return 0 if server.wait() in (0, -signal.SIGINT, -signal.SIGTERM) else 1


def _shell() -> list[str]:
    """What JupyterLab's terminals run: the user's shell, in which `python` is this interpreter.

    A login shell, JupyterLab's default, would set PATH anew. bash's and zsh's own start-up files may, too: ours read
    them first.
    """
    shell = os.environ.get("SHELL") or shutil.which("bash") or "sh"
    if Path(shell).name == "bash":
        return [shell, "--rcfile", str(_CONFIG / "terminal" / "bashrc")]
    if Path(shell).name == "zsh":
        return [
            "env",
            f"MINILLM_ZDOTDIR={os.environ.get('ZDOTDIR', Path.home())}",
            f"ZDOTDIR={_CONFIG / 'terminal'}",
            shell,
        ]
    return [shell]


def _choose_port(asked: int | None) -> int:
    if asked is not None and not _is_free(asked):
        raise ValueError(f"--port {asked} is taken or not allowed; leave --port out and a free one is chosen")
    if asked is not None:
        return asked
    if _is_free(8888):
        return 8888
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _answers(server: subprocess.Popen, port: int) -> bool:
    """Wait until the page can be opened; False if the server ends first."""
    while server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.1)
    return False


@contextlib.contextmanager
def _forward_signals(server: subprocess.Popen):
    """Ctrl-C and kill stop the server at once (without JupyterLab's question), and wait for its kernels to go."""

    def stop(_number, _frame):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
