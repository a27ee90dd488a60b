"""The progress bar of a run whose ranks are other processes: it reads the metrics that rank 0 writes.

Ctrl-C in the meantime asks the ranks to save and stop, by the file that `fit` looks for; a second one ends them.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from minillm.train.metrics import FILE
from minillm.train.run import STOP, interrupts, progress_bar

POLL_S = 0.2


@contextmanager
def follow(folder: Path, steps: int) -> Iterator[None]:
    """Shows how far the run in `folder` is, until the block ends."""
    ended = threading.Event()
    with interrupts() as interrupt, progress_bar(folder, steps) as bar:
        thread = threading.Thread(target=_watch, args=(folder, bar, interrupt, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _watch(folder: Path, bar: tqdm, interrupt: threading.Event, ended: threading.Event) -> None:
    path, place = folder / FILE, 0
    while True:
        last = ended.wait(POLL_S)  # one more look after the end
        if interrupt.is_set():
            (folder / STOP).touch()
        if path.exists() and path.stat().st_size > place:
            with path.open(encoding="utf-8") as file:
                file.seek(place)
                lines = file.read().rpartition("\n")[0]
                place += len(lines.encode()) + 1 if lines else 0
            for row in map(json.loads, lines.splitlines()):
                _show(row, bar)
        if last:
            return


def _show(row: dict, bar: tqdm) -> None:
    if "validation_loss" in row:
        if row["step"] < bar.total:
            bar.write(f"step {row['step']}: validation loss {row['validation_loss']:.3f}")
        return
    if row["rollback"]:
        bar.write(f"step {row['step']}: {row['rollback']}")
        return
    bar.update(row["step"] + 1 - bar.n)
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.0%}"
    bar.set_postfix_str(f"loss {row['loss'] or float('nan'):.3f}, {row['tokens_per_s']:,.0f} tokens/s{mfu}")
