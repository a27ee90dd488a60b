"""Tensors of a folder in Hugging Face's layout: model.safetensors, or shards and an index. `write.py` makes one."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Stored = dict[str, safe_open]  # tensor name -> the open file that holds it


def read(folder: Path) -> Stored:
    """tensor name -> the open file that holds it: `read(folder)[name].get_tensor(name)`.

    ValueError if there are no weights, a shard is missing, a file is truncated or the index names a tensor it lacks.
    """
    if (folder / SINGLE).is_file():
        file = _open(folder / SINGLE)
        return dict.fromkeys(file.keys(), file)
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}: there are no weights to load.")
    try:
        where = json.loads((folder / INDEX).read_text())["weight_map"]
        if not (isinstance(where, dict) and all(isinstance(shard, str) for shard in where.values())):
            raise TypeError("its weight_map does not name a file for each tensor")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} is not a safetensors index ({error!r}).") from error
    files = {shard: _open(folder / shard) for shard in sorted(set(where.values()))}
    held = {shard: set(file.keys()) for shard, file in files.items()}
    for name, shard in where.items():
        if name not in held[shard]:
            raise ValueError(f"{folder / shard} lacks tensor {name}, which {INDEX} says it holds.")
    return {name: files[shard] for name, shard in where.items()}


def one_by_one(stored: Stored) -> Iterator[tuple[safe_open, list[str]]]:
    """Each open file with the names of its tensors. Empties `stored` on the way, so that a file is closed and its pages
    are freed before the next is read."""
    while stored:
        file = next(iter(stored.values()))
        names = [name for name, each in stored.items() if each is file]
        for name in names:
            del stored[name]
        yield file, names
        del file


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist, but {INDEX} names it: a shard is missing.") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}).") from error
