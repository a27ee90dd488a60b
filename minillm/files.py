"""Files that a reader finds whole or not at all, whoever writes them and is killed at any moment.

.NAME.1f3a9c07.tmp ── written, and on the disk if that is asked for ── renamed ──▶ NAME
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/minillm, by default ~/.cache/minillm: what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~"), ".cache")) / "minillm"


def write_whole(path: Path, content: str | bytes, on_disk: bool = False) -> None:
    """A reader finds what was there before or all of `content`, never a part. on_disk: before this returns."""
    with draft_of(path, on_disk) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def draft_of(path: Path, on_disk: bool = False) -> Iterator[Path]:
    """A name beside `path`; what the block writes to it becomes `path`, or nothing has changed if the block raises."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        if on_disk:
            flush(draft)
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it when the block ends, on the disk; if it raises, nothing is left.
    ValueError if something is there already."""
    check_new(folder)
    draft = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        os.replace(draft, folder)
        flush(draft.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_new(folder: Path) -> None:
    """ValueError unless the folder is empty or there is none."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already: name a new folder.")


def flush(path: Path) -> None:
    """A file's content, or a folder's list of names, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def opened(path: Path, mode: str) -> IO[Any]:
    """The file that a user named, as UTF-8 unless `mode` is binary. A pipe without another end is an OSError, or empty;
    `open` would wait for that end for ever."""
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=_at_once)


def check_writable(option: str, path: Path) -> None:
    """ValueError, before the work, if the option's file cannot be written. Leaves no file behind."""
    new = not path.exists()
    with refusing(option, path):
        opened(path, "a").close()
    if new:
        path.unlink(missing_ok=True)  # other ranks ask as well


@contextlib.contextmanager
def refusing(option: str, path: Path) -> Iterator[None]:
    """An OSError about the file of an option becomes a ValueError. A folder that is missing is not made: its name may
    be mistyped."""
    try:
        yield
    except OSError as error:
        is_lost = isinstance(error, FileNotFoundError) and not path.parent.is_dir()
        why = f"there is no folder {path.parent}): make it, or" if is_lost else f"{error.strerror}):"
        raise ValueError(f"{option} {path} cannot be written ({why} name another file") from error


def _at_once(path: str, flags: int) -> int:
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    os.set_blocking(file, True)
    return file
