"""What the trained proposers share: their weights in a folder, and the target's hidden states.

checkpoints/medusa/model.safetensors   the head's own tensors in bfloat16; what it borrows of the target is not in it
checkpoints/medusa/config.json         its sizes, and those of the target that it was trained on
checkpoints/medusa/training.json       the command that makes it, and what came out
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from minillm.model import AttentionFunction, Transformer
from minillm.model.generate import CHECKPOINTS
from minillm.model.hf import weights
from minillm.model.hf.write import write

Head = TypeVar("Head", bound=nn.Module)


def hidden_states(
    target: Transformer, tokens: Tensor, positions: Tensor | None = None, attention: AttentionFunction | None = None
) -> list[Tensor]:
    """tokens: [batch, seq] -> [batch, seq, hidden] after the embedding and after each block, before the final norm."""
    where = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
    states = [target.embedding(tokens)]
    rotation = target.rope(where, states[0].dtype)
    for block in target.blocks:
        states.append(block(states[-1], rotation, attention or target.attention, positions))
    return states


def sizes(target: Transformer) -> dict[str, int]:
    """What of a target a head depends on."""
    return {name: getattr(target.config, name) for name in ("vocab_size", "hidden_size", "num_layers")}


def save(kind: str, head: nn.Module, options: dict, target: Transformer, folder: Path, training: dict) -> None:
    """Writes the folder, all of it or nothing. options: what `load` hands to `make` again."""
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in head.state_dict().items()}
    config = {"kind": kind, "options": options, "target": sizes(target)}
    write(tensors, folder, max_shard_bytes=None, beside={"config.json": config, "training.json": training})


def load(kind: str, make: Callable[..., Head], target: Transformer, folder: str | Path | None = None) -> Head:
    """`make(target.config, **options)` with the weights in a folder (None: the committed ones), like the target's own.

    ValueError, naming the command that makes them, if there are none; and if they were trained on another target.
    """
    export, folder = ("", CHECKPOINTS / kind) if folder is None else (f" --export {folder}", Path(folder))
    command = f"`python -m minillm train-heads --kind {kind}{export}`"
    if not (folder / "config.json").is_file():
        raise ValueError(f"there are no {kind} weights in {folder}: train them with {command}.")
    config, stored = json.loads((folder / "config.json").read_text()), weights.read(folder)
    if config.get("kind") != kind or config.get("target") != sizes(target):
        raise ValueError(
            f"{folder} holds {config.get('kind')} weights for a target of {config.get('target')}, not {kind} weights "
            f"for {sizes(target)}: train them with {command}."
        )
    like = target.embedding.weight
    head = make(target.config, **config["options"]).to(device=like.device, dtype=like.dtype)
    if stored.keys() != head.state_dict().keys():
        raise ValueError(
            f"{folder} does not hold the tensors that its config.json asks for: train them with {command}."
        )
    head.load_state_dict({name: file.get_tensor(name) for name, file in stored.items()})
    return head.eval().requires_grad_(False)
