"""A folder of peft's (Hugging Face's library of adapters), in and out:

    adapter_config.json          r, lora_alpha, use_rslora, lora_dropout, target_modules, base_model_name_or_path, ...
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in]
                                 base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, r]

Which layers have an adapter is read from the tensors. What would change the result and is not covered (DoRA, trained
biases, ranks of single layers, other modules that were trained) is refused. Ours notes a fingerprint of the base among
the tensors' metadata, where peft does not look, so that an adapter is not put beside another base of the same shapes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from minillm.adapters.attach import adaptable, adapter_parameters, adapters, attach
from minillm.adapters.lora import LoraConfig, LoraLinear, sizes_of
from minillm.files import flush, new_folder, write_whole
from minillm.model.hf.families import family_of, hf_name

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, FINGERPRINT = "base_model.model.", "minillm_base"
PLAIN = {  # what other keys have to be, if they are there
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "exclude_modules": (None, [], ""),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that move its weights


@dataclass(frozen=True)
class Adapter:
    """What a folder holds.

    matrices: name of a layer -> (A [rank, in], B [out, rank]). base: the folder or the name of the model that it was
    trained on; fingerprint: of that, None if the folder does not say.
    """

    config: LoraConfig
    matrices: dict[str, tuple[Tensor, Tensor]]
    base: str | None
    fingerprint: str | None

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values())


def save_peft(
    model: nn.Module, config: LoraConfig, folder: str | Path, *, base: str | Path | None = None, fingerprint: str = ""
) -> None:
    """Writes the adapters of a whole model: all of the folder or nothing. base: what the model was loaded from;
    fingerprint: `BaseFolder.fingerprint` of it. ValueError if the folder holds something, or if Hugging Face's layout
    has no such layers."""
    write_peft(adapter_parameters(model), model.config, config, folder, base=base, fingerprint=fingerprint)


def write_peft(
    named: dict[str, Tensor],
    model_config: Any,
    config: LoraConfig,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    fingerprint: str = "",
) -> None:
    """`save_peft` of a model's adapters by name."""
    if not named:
        raise ValueError("this model has no adapters: attach or load some first.")
    if family_of(model_config) == "phi3":
        raise ValueError(
            "Phi-3's layout has query, key and value in one layer: adapters of each cannot be saved in it."
        )
    if shared := next((name for name in named if ".shared." in name), None):
        raise ValueError(f"{shared}: shared experts have no common name in Hugging Face's layouts: leave them out.")
    tensors = {f"{PREFIX}{hf_name(name)}.weight": each.detach().cpu().contiguous() for name, each in named.items()}
    layers = dict.fromkeys(hf_name(name).rpartition(".")[0] for name in named)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": config.rank,
        "lora_alpha": int(config.full_alpha) if config.full_alpha == int(config.full_alpha) else config.full_alpha,
        "use_rslora": config.rslora,
        "lora_dropout": config.dropout,
        "target_modules": list(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with new_folder(Path(folder)) as draft:
        metadata = {"format": "pt"} | ({FINGERPRINT: fingerprint} if fingerprint else {})
        save_file(tensors, draft / TENSORS, metadata)
        flush(draft / TENSORS)
        write_whole(draft / CONFIG, json.dumps(about, indent=2) + "\n", on_disk=True)


def load_peft(
    model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, fingerprint: str = ""
) -> dict[str, LoraLinear]:
    """Attaches a folder's adapters to a whole model and returns them by layer, without dropout until `model.train()`.
    dtype: of the adapters; None = the model's. fingerprint: of the model's own base, to be compared if the folder has
    noted one.

    ValueError, and the model is as it was, for a folder that is damaged or not covered, and for another base.
    """
    adapter = read_peft(folder)
    check_fits(adapter, sizes_of_layers(model), folder, fingerprint)
    exact = LoraConfig(**{**vars(adapter.config), "targets": tuple(adapter.matrices)})
    attach(model, exact, seed=None, dtype=dtype)
    made = adapters(model)
    with torch.no_grad():
        for name, (a, b) in adapter.matrices.items():
            made[name].lora_A.copy_(a)
            made[name].lora_B.copy_(b)
            made[name].eval()
    return made


def sizes_of_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the layers of a whole model that can have an adapter."""
    return {name: sizes_of(layer) for name, layer in adaptable(model).items()}


def check_fits(
    adapter: Adapter, layers: Mapping[str, tuple[int, int]], folder: str | Path, fingerprint: str = ""
) -> None:
    """ValueError if an adapter was trained on another base than a model of these layers, as far as can be told."""
    if fingerprint and adapter.fingerprint not in (None, fingerprint):
        raise ValueError(
            f"{folder} was trained on another base ({adapter.base}, fingerprint {adapter.fingerprint}, not "
            f"{fingerprint}): load it beside that one."
        )
    for name, (a, b) in adapter.matrices.items():
        if name not in layers:
            raise ValueError(f"{folder} has an adapter for {hf_name(name)}, which this model lacks: use its own base.")
        sizes, here = (b.shape[0], a.shape[1]), layers[name]
        if sizes != here:
            raise ValueError(
                f"{folder} was trained on another base: its {hf_name(name)} is {list(sizes)}, here it is {list(here)}."
            )


def read_peft(folder: str | Path) -> Adapter:
    """The adapter in a folder, in memory. ValueError, naming file and key, if it is damaged or not covered."""
    folder = Path(folder)
    raw = _read_config(folder / CONFIG)
    try:
        config = LoraConfig(
            rank=raw.get("r"),
            alpha=raw.get("lora_alpha"),
            rslora=bool(raw.get("use_rslora", False)),
            dropout=raw.get("lora_dropout") or 0.0,
            targets=tuple(_targets(raw)),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    matrices, fingerprint = _read_matrices(folder / TENSORS, config.rank)
    return Adapter(config, matrices, raw.get("base_model_name_or_path"), fingerprint)


def _targets(raw: dict[str, Any]) -> list[str]:
    """As they are told; the tensors say which layers there are."""
    targets = raw.get("target_modules") or ["all"]
    return [targets] if isinstance(targets, str) else sorted(targets)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {path.parent} is not a folder of peft's adapters.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): download or export it again.") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else None
        raise ValueError(f"{path} is of kind {kind!r}: only LORA is covered.")
    for key, allowed in PLAIN.items():
        if (value := raw.get(key, allowed[0])) not in allowed:
            raise ValueError(f"{path}: {key} {value!r} is not covered: only {allowed[0]!r} is.")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ValueError(f"{path}: init_lora_weights {start!r} changes the base's weights, and is not covered.")
    return raw


def _read_matrices(path: Path, rank: int) -> tuple[dict[str, tuple[Tensor, Tensor]], str | None]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the folder is not complete.")
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        content = path.read_bytes()  # not mapped: whatever becomes of the file later, this stays
        tensors = load(content)
    except (OSError, SafetensorError, KeyError, ValueError) as error:  # a type that torch lacks is a KeyError
        raise ValueError(f"{path} is damaged ({error}): download or export it again.") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    fingerprint = header.get("__metadata__", {}).get(FINGERPRINT)
    for key, tensor in sorted(tensors.items()):
        layer, which = _place_of(key, path)
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{path} is damaged: {key} has values that are not finite numbers.")
        if tensor.dim() != 2 or tensor.shape[0 if which == "A" else 1] != rank:
            raise ValueError(f"{path}: {key} is {list(tensor.shape)}, which does not fit r {rank}.")
        halves.setdefault(layer, {})[which] = tensor
    for layer, both in halves.items():
        if len(both) < 2:
            raise ValueError(f"{path} is damaged: {hf_name(layer)} has lora_{next(iter(both))} alone.")
    if not halves:
        raise ValueError(f"{path} is damaged: it holds no adapter.")
    return {layer: (both["A"], both["B"]) for layer, both in halves.items()}, fingerprint


def _place_of(key: str, path: Path) -> tuple[str, str]:
    """(name of the layer in our models, "A" or "B")."""
    found = re.fullmatch(
        rf"{re.escape(PREFIX)}model\.layers\.(\d+)\.(self_attn|mlp)\.([a-z]+_proj)\.lora_([AB])\.weight", key
    )
    if not found:
        raise ValueError(
            f"{path} holds {key}, for which there is no place: adapters of blocks' linear layers are read."
        )
    number, part, layer, which = found.groups()
    return f"blocks.{number}.{'attention' if part == 'self_attn' else part}.{layer}", which
