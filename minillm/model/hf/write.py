"""A folder's tensors written in Hugging Face's layout: all of them or nothing.

How a save is atomic without ever deleting first:

    1. everything new goes to files under names that no reader looks at, and is flushed to the disk;
    2. one rename, of the file or of the index that names the new shards, makes it the checkpoint;
       (when shards replace a single file, which readers prefer, the removal of that file does);
    3. only then do the old files go.

A full disk, Ctrl-C or a killed process before 2 leaves the old checkpoint, after it the new one. What a killed process
left lying about is removed by the next save.
"""

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minillm.files import flush
from minillm.model.hf.weights import INDEX, SINGLE

OURS = ("model-*-of-*.safetensors", f"{INDEX}*", ".minillm-*.tmp")  # what a save may leave behind and the next removes


def write(
    tensors: dict[str, Tensor | Sequence[Tensor]],
    folder: Path,
    *,
    max_shard_bytes: int | None,
    beside: dict[str, dict],
) -> None:
    """Makes `tensors` the checkpoint in `folder`, with the JSON files `beside` (name -> content) that describe it.

    Several tensors under one name are joined along their first axis.

    OSError if the disk refuses; the previous checkpoint then still loads.
    """
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes {max_shard_bytes} must be at least 1, or None for a single file.")
    parts = {name: [value] if isinstance(value, Tensor) else list(value) for name, value in tensors.items()}
    sizes = {name: sum(tensor.nbytes for tensor in each) for name, each in parts.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    token = secrets.token_hex(4)  # names of this save, so that the old index never points at a new file
    unused: list[Path] = []  # new files that nothing refers to yet
    has_earlier = any((folder / name).exists() for name in (SINGLE, INDEX))
    kept = "; the checkpoint that was there still loads" if has_earlier else ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        outdated = {path for pattern in OURS for path in folder.glob(pattern)}
        where: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            shard = f"model-{number:05}-of-{len(shards):05}-{token}.safetensors"
            where |= dict.fromkeys(names, shard)
            unused.append(folder / shard)
            save_file({name: _joined(parts[name]) for name in names}, folder / shard, {"format": "pt"})
            flush(folder / shard)
        total = sum(sizes.values())
        renames = [(_write_json(content, folder, unused), folder / name) for name, content in beside.items()]
        if len(shards) == 1:
            renames.append((unused[0], folder / SINGLE))
        else:
            index = {"metadata": {"total_size": total}, "weight_map": where}
            renames.append((_write_json(index, folder, unused), folder / INDEX))
        flush(folder)
        unused.clear()  # from here on a new file may be in use
        for new, final in renames:
            os.replace(new, final)
        flush(folder)
        if len(shards) > 1:
            outdated = {folder / SINGLE} | outdated - {folder / INDEX}
        for path in sorted(outdated, key=lambda path: path.name != SINGLE):
            path.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot save to {folder} ({error}){kept}.") from error
    finally:
        for path in unused:
            path.unlink(missing_ok=True)


def plan_shards(sizes: dict[str, int], max_bytes: int | None) -> list[list[str]]:
    """Names in order, cut so that no shard exceeds max_bytes unless a single tensor does."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and max_bytes is not None and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _joined(parts: list[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().contiguous()


def _write_json(content: dict, folder: Path, unused: list[Path]) -> Path:
    path = folder / f".minillm-{secrets.token_hex(4)}.tmp"
    unused.append(path)
    path.write_text(json.dumps(content, indent=2) + "\n")
    flush(path)
    return path
