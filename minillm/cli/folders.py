"""Folders that a command is to write into when its work is done."""

from pathlib import Path


def check_new_folder(option: str, folder: Path) -> None:
    """ValueError, before the work, if there cannot be such a folder because a file stands in its place."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {folder}: {there} is a file, name another folder")
