"""A model as a Hugging Face folder: the keys of config.json by `families`, the files by `write`."""

from dataclasses import fields
from pathlib import Path

from minillm.model.config import ModelConfig
from minillm.model.hf.families import COMMON, FAMILIES, config_to_hf, stored_tensors, with_choices
from minillm.model.hf.load import CONFIG, raw_config, read_config
from minillm.model.hf.write import write
from minillm.model.transformer import Transformer


def save_hf(model: Transformer, folder: str | Path, *, max_shard_bytes: int | None = None) -> None:
    """Writes config.json and safetensors that `load_hf` and transformers read. The save is atomic (see `write`).

    max_shard_bytes: start another file when one would hold more (a larger tensor has its own); None = one file.
    ValueError if the folder holds a checkpoint of another configuration, OSError if the disk refuses; in both cases
    what was there still loads. Other files in the folder, and other keys in its config.json, are kept.
    """
    folder = Path(folder)
    whole = dict(Transformer(model.config, device="meta").named_parameters())
    if missing := sorted(whole.keys() - dict(model.named_parameters()).keys()):
        raise ValueError(f"the model lacks {missing[0]}: save a quantized one with minillm.quantize.save_quantized.")
    raw = config_to_hf(model.config, next(model.parameters()).dtype)
    raw = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | raw  # else transformers has its own
    check_folder(folder, model.config)
    if (folder / CONFIG).exists():
        ours = COMMON.keys() | {key for family in FAMILIES.values() for key in family.keys}  # of another family, too
        kept = {key: value for key, value in raw_config(folder).items() if key not in ours}
        raw |= {key: value for key, value in kept.items() if raw.get(key) is None}
    named = dict(model.named_parameters())
    held = stored_tensors(model.config, raw["model_type"], named)
    tensors = {each: [piece.of(named).detach() for piece in pieces] for each, pieces in held.items()}
    write(tensors, folder, max_shard_bytes=max_shard_bytes, beside={CONFIG: raw})


def check_folder(folder: Path, config: ModelConfig) -> None:
    """ValueError if `folder` holds a checkpoint of another configuration."""
    if not (folder / CONFIG).exists():
        return
    previous = with_choices(read_config(folder), config)
    if previous != config:
        name = next(f.name for f in fields(previous) if getattr(previous, f.name) != getattr(config, f.name))
        raise ValueError(
            f"{folder} holds a checkpoint of another model ({name} {getattr(previous, name)}, "
            f"not {getattr(config, name)}): save to another folder."
        )
