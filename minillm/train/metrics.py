"""What a run leaves to look at: a JSON object per line in metrics.jsonl, and TensorBoard's files if it is installed.

{"step": 7, "loss": 6.1, "lr": 0.001, "tokens_per_s": 3400, "forward_s": 0.2, ...}
{"step": 100, "validation_loss": 4.3, "bits_per_byte": 2.0, ...}          after 100 steps
"""

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minillm.files import write_whole

FILE = "metrics.jsonl"


class Metrics:
    """Appends to the metrics of the run in `folder`; what a checkpoint at `steps_done` does not know is dropped.

    position: windows of data before the checkpoint, those included that a rollback has skipped. It tells steps apart
    that have the same number, before and after a rollback: those it led back over stay, those of an attempt that went
    on from it and was lost do not. None: by their numbers."""

    def __init__(self, folder: Path, steps_done: int = 0, tensorboard: bool = True, position: int | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        kept = [row for row in read_metrics(folder, missing_ok=True) if _known(row, steps_done, position)]
        write_whole(self.path, "".join(map(_line, kept)))
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _board(folder, steps_done) if tensorboard else None

    def log(self, row: dict[str, Any]) -> None:
        """Numbers that are not finite become null: JSON has no other word for them."""
        self._file.write(_line(row))
        self._file.flush()
        if self._board:
            for name, value in row.items():
                if name != "step" and isinstance(value, float | int) and not isinstance(value, bool):
                    self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path, missing_ok: bool = False) -> list[dict[str, Any]]:
    """The rows of a run, in order; a line that a crash cut short is left out. ValueError if there is no run, or if the
    file holds something else."""
    path = folder / FILE
    if not path.exists():
        if missing_ok:
            return []
        raise ValueError(f"{folder} holds no {FILE}: name a run that `python -m minillm train` has made.")
    return read_rows(path, "the metrics of a run", {"step": int})


def read_rows(path: Path, what: str, types: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A JSON object of each line, in order; a line that a crash cut short is left out. ValueError if the file does not
    hold `what`, whose objects have values of these types."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _foreign(path, what, error.strerror if isinstance(error, OSError) else "it is not text") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name, kind in types.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise _foreign(path, what, f"line {number} has no {name}: {line:.40}")
        rows.append(row)
    return rows


def _foreign(path: Path, what: str, reason: str) -> ValueError:
    return ValueError(f"{path} does not hold {what} ({reason}): move it away, or name another run.")


def _known(row: dict[str, Any], steps_done: int, position: int | None) -> bool:
    if position is not None and isinstance(row.get("position"), int):
        return row["position"] < position
    return row["step"] < steps_done or (row["step"] == steps_done and "validation_loss" in row)


def _line(row: dict[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    return json.dumps(finite) + "\n"


def _board(folder: Path, steps_done: int):
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done)
