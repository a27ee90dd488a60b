"""A run from its settings to its model folder, as every rank of it carries it out.

runs/NAME/run.json    the settings it was started with, so that --resume needs no others
"""

import json
import shlex
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillm.comm import Group
from minillm.data import Tokenizer, Tokens, corpus, tokenize
from minillm.measure.machine import Machine, machine
from minillm.model.generate import device_of
from minillm.predict.data import bits_per_byte, entropy
from minillm.train.checkpoint.export import export
from minillm.train.config import TrainConfig
from minillm.train.parallel_config import ParallelConfig
from minillm.train.precision import PRECISIONS
from minillm.train.presets import preset
from minillm.train.run import fit
from minillm.train.strategies.sharded import make_strategy
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Trainer

SETTINGS_FILE = "run.json"
DEFAULTS: dict[str, Any] = {"model_size": "target", "data": None}
DEFAULTS |= {field.name: field.default for field in fields(TrainConfig) if field.default is not MISSING}


@dataclass(frozen=True)
class TrainingJob:
    """What every rank of a run has to know. settings: of the names in `DEFAULTS`, what a resumed run keeps.

    offload: "cpu" or a folder for ZeRO's shards; device: "" for a GPU if there is one; export_to: a model folder.
    """

    folder: Path
    settings: dict[str, Any]
    parallel: ParallelConfig
    resume: bool = False
    offload: str | None = None
    device: str = ""
    save_every: int = 200
    keep: int = 2
    save_in_background: bool = False
    validate_every: int = 100
    track_memory: bool = False
    export_to: Path | None = None

    @cached_property
    def config(self) -> TrainConfig:
        """ValueError names the setting that cannot be."""
        settings = {name: value for name, value in self.settings.items() if name not in ("model_size", "data")}
        vocab_size = Tokenizer.load().vocab_size
        return TrainConfig(preset(self.settings["model_size"], vocab_size, settings["seq_len"]), **settings)

    def texts(self) -> tuple[Tokens, Tokens]:
        """Tokens to train on and to validate on."""
        text, tokenizer = corpus(self.settings["data"]), Tokenizer.load()
        return tokenize(text, tokenizer, "train"), tokenize(text, tokenizer, "validation")

    def torch_device(self) -> torch.device:
        """ValueError if it cannot be used."""
        return device_of(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def save_settings(self) -> None:
        """Makes the run's folder. ValueError if the disk refuses."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / SETTINGS_FILE).write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{self.folder} cannot hold a run ({error.strerror}): name another --run or --runs"
            ) from error

    def command(self) -> str:
        """What to type to make the exported folder again."""
        words = ["python", "-m", "minillm", "train"]
        for name, value in self.settings.items():
            if name in ("model_size", "steps") or value != DEFAULTS[name]:
                words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return shlex.join([*words, "--export", str(self.export_to)])


def saved_settings(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run in `folder`; ValueError if there is none or if `given` contradicts them."""
    try:
        saved = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--resume: {folder} holds no run: name one with --run, or start without --resume") from error
    for name, value in given.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} {value}: {folder} was trained with {saved.get(name)}; leave it out or name another --run"
            )
    return DEFAULTS | saved | {"betas": tuple(saved["betas"])}  # JSON knows no tuples


def train(group: Group | None, job: TrainingJob) -> dict[str, Any]:
    """The whole run on one rank of `group`, or on one device without a group. Returns what --json writes."""
    if group:
        job = group.gather_objects(job)[0]  # under torchrun every process has made its own, and its own new folder
    config, (tokens, held_out) = job.config, job.texts()
    device = group.device if group else job.torch_device()
    strategy = make_strategy(group, job.parallel, job.offload) if group else SingleDevice()
    peak = peak_flops(machine(), device, PRECISIONS[config.precision].compute) if strategy.is_root else None
    if peak and device.type != "cpu":  # ranks on a CPU share it
        peak *= group.world_size if group else 1
    trainer = Trainer(config, tokens, held_out, device=device, peak_flops=peak, parallel=strategy)
    intervals = {"save_every": job.save_every, "validate_every": job.validate_every}
    saves = {"keep": job.keep, "save_in_background": job.save_in_background, "tokenizer": Tokenizer.load().fingerprint}
    done = fit(trainer, job.folder, resume=job.resume, track_memory=job.track_memory, **intervals, **saves)
    found = {"run": str(done.folder), "steps_done": done.steps_done, "interrupted": done.interrupted}
    found |= {"losses": done.losses}
    if done.peak is not None:
        found["peak_bytes"] = dict(done.peak.items())
    if done.interrupted:
        return found
    unigram = entropy(np.bincount(tokens.array).tolist())
    bits = bits_per_byte(unigram, len(tokens), tokens.text_bytes)
    found |= done.validation.to_json() | {"unigram_entropy": unigram, "unigram_bits_per_byte": bits}
    if job.export_to:
        made = export(trainer, Tokenizer.load(), job.export_to, job.command(), data=job.settings["data"] or "stdlib")
        found["exported"] = {"folder": str(job.export_to), **made}
    return found


def peak_flops(card: Machine, device: torch.device, dtype: torch.dtype) -> float | None:
    """The measured FLOP/s that this device could do in `dtype`; None where the card has no number for it."""
    if device.type == "cuda":
        return card.gpu and (card.gpu.peak_flops_fp32 if dtype == torch.float32 else card.gpu.peak_flops_bf16)
    return {torch.float32: card.peak_flops, torch.bfloat16: card.peak_flops_bf16}.get(dtype)
