"""Text to learn from, without a download: the source code of the Python that is running.

    corpus()          the standard library's own .py files, about 750 files and 10 MB
    corpus("folder")  every UTF-8 text file under a folder
    corpus("file")    one UTF-8 text file

Documents come in sorted order of their relative path, so two runs (and two ranks) see the same text. About 5 % of the
files are held out for validation by a hash of that path: adding or removing a file never moves another one.
"""

import codecs
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

Split = Literal["train", "validation", "all"]
VALIDATION_SHARE = 0.05
# Tests repeat themselves, tables and help texts are generated, the rest is not this Python's own source.
_STDLIB_SKIP_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "__phello__"}
_STDLIB_SKIP_FOLDERS |= {"site-packages", "dist-packages", "ensurepip"}
_STDLIB_SKIP_FILES = ("_sysconfigdata*.py", "html/entities.py", "stringprep.py", "sitecustomize.py", "config-*/*")


class Document(NamedTuple):
    """One file: `name` is its path relative to the corpus root, with forward slashes."""

    name: str
    text: str


@dataclass(frozen=True)
class Statistics:
    """Size of a split; `bytes` are UTF-8 bytes of text."""

    files: int
    bytes: int
    lines: int


def corpus(path: str | Path | None = None) -> "Corpus":
    """The standard library of this interpreter, or the text under `path` (a folder or one file).

    Raises ValueError naming the path if it does not exist, is a single file that is not UTF-8 text, or a folder
    without any text. In a folder, files that are not text are left out with one warning that names them.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return Corpus(root, tuple(sorted(_stdlib_files(root))))
    if not str(path):  # which pathlib takes for the folder we are in
        raise ValueError("the path of the text is empty: name a file or folder, or give none for the standard library")
    root = Path(path).expanduser()
    if root.is_file():
        if not _looks_like_text(root):
            raise ValueError(f"{root} is not UTF-8 text: give a text file, or a folder that holds some")
        return Corpus(root.parent, (root.name,))
    if not root.is_dir():
        raise ValueError(f"no such file or folder: {root}; give an existing path, or none for the standard library")
    names = sorted(_visible_files(root))
    binary = [name for name in names if not _looks_like_text(root / name)]
    if len(binary) == len(names):
        raise ValueError(f"{root} holds no UTF-8 text file ({len(names)} files looked at): give a folder with text")
    if binary:
        shown = ", ".join(binary[:5]) + (", ..." if len(binary) > 5 else "")
        warnings.warn(f"left out {len(binary)} of {len(names)} files that are not UTF-8 text: {shown}", stacklevel=2)
    return Corpus(root, tuple(sorted(set(names) - set(binary))))


@dataclass(frozen=True)
class Corpus:
    """Named text files under `root`. Nothing is read before `documents` is iterated."""

    root: Path
    names: tuple[str, ...] = field(repr=False)

    def documents(self, split: Split = "all") -> Iterator[Document]:
        """Yields the documents of a split in order. Raises ValueError naming a file that is not UTF-8 to its end."""
        for name in self.split_names(split):
            text = _read(self.root / name)
            if len(self.names) == 1 and split != "all":
                head, tail = _cut(text)
                text = head if split == "train" else tail
            yield Document(name, text)

    def split_names(self, split: Split) -> tuple[str, ...]:
        """Names of a split's files. A lone file is in both splits: its last 5 % of lines are the held-out text."""
        if split not in ("train", "validation", "all"):
            raise ValueError(f"no split called {split!r}: use 'train', 'validation' or 'all'")
        if split == "all" or len(self.names) == 1:
            return self.names
        return tuple(name for name in self.names if (name in self._held_out) == (split == "validation"))

    @cached_property
    def _held_out(self) -> frozenset[str]:
        below = frozenset(name for name in self.names if _unit_hash(name) < VALIDATION_SHARE)
        return below or frozenset([min(self.names, key=_unit_hash)])

    def fingerprint(self, split: Split = "all") -> str:
        """SHA-256 over names and contents: equal if and only if the text is."""
        digest = hashlib.sha256()
        for name, text in self.documents(split):
            data = text.encode()
            digest.update(os.fsencode(name) + f"\0{len(data)}\0".encode())
            digest.update(data)
        return digest.hexdigest()

    def statistics(self, split: Split = "all") -> Statistics:
        """Files, bytes and lines of a split."""
        files = size = lines = 0
        for document in self.documents(split):
            files, size, lines = files + 1, size + len(document.text.encode()), lines + document.text.count("\n")
        return Statistics(files, size, lines)


def _stdlib_files(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        unwanted = _STDLIB_SKIP_FOLDERS & set(relative.parts[:-1]) or any(map(relative.match, _STDLIB_SKIP_FILES))
        if not unwanted and path.is_file():
            yield relative.as_posix()


def _visible_files(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if not hidden and path.is_file():
            yield relative.as_posix()


def _looks_like_text(path: Path, sample_bytes: int = 1 << 16) -> bool:
    """Whether the first 64 KiB are UTF-8 without a NUL (a character cut by the sample's end is fine)."""
    with path.open("rb") as file:
        sample = file.read(sample_bytes)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample, final=len(sample) < sample_bytes)
    except UnicodeDecodeError:
        return False
    return b"\0" not in sample


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # bytes, so that line ends stay as they are
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text at byte {error.start}: convert it or take it out") from None


def _cut(text: str) -> tuple[str, str]:
    """The text before and after the line end nearest below its last 5 %."""
    at = text.rfind("\n", 0, int(len(text) * (1 - VALIDATION_SHARE))) + 1 or int(len(text) * (1 - VALIDATION_SHARE))
    return text[:at], text[at:]


def _unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone, on every machine and every run."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64
