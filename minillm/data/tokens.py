"""A corpus as one long array of token ids, kept in a file and mapped into memory instead of read.

    | JSON header, padded to 1024 bytes | ids, little-endian uint16 (uint32 for vocabularies above 65,536) |

    documents:  d o c 0 <sep> d o c 1 <sep> ...        each document is followed by the separator

Tokenising 10 MB takes seconds, so the file is cached under a name that is the hash of text and tokenizer: a change of
either makes another file, never a stale one. Files appear complete or not at all (written aside, then renamed).
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from minillm import files
from minillm.data.corpus import Corpus, Split
from minillm.data.tokenizer import Tokenizer
from minillm.files import draft_of

FORMAT = "minillm-tokens-1"
HEADER_BYTES = 1024
_CHUNK_CHARACTERS = 1 << 20  # longer documents are encoded in parts, which bounds memory


@dataclass(frozen=True)
class Tokens:
    """`array`: [count] unsigned token ids. `text_bytes` counts UTF-8 bytes of text, separators not included."""

    array: np.ndarray = field(repr=False)
    vocab_size: int
    separator: int
    documents: int
    text_bytes: int
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.array)

    def __reduce__(self):  # sent to another process: by name if there is a file, not by content
        if self.path is not None:
            return read_tokens, (self.path,)
        return Tokens, (self.array, self.vocab_size, self.separator, self.documents, self.text_bytes)


def tokenize(text: Corpus, tokenizer: Tokenizer, split: Split = "train", cache: Path | None = None) -> Tokens:
    """The tokens of a split: from the cache, or made and cached. `cache` is a folder (default: `cache_folder()`).

    A damaged cached file is made again; a cache that cannot be written costs one warning and the time to tokenise.
    """
    key = hashlib.sha256(f"{FORMAT} {text.fingerprint(split)} {tokenizer.fingerprint}".encode()).hexdigest()[:24]
    path = (cache_folder() if cache is None else cache) / f"{key}.tokens"
    if path.is_file():
        try:
            return read_tokens(path)
        except ValueError as error:
            warnings.warn(f"{error}; making it again", stacklevel=2)
    made = _encode_documents(text, tokenizer, split)
    try:
        return write_tokens(path, made)
    except OSError as error:
        warnings.warn(
            f"cannot cache tokens in {path.parent} ({error.strerror}): they stay in memory. "
            "Set XDG_CACHE_HOME to a folder that can be written",
            stacklevel=2,
        )
        return made


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/minillm/tokens, by default ~/.cache/minillm/tokens."""
    return files.cache_folder() / "tokens"


def write_tokens(path: str | Path, tokens: Tokens) -> Tokens:
    """Writes a token file and returns it mapped. Raises OSError and leaves nothing behind if that fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.ascontiguousarray(tokens.array).astype(_dtype(tokens.vocab_size), copy=False)
    names = ("vocab_size", "separator", "documents", "text_bytes")
    header = {"format": FORMAT, "dtype": array.dtype.name, "count": len(array)}
    header |= {name: int(getattr(tokens, name)) for name in names}
    with draft_of(path, on_disk=True) as draft, draft.open("wb") as file:
        file.write(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")
        array.tofile(file)
    return read_tokens(path)


def read_tokens(path: str | Path) -> Tokens:
    """Maps a token file. Raises ValueError naming the file if it is missing, foreign or cut short."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"no token file at {path} ({error.strerror})") from None
    try:
        header = json.loads(raw)
        if header["format"] != FORMAT:
            raise KeyError
        count, dtype = int(header["count"]), _dtype(header["vocab_size"])
        rest = [int(header[name]) for name in ("vocab_size", "separator", "documents", "text_bytes")]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a token file of this version ({FORMAT})") from None
    expected = HEADER_BYTES + count * dtype.itemsize
    if size != expected:
        raise ValueError(f"{path} is damaged: {size} bytes instead of {expected} for {count} tokens")
    array = np.memmap(path, dtype, "r", HEADER_BYTES, (count,)) if count else np.empty(0, dtype)
    return Tokens(array, *rest, path)


def _encode_documents(text: Corpus, tokenizer: Tokenizer, split: Split) -> Tokens:
    dtype, separator = _dtype(tokenizer.vocab_size), np.array([tokenizer.eos_id])
    arrays: list[np.ndarray] = []
    documents = text_bytes = 0
    parts = _parts(text, split)
    while batch := list(islice(parts, 64)):
        text_bytes += sum(len(part.encode()) for part, _ in batch)
        for ids, (_, last) in zip(tokenizer.encode_batch([part for part, _ in batch]), batch, strict=True):
            arrays.append((np.append(ids, separator) if last else ids).astype(dtype))
            documents += last
    array = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return Tokens(array, tokenizer.vocab_size, tokenizer.eos_id, documents, text_bytes)


def _parts(text: Corpus, split: Split) -> Iterator[tuple[str, bool]]:
    """Documents in parts of at most a million characters, each with whether it is the document's last."""
    for _, document in text.documents(split):
        starts: Iterable[int] = range(0, max(len(document), 1), _CHUNK_CHARACTERS)
        for start in starts:
            yield document[start : start + _CHUNK_CHARACTERS], start + _CHUNK_CHARACTERS >= len(document)


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
