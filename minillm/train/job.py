"""A run from its settings to its model folder, as every rank of it carries it out.

runs/NAME/run.json    the settings it was started with, so that --resume needs no others; how many data-parallel ranks
                      they are for ("dp") and torchrun's name for the job ("job"), so that its restarts find the run
"""

import difflib
import json
import shlex
import sys
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillm.adapters.start import BaseFolder
from minillm.comm import Group
from minillm.data import (
    Conversations,
    Preferences,
    Tokenizer,
    Tokens,
    corpus,
    read_conversations,
    read_preferences,
    tokenize,
)
from minillm.data.conversations import is_conversations
from minillm.files import write_whole
from minillm.measure.machine import Machine, machine
from minillm.model import Transformer, load_hf
from minillm.model.generate import device_of, folder_of
from minillm.model.hf.load import read_config
from minillm.predict.model import bits_per_byte, entropy
from minillm.train.checkpoint.export import export, export_adapter
from minillm.train.config import TrainConfig
from minillm.train.fault_tolerance.elastic import accumulate_for, job_id
from minillm.train.parallel_config import ParallelConfig
from minillm.train.precision import PRECISIONS
from minillm.train.presets import preset
from minillm.train.run import fit
from minillm.train.strategies.hybrid import make_strategy
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.teacher import Teacher
from minillm.train.trainer import Trainer

SETTINGS_FILE = "run.json"
DEFAULTS: dict[str, Any] = {"model_size": "target", "experts": None, "top_k": None, "data": None, "teacher": None}
MODEL_SETTINGS = ("model_size", "experts", "top_k")
DEFAULTS |= {field.name: field.default for field in fields(TrainConfig) if field.default is not MISSING}
ADAPTER_SETTINGS = ("target", "alpha", "rslora", "lora_dropout", "qlora", "dpo")
LATER = (
    "teacher",
    "distil_share",
    "distil_temperature",
    "base",
    "lora",
    *ADAPTER_SETTINGS,
)  # settings that runs of before they were there do without


@dataclass(frozen=True)
class TrainingJob:
    """What every rank of a run has to know. settings: of the names in `DEFAULTS`, what a resumed run keeps.

    offload: "cpu" or a folder for ZeRO's shards; device: "" for a GPU if there is one; export_to: a model folder.
    is_locked: whether this process, or the one that starts the ranks, holds the folder's lock already.
    """

    folder: Path
    settings: dict[str, Any]
    parallel: ParallelConfig
    resume: bool = False
    offload: str | None = None
    device: str = ""
    time_parts: bool = True
    save_every: int = 200
    keep: int = 2
    save_in_background: bool = False
    validate_every: int = 100
    track_memory: bool = False
    export_to: Path | None = None
    is_locked: bool = False

    @cached_property
    def config(self) -> TrainConfig:
        """The training configuration. Raises ValueError that names the setting which is not possible."""
        others = (*MODEL_SETTINGS, "data", "teacher")
        settings = {name: value for name, value in self.settings.items() if name not in others}
        if is_conversations(self.settings["data"]) and self.settings["dpo"] is None:
            settings["documents"] = True
        if (base := self.base()) is not None:
            return TrainConfig(base.config, **settings | {"base": base.fingerprint})
        size, experts, top_k = (self.settings[name] for name in MODEL_SETTINGS)
        model = preset(size, Tokenizer.load().vocab_size, settings["seq_len"], experts, top_k)
        return TrainConfig(model, **settings)

    def base(self) -> BaseFolder | None:
        """The folder of the setting "base"; None if the run starts from its seed."""
        name = self.settings["base"]
        return None if name is None else BaseFolder(folder_of(name, "--base"))

    def tokenizer(self) -> Tokenizer:
        """The base's, or the committed one."""
        name = self.settings["base"]
        return Tokenizer.load() if name is None else Tokenizer.load(folder_of(name, "--base"))

    @property
    def model_name(self) -> str:
        """What the run is called where it has no name of its own."""
        return self.settings["model_size"] if self.settings["base"] is None else folder_of(self.settings["base"]).name

    def texts(self) -> tuple[Tokens | Conversations | Preferences, Tokens | Conversations]:
        """The tokens to train on and those to validate on. A .jsonl file holds conversations, with dpo pairs."""
        if self.settings["dpo"] is not None:
            if not is_conversations(self.settings["data"]):
                raise ValueError(f"--dpo {self.settings['dpo']} learns from pairs of answers: give --data PAIRS.jsonl")
            return read_preferences(self.settings["data"], self.tokenizer())
        if is_conversations(self.settings["data"]):
            return read_conversations(self.settings["data"], self.tokenizer())
        text, tokenizer = corpus(self.settings["data"]), self.tokenizer()
        return tokenize(text, tokenizer, "train"), tokenize(text, tokenizer, "validation")

    def teacher(self) -> Transformer | None:
        """The model of the setting "teacher"; None if there is none."""
        name = self.settings["teacher"]
        return None if name is None else load_hf(folder_of(name), dtype=torch.float32)

    def check_teacher(self) -> None:
        """ValueError if the folder holds no model, or one that cannot teach this run's."""
        if (name := self.settings["teacher"]) is None:
            for setting in ("distil_share", "distil_temperature"):
                if (value := self.settings[setting]) != DEFAULTS[setting]:
                    option = setting.replace("_", "-")
                    raise ValueError(f"--{option} {value} is of a teacher's loss: name one with --teacher")
            return
        folder = folder_of(name, "--teacher")
        Teacher.check(read_config(folder), self.config)
        if Tokenizer.load(folder).fingerprint != self.tokenizer().fingerprint:
            raise ValueError(f"--teacher {name} has another tokenizer: choose one that has the student's")

    def torch_device(self) -> torch.device:
        """The device. Raises ValueError if it cannot be used."""
        return device_of(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def save_settings(self) -> None:
        """Makes the run's folder and writes run.json. Raises ValueError if the disk refuses."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = self.settings | {"dp": self.parallel.dp, "job": job_id()}
            write_whole(self.folder / SETTINGS_FILE, json.dumps(about, indent=1) + "\n")
        except OSError as error:
            raise ValueError(
                f"{self.folder} cannot hold a run ({error.strerror}): name another --run or --runs"
            ) from error

    def command(self) -> str:
        """The command that makes the exported folder again."""
        words = ["python", "-m", "minillm", "train"]
        for name, value in self.settings.items():
            is_said = name == "steps" or (name == "distil_share" and self.settings["teacher"])
            is_said = is_said or (name == "model_size" and self.settings["base"] is None)  # which says it otherwise
            if is_said or value != DEFAULTS[name]:
                words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return shlex.join([*words, "--export", str(self.export_to)])


def saved_settings(folder: Path, given: dict[str, Any], dp: int = 1) -> dict[str, Any]:
    """The settings of the run in `folder` for `dp` data-parallel ranks, which make the same steps as those before.

    ValueError if there is none, if its file is damaged, if `given` contradicts it or if its steps do not divide."""
    saved = _read_settings(folder)
    for name, value in given.items():
        if saved[name] != value:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} {value}: {folder} was trained with {saved[name]}; leave it out or name another --run"
            )
    windows = saved.pop("dp") * saved["batch_size"] * saved["accumulate"]
    del saved["job"]
    accumulate = accumulate_for(windows, saved["batch_size"], dp)
    return saved | {"accumulate": accumulate, "betas": tuple(saved["betas"])}  # JSON knows no tuples


def run_of_job(runs: Path, name: str | None) -> Path | None:
    """The newest run that torchrun's job of this name has begun; None if there is none, or the job has no name."""
    if name is None:
        return None
    found = [path for path in runs.glob(f"*/{SETTINGS_FILE}") if _job_in(path) == name]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def _job_in(path: Path) -> str | None:
    try:
        return _read_settings(path.parent)["job"]
    except ValueError:
        return None


def _read_settings(folder: Path) -> dict[str, Any]:
    """What `save_settings` wrote. ValueError names what is wrong with it."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(f"--resume: {folder} holds no run: name one with --run, or start without --resume")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"it cannot be read, {error}") from error
    if not isinstance(saved, dict):
        raise _damaged(path, f"it holds {saved!r:.40}, not settings by name")
    saved = {name: DEFAULTS[name] for name in LATER} | saved
    for name in [*DEFAULTS, "dp", "job"]:
        if name not in saved:
            raise _damaged(path, f"it lacks {name!r}")
    for name, value in saved.items():
        if name not in DEFAULTS and name not in ("dp", "job"):
            close = difflib.get_close_matches(name, DEFAULTS, n=1)
            raise _damaged(path, f"{name!r} is not a setting" + (f", perhaps {close[0]!r} is meant" if close else ""))
        if not _fits(name, value):
            raise _damaged(path, f"{name} cannot be {value!r:.40}")
    return saved


def _fits(name: str, value: Any) -> bool:
    """Whether a value has the type of the setting; TrainConfig says whether it is a good one."""
    if value is None and (name in ("job", "lora", "alpha", "dpo") or name in OPTIONAL):
        return True
    if name in TEXTS:
        return isinstance(value, str)
    if name in ("dp", "batch_size", "accumulate"):  # which the steps of other numbers of ranks are worked out from
        return isinstance(value, int) and not isinstance(value, bool) and value > 0
    if name == "betas":
        return isinstance(value, list) and len(value) == 2 and all(_is_number(each) for each in value)
    default = DEFAULTS[name]
    return isinstance(value, type(default)) if isinstance(default, str | bool) else _is_number(value)


TEXTS = ("data", "job", "teacher", "base")
OPTIONAL = ("data", "teacher", "base", "experts", "top_k", "max_grad_norm", "spike_nats")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is damaged ({what}): restore it, or start another run")


def train(group: Group | None, job: TrainingJob) -> dict[str, Any]:
    """The whole run on one rank of `group`, or on one device without a group. Returns what --json writes."""
    if group:
        job = group.gather_objects(job)[0]  # under torchrun every process has made its own, and its own new folder
    with make_strategy(group, job.parallel, job.offload) if group else SingleDevice() as strategy:
        return _train(group, job, strategy)


def _train(group: Group | None, job: TrainingJob, strategy: SingleDevice) -> dict[str, Any]:
    config, (tokens, held_out) = job.config, job.texts()
    device = group.device if group else job.torch_device()
    peak = peak_flops(machine(), device, PRECISIONS[config.precision].compute) if strategy.is_root else None
    if peak and device.type != "cpu":  # ranks on a CPU share it
        peak *= group.world_size if group else 1
    trainer = Trainer(
        config,
        tokens,
        held_out,
        device=device,
        peak_flops=peak,
        parallel=strategy,
        teacher=job.teacher(),
        time_parts=job.time_parts,
        base=job.base(),
    )
    how = {"save_every": job.save_every, "validate_every": job.validate_every, "lock": not job.is_locked}
    saves = {"keep": job.keep, "save_in_background": job.save_in_background, "tokenizer": job.tokenizer().fingerprint}
    done = fit(trainer, job.folder, resume=job.resume, track_memory=job.track_memory, **how, **saves)
    if strategy.is_root and not (job.folder / SETTINGS_FILE).exists():
        problem = f"{job.folder} was moved or removed while the run went on: what it has saved since is there again."
        print(f"minillm: {problem}", file=sys.stderr)
        job.save_settings()  # which --resume needs
    found = {"run": str(done.folder), "steps_done": done.steps_done, "interrupted": done.interrupted}
    found |= {"losses": done.losses}
    if trainer.loss_spikes.skipped:
        found["skipped_windows"] = [list(each) for each in trainer.loss_spikes.skipped]
    if done.peak is not None:
        found["peak_bytes"] = dict(done.peak.items())
    if done.interrupted:
        return found
    unigram = entropy(np.bincount(tokens.array).tolist())
    bits = bits_per_byte(unigram, len(tokens), tokens.text_bytes)
    found |= done.validation.to_json() | {"unigram_entropy": unigram, "unigram_bits_per_byte": bits}
    if job.export_to:
        about = {"data": job.settings["data"] or "stdlib"}
        if config.adapter:
            base = folder_of(job.settings["base"]) if job.settings["base"] else None
            made = export_adapter(trainer, job.export_to, job.command(), base, **about)
        else:
            made = export(trainer, job.tokenizer(), job.export_to, job.command(), **about)
        found["exported"] = {"folder": str(job.export_to), "base": job.settings["base"], **made}
    return found


def peak_flops(card: Machine, device: torch.device, dtype: torch.dtype) -> float | None:
    """The measured FLOP/s that this device could do in `dtype`; None where the card has no number for it."""
    if device.type == "cuda":
        return card.gpu and (card.gpu.peak_flops_fp32 if dtype == torch.float32 else card.gpu.peak_flops_bf16)
    return {torch.float32: card.peak_flops, torch.bfloat16: card.peak_flops_bf16}.get(dtype)
