"""How the ranks of a launch ended, from the files in its folder: reports, output, stack dumps."""

import contextlib
import linecache
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import cloudpickle
import psutil

from minillm.comm.errors import RankError
from minillm.comm.launch import worker


def has_report(folder: Path, rank: int) -> bool:
    return (folder / f"report{rank}").exists()


def report_of(folder: Path, rank: int) -> worker.Report | None:
    """The report that the rank wrote when it ended; None if it was killed."""
    return cloudpickle.loads((folder / f"report{rank}").read_bytes()) if has_report(folder, rank) else None


def place_of(folder: Path, rank: int) -> str:
    """The innermost line of the caller's own code that the rank is in, from its stack dump."""
    path = folder / f"stack{rank}"
    dump = path.read_text() if path.exists() else ""
    main_thread = dump.split("Current thread")[-1] if "Current thread" in dump else dump
    ours = (os.path.dirname(os.path.dirname(worker.__file__)), "site-packages", os.path.dirname(os.__file__))
    for name, line, function in re.findall(r'File "(.+?)", line (\d+) in (\S+)', main_thread):
        if not any(part in name for part in ours) and not name.startswith("<frozen"):
            code = linecache.getline(name, int(line)).strip()
            return f"{function}, line {line}" + (f": {code}" if code else "")
    return ""


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal (SIGSTOP, Ctrl-Z) or a debugger."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def cause(folder: Path, reports: list[worker.Report | None], exit_codes: Mapping[int, int]) -> BaseException:
    """The first failure that is not the consequence of another one. exit_codes: those of the ranks that failed, in
    order."""
    raised = sorted((r.echo, r.at, rank) for rank, r in enumerate(reports) if r and r.result is None)
    silent = [rank for rank in exit_codes if reports[rank] is None]
    if silent and (not raised or raised[0][0]):
        rank, code = silent[0], exit_codes[silent[0]]
        text = f"rank {rank} of {len(reports)} {_death(code)} before it finished{_last_words(folder, rank)}"
        return RankError(text, rank, code)
    rank = raised[0][2]
    text = f"rank {rank} of {len(reports)} raised {reports[rank].error}\n\n{_name_cells(reports[rank].text)}\n"
    error = RankError(text, rank)
    error.__cause__ = _original(reports[rank])
    return error


def _last_words(folder: Path, rank: int) -> str:
    """C++'s last message before it ended the process, if there is one."""
    path = folder / f"output{rank}"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    words = [line.strip().removeprefix("what():").strip() for line in lines if "what():" in line]
    return f": {words[-1]}" if words else ""


def _name_cells(traceback: str) -> str:
    """The traceback with notebook cells by number, as in `Cell In[5]`, in place of IPython's temporary file names."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = getattr(getattr(shell, "compile", None), "_filename_map", {})
    for name, number in cells.items():
        traceback = traceback.replace(f'File "{name}"', f'File "Cell In[{number}]"')
    return traceback


def _original(report: worker.Report) -> BaseException | None:
    try:
        return cloudpickle.loads(report.exception) if report.exception else None
    except Exception:
        return None


def _death(code: int) -> str:
    if code < 0:
        hint = " (out of memory, perhaps)" if -code == signal.SIGKILL else ""
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"  # real-time ones
        return f"was killed by {name}{hint}"
    return f"ended its process with exit code {code}"
