"""A Hugging Face folder as a model: config.json and names in `families`, the tensor files in `weights`.

A folder is read strictly: every tensor the model needs must be there in its shape and none may be left over, because a
tensor that is silently skipped gives a model that only seems to work.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from minillm.model.config import ModelConfig
from minillm.model.hf import weights
from minillm.model.hf.families import Piece, config_from_hf, hf_name, stored_tensors
from minillm.model.transformer import Transformer

CONFIG = "config.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGE_BYTES = 1 << 30  # a checkpoint from here on is loaded with a progress bar


def load_hf(
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    max_seq_len: int | None = None,
    progress: bool | None = None,
) -> Transformer:
    """The model in a Hugging Face folder; dtype None keeps the one its embedding is stored in.

    max_seq_len: the context, see `config_from_hf`. progress: show a bar; None = on a terminal, from 1 GiB on.
    Tensors go into the model one by one and a file is closed before the next is read, so there is no second copy.
    ValueError, naming the tensor or the key: config.json missing, invalid or of an unknown architecture; safetensors
    missing or truncated; a tensor missing, unexpected or of another shape.
    """
    folder = Path(folder)
    config, stored, held, layout, quantized = open_folder(folder, max_seq_len)
    found = stored_dtype(folder)
    if layout is None:
        model = Transformer(config, seed=None, device=device, dtype=dtype or found)
    else:
        from minillm.quantize.folder import empty_model

        model = empty_model(config, quantized, layout, stored, device, dtype or found)
    _fill(model, {each: pieces for each, pieces in held.items() if each not in quantized}, stored, progress)
    return model


class OpenedFolder(NamedTuple):
    """A folder whose tensors are those of its model, in their shapes.

    stored: name -> the open file that holds it; held: stored tensor -> the pieces of parameters in it; layout: how
    layers are quantized, None if they are not; quantized: of `held`, those layers.
    """

    config: ModelConfig
    stored: weights.Stored
    held: dict[str, list[Piece]]
    layout: Any
    quantized: dict[str, list[Piece]]


def open_folder(folder: Path, max_seq_len: int | None = None) -> OpenedFolder:
    """Reads and checks everything but the values. ValueError as in `load_hf`."""
    config, stored = read_config(folder, max_seq_len), weights.read(folder)
    if config.tie_embeddings and _has_other_head(stored):
        config = replace(config, tie_embeddings=False)
    parameters = dict(Transformer(config, device="meta").named_parameters())
    held = stored_tensors(config, raw_config(folder)["model_type"], parameters)
    shapes = {each: _shape([piece.of(parameters) for piece in pieces]) for each, pieces in held.items()}
    layout, quantized = _layout(folder, stored), {}
    if layout is not None:
        quantized = {each: pieces for each, pieces in held.items() if layout.marker(each) in stored}
        for each in quantized:
            shapes |= layout.shapes(each, shapes.pop(each))
    if missing := sorted(shapes.keys() - stored.keys()):
        raise ValueError(f"{folder} lacks tensor {missing[0]}{_more(missing)}: its checkpoint is not complete.")
    if extra := sorted(name for name in stored.keys() - shapes.keys() if not _derived(name, config)):
        raise ValueError(f"{folder} holds tensor {extra[0]}{_more(extra)}, for which its {CONFIG} has no place.")
    for name, shape in shapes.items():
        if (found := stored[name].get_slice(name).get_shape()) != shape:
            raise ValueError(f"tensor {name} in {folder} has shape {found}, its {CONFIG} asks for {shape}.")
    return OpenedFolder(config, stored, held, layout, quantized)


def stored_dtype(folder: str | Path) -> torch.dtype:
    """Of the embedding in a folder. ValueError for a type that models do not compute in."""
    embedding, folder = hf_name("embedding.weight"), Path(folder)
    dtype = weights.read(folder)[embedding].get_slice(embedding)[:1].dtype
    if dtype not in DTYPES:
        raise ValueError(f"tensor {embedding} in {folder} is {dtype}: quantized checkpoints are not supported.")
    return dtype


def _layout(folder: Path, stored: weights.Stored):
    """How the folder's layers are quantized (`minillm.quantize.folder.Layout`); None if they are not."""
    raw = raw_config(folder).get("quantization_config")
    if not raw:
        return None
    from minillm.quantize.folder import read_layout  # which imports the model

    scales = next((name for name in stored if name.endswith(("weight_scale", ".scales"))), None)
    try:
        return read_layout(raw, stored[scales].get_slice(scales)[:1].dtype if scales else torch.bfloat16)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def read_config(folder: str | Path, max_seq_len: int | None = None) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder; ValueError as in `load_hf`."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} is not a Hugging Face model folder.")
    try:
        raw = raw_config(Path(folder))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    try:
        return config_from_hf(raw, max_seq_len)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def raw_config(folder: Path) -> dict:
    """config.json as it stands there."""
    return json.loads((folder / CONFIG).read_text())


def _fill(model: Transformer, held: dict[str, list[Piece]], stored: weights.Stored, progress: bool | None) -> None:
    """Copies the stored tensors into the model, file by file."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    hidden = (None if total >= LARGE_BYTES else True) if progress is None else not progress  # None: off a terminal
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=hidden, leave=False)
    named = dict(model.named_parameters())
    with bar, torch.no_grad():
        for file, tensors in weights.one_by_one(stored):
            for each in tensors:
                start, cut = 0, file.get_slice(each)
                for piece in held.get(each, ()):
                    part = piece.of(named)
                    part.copy_(cut[start : start + len(part)])
                    start += len(part)
                    bar.update(part.nbytes)


def _shape(parts: list[torch.Tensor]) -> list[int]:
    return [sum(len(part) for part in parts), *parts[0].shape[1:]]


def _has_other_head(stored: dict) -> bool:
    """Whether a head is stored that differs from the embedding. It then counts, as in transformers, whatever
    config.json says."""
    head, embedding = hf_name("head.weight"), hf_name("embedding.weight")
    if head not in stored or embedding not in stored:
        return False
    return not torch.equal(stored[head].get_tensor(head), stored[embedding].get_tensor(embedding))


def _derived(name: str, config: ModelConfig) -> bool:
    """Whether it is a tensor that old checkpoints carry although it follows from others."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == hf_name("head.weight"))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
