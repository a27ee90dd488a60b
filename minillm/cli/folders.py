"""Folders that a command is to write into when its work is done."""

import contextlib
import tempfile
from pathlib import Path


def check_new_folder(option: str, folder: Path) -> None:
    """ValueError, before the work, if there cannot be such a folder, or nothing can be written into it. It is made to
    find out, and removed again."""
    places = (folder, *folder.absolute().parents)
    there = next(place for place in places if place.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {folder}: {there} is a file, name another folder")
    made = [place for place in places if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option} {folder} cannot be written ({error.strerror}): name another folder") from error
    finally:
        for place in made:
            with contextlib.suppress(OSError):  # another rank may look at it now
                place.rmdir()
