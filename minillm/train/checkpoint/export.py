"""From a run to a model folder: what `generate`, the serving labs and transformers load.

PATH/model.safetensors, config.json    the weights in bfloat16, Hugging Face's Llama layout
PATH/tokenizer.json, ..._config.json   a copy, so that the folder works alone (a link would break in a wheel)
PATH/training.json                     command, data, losses of these very weights, date, hardware
"""

import json
from pathlib import Path
from typing import Any

import torch

from minillm.adapters.peft_folder import load_peft, write_peft
from minillm.data import Conversations, Tokenizer, dataset_of
from minillm.files import write_whole
from minillm.measure.provenance import provenance
from minillm.model import Transformer, load_hf, save_hf
from minillm.parallel.sharding.full_state import full_state
from minillm.parallel.sharding.state import LocalState
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Trainer
from minillm.train.validation import validate


def export(trainer: Trainer, tokenizer: Tokenizer, folder: str | Path, command: str, **about: Any) -> dict[str, Any]:
    """Writes the folder and returns training.json, whose losses are measured on the rounded weights as loaded back.

    command: what to type to make the folder again; about: more that belongs in training.json. With several ranks all
    of them call this and rank 0 writes.
    ValueError if the folder holds a model of another shape, OSError if the disk refuses.
    """
    folder = Path(folder)
    rounded = Transformer(trainer.config.model, seed=None, device="cpu", dtype=torch.bfloat16)
    weights = LocalState(None, trainer.parallel, trainer.precision.weights)
    rounded.load_state_dict(full_state(weights, trainer.parallel.group)["model"])
    if not trainer.parallel.is_root:
        return {}
    save_hf(rounded, folder)
    tokenizer.save(folder)
    about["parameters"] = sum(parameter.numel() for parameter in rounded.parameters())
    return _about(trainer, folder, command, **about, **_losses(trainer, folder))


def export_adapter(
    trainer: Trainer, folder: str | Path, command: str, base: Path | None, **about: Any
) -> dict[str, Any]:
    """Writes a folder of peft's, with training.json, whose losses are those of the base as stored with the adapters as
    loaded. base: the folder that training started from, without which there are no losses. Otherwise as `export`."""
    folder, config = Path(folder), trainer.config
    weights = LocalState(None, trainer.parallel, trainer.precision.weights)
    named = full_state(weights, trainer.parallel.group)["model"]
    if not trainer.parallel.is_root:
        return {}
    write_peft(named, config.model, config.adapter, folder, base=base, fingerprint=config.base or "")
    about["parameters"] = sum(each.numel() for each in named.values())
    return _about(trainer, folder, command, **about, **(_losses(trainer, base, folder) if base else {}))


def _about(trainer: Trainer, folder: Path, command: str, **about: Any) -> dict[str, Any]:
    """Writes training.json and returns what it says."""
    origin = provenance(command)
    written = {
        "command": command,
        "steps": trainer.steps_done,
        "tokens": trainer.steps_done * trainer.config.tokens_per_step * trainer.parallel.world_size,
        **about,
        **{key: origin[key] for key in ("date", "hardware", "cores", "versions")},
        "config": trainer.config.to_json(),
    }
    write_whole(folder / "training.json", json.dumps(written, indent=1) + "\n")
    return written


def _losses(trainer: Trainer, folder: Path, adapter: Path | None = None) -> dict[str, float]:
    """Validation of the exported weights, computed in float32 as `generate` does."""
    if trainer.held_out is None:
        return {}
    model = load_hf(folder, dtype=torch.float32, device=trainer.device)
    if adapter:
        load_peft(model, adapter, fingerprint=trainer.config.base or "")
    dataset = dataset_of(trainer.held_out, trainer.config.seq_len)
    parallel = SingleDevice()
    parallel.wrap(model)
    how = {"device": trainer.device, "parallel": parallel, "documents": isinstance(trainer.held_out, Conversations)}
    return validate(model, dataset, trainer.config.batch_size, **how).to_json()
