"""`python -m minillm train`: from the corpus to a run, and from a run to a model folder."""

import json
import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from typer import Option

from minillm.data import Tokenizer, Tokens, corpus, tokenize
from minillm.measure.machine import Machine, machine
from minillm.predict.data import bits_per_byte, entropy
from minillm.train import checkpoint
from minillm.train.config import TrainConfig
from minillm.train.export import export
from minillm.train.loop import Trainer
from minillm.train.precision import PRECISIONS
from minillm.train.presets import SIZES, preset
from minillm.train.recompute import RECOMPUTE
from minillm.train.run import Run, fit

# What a run is made from: saved beside it, so that --resume needs no other option.
DEFAULTS: dict[str, Any] = {"model_size": "target", "data": None}
DEFAULTS |= {field.name: field.default for field in fields(TrainConfig) if field.default is not MISSING}
RUN_FILE = "run.json"


def _of_run(name: str, **options: Any) -> Any:
    """An option that a resumed run remembers."""
    return Option(show_default=str(DEFAULTS[name]), **options)


def command(
    context: typer.Context,
    steps: Annotated[int | None, _of_run("steps", help="Updates to make in all.")] = None,
    model_size: Annotated[str | None, _of_run("model_size", metavar="SIZE", help=f"One of {', '.join(SIZES)}.")] = None,
    data: Annotated[
        str | None, Option(metavar="PATH", help="A folder of text, or a file; by default Python's standard library.")
    ] = None,
    batch_size: Annotated[int | None, _of_run("batch_size", help="Windows of text at a time.")] = None,
    accumulate: Annotated[int | None, _of_run("accumulate", help="Batches that one update adds up.")] = None,
    seq_len: Annotated[int | None, _of_run("seq_len", help="Tokens per window; the model's context.")] = None,
    lr: Annotated[float | None, _of_run("lr", help="Highest learning rate.")] = None,
    warmup_steps: Annotated[int | None, _of_run("warmup_steps", help="Steps until it is reached.")] = None,
    weight_decay: Annotated[float | None, _of_run("weight_decay", help="Of matrices.")] = None,
    precision: Annotated[str | None, _of_run("precision", help=f"One of {', '.join(PRECISIONS)}.")] = None,
    recompute: Annotated[str | None, _of_run("recompute", help=f"One of {', '.join(RECOMPUTE)}.")] = None,
    compile: Annotated[bool | None, _of_run("compile", help="Run the model through torch.compile.")] = None,
    seed: Annotated[int | None, _of_run("seed", help="Of initial weights and the order of data.")] = None,
    run: Annotated[
        str | None, Option(metavar="NAME", help="Folder under --runs; by default SIZE-1, SIZE-2, ...")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with --run, by default the latest, to the same bits.")
    ] = False,
    export_to: Annotated[
        Path | None, Option("--export", metavar="PATH", help="When done, write a model folder (bf16, Llama layout).")
    ] = None,
    device: Annotated[str, Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.")] = "",
    save_every: Annotated[int, Option(help="Steps between checkpoints.", min=1)] = 200,
    validate_every: Annotated[int, Option(help="Steps between validations.", min=1)] = 100,
    memory: Annotated[
        bool, Option("--memory", help="Show what memory was for, at its fullest in the first step.")
    ] = False,
    runs: Annotated[Path, Option(metavar="FOLDER", help="Where runs are kept.")] = Path("runs"),
) -> int:
    """Train a model on the standard library's source, or on your text. Ctrl-C saves; --resume goes on."""
    given = {name: context.params[name] for name in DEFAULTS if context.params.get(name) is not None}
    folder = runs / run if run else _latest(runs) if resume else _unused(runs, given.get("model_size", "target"))
    settings = _saved(folder, given) if resume else DEFAULTS | given
    where, tokenizer, text = _device(device), Tokenizer.load(), corpus(settings["data"])
    config = _config(settings, tokenizer.vocab_size)
    tokens, held_out = (tokenize(text, tokenizer, split) for split in ("train", "validation"))
    peak = peak_flops(machine(), where, PRECISIONS[config.precision].compute)
    trainer = Trainer(config, tokens, held_out, device=where, peak_flops=peak)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{settings['model_size']} of {count / 1e6:.2f} M parameters on {where}, kept in {folder}")
    try:
        if not (folder / checkpoint.FILE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RUN_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        done = fit(trainer, folder, resume=resume, save_every=save_every, validate_every=validate_every, census=memory)
        _report(done, trainer, tokens)
        if export_to and not done.interrupted:
            made = export(
                trainer, tokenizer, export_to, _command(settings, export_to), data=settings["data"] or "stdlib"
            )
            print(
                f"exported: {made['bits_per_byte']:.3f} bits per byte; python -m minillm generate --model {export_to}"
            )
    except OSError as error:
        raise ValueError(f"{error} Free some space, then go on with --resume --run {folder.name}.") from error
    return 130 if done.interrupted else 0


def peak_flops(card: Machine, device: torch.device, dtype: torch.dtype) -> float | None:
    """The measured FLOP/s that this device could do in `dtype`; None where the card has no number for it."""
    if device.type == "cuda":
        return card.gpu and (card.gpu.peak_flops_fp32 if dtype == torch.float32 else card.gpu.peak_flops_bf16)
    return {torch.float32: card.peak_flops, torch.bfloat16: card.peak_flops_bf16}.get(dtype)


def _config(settings: dict[str, Any], vocab_size: int) -> TrainConfig:
    model = preset(settings["model_size"], vocab_size, settings["seq_len"])
    betas = tuple(settings["betas"])
    kept = {name: value for name, value in settings.items() if name not in ("model_size", "data", "betas")}
    return TrainConfig(model, **kept, betas=betas)


def _saved(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run in `folder`; ValueError if there is none or if `given` contradicts them."""
    try:
        saved = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--resume: {folder} holds no run: name one with --run, or start without --resume") from error
    for name, value in given.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} {value}: {folder} was trained with {saved.get(name)}; leave it out or name another --run"
            )
    return DEFAULTS | saved


def _latest(runs: Path) -> Path:
    found = sorted(runs.glob(f"*/{checkpoint.FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"--resume: no run under {runs} has a checkpoint: start one without --resume")
    return found[-1].parent


def _unused(runs: Path, size: str) -> Path:
    number = 1
    while (runs / f"{size}-{number}").exists():
        number += 1
    return runs / f"{size}-{number}"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used ({str(error).splitlines()[0]}): try cpu") from error
    return device


def _report(done: Run, trainer: Trainer, tokens: Tokens) -> None:
    if done.peak is not None:
        print(f"\nmemory of the first step, each kind at its fullest\n{done.peak}\n")
    if done.interrupted:
        print(f"saved after step {done.steps_done}: python -m minillm train --resume --run {done.folder.name}")
        return
    found = done.validation
    unigram = entropy(np.bincount(tokens.array).tolist())
    bits = bits_per_byte(unigram, len(tokens), tokens.text_bytes)
    print(f"validation loss {found.loss:.4f} nats/token, {found.bits_per_byte:.4f} bits per byte")
    print(f"unigram entropy {unigram:.4f} nats/token, {bits:.4f} bits per byte: the best that ignores all context")


def _command(settings: dict[str, Any], export_to: Path) -> str:
    """What to type to make the exported folder again."""
    words = ["python", "-m", "minillm", "train"]
    for name, value in settings.items():
        if name in ("model_size", "steps") or value != DEFAULTS[name]:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return shlex.join([*words, "--export", str(export_to)])
