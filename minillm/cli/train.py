"""`python -m minillm train`: from the corpus to a run, and from a run to a model folder."""

import json
import os
import shlex
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from typer import Option

from minillm.comm import Group, is_root, launch
from minillm.data import TokenDataset, Tokenizer, Tokens, corpus, tokenize
from minillm.measure.machine import Machine, machine
from minillm.measure.provenance import JsonFile, provenance, write_json
from minillm.model.generate import device_of
from minillm.model.huggingface import check_folder
from minillm.parallel.pipeline_parallel.schedules import SCHEDULES
from minillm.predict.data import bits_per_byte, entropy
from minillm.predict.model import parameters
from minillm.train.activation_checkpointing import RECOMPUTE
from minillm.train.checkpoint import storage as checkpoint
from minillm.train.checkpoint.export import export
from minillm.train.config import TrainConfig
from minillm.train.follow import follow
from minillm.train.parallel_config import ParallelConfig
from minillm.train.precision import PRECISIONS
from minillm.train.presets import SIZES, preset
from minillm.train.run import fit
from minillm.train.strategies.sharded import make_strategy
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Trainer

# What a run is made from: saved beside it, so that --resume needs no other option.
DEFAULTS: dict[str, Any] = {"model_size": "target", "data": None}
DEFAULTS |= {field.name: field.default for field in fields(TrainConfig) if field.default is not MISSING}
RUN_FILE = "run.json"
TIMEOUT_S = 600.0  # a rank may wait this long for another one, such as for a validation


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
    dp: Annotated[
        int | None, Option(help="Data-parallel ranks; under torchrun what its processes leave for it.", min=1)
    ] = None,
    zero: Annotated[int, Option(help="ZeRO stage over those ranks: 0 to 3.", min=0, max=3)] = 0,
    offload: Annotated[
        str | None, Option(metavar="cpu|PATH", help="Keep ZeRO's shards in host memory, or in a file there.")
    ] = None,
    dp_replicate: Annotated[
        int, Option(help="Groups of data-parallel ranks that hold the same ZeRO shards (HSDP).", min=1)
    ] = 1,
    tp: Annotated[int, Option(help="Tensor-parallel ranks, which share every layer.", min=1)] = 1,
    sp: Annotated[bool, Option("--sp", help="Sequence parallelism among those.")] = False,
    pp: Annotated[int, Option(help="Pipeline stages.", min=1)] = 1,
    schedule: Annotated[str, Option(help=f"Of the pipeline: {', '.join(SCHEDULES)}.")] = "1f1b",
    microbatches: Annotated[
        int | None,
        Option(help="Into how many the pipeline cuts a step's windows; by default up to 4 per stage.", min=1),
    ] = None,
    runs: Annotated[Path, Option(metavar="FOLDER", help="Where runs are kept.")] = Path("runs"),
    json_file: JsonFile = None,
) -> int:
    """Train a model on the standard library's source, or on your text. Ctrl-C saves; --resume goes on."""
    given = {name: context.params[name] for name in DEFAULTS if context.params.get(name) is not None}
    folder = runs / run if run else _latest(runs) if resume else _unused(runs, given.get("model_size", "target"))
    settings = _saved(folder, given) if resume else DEFAULTS | given
    if offload and not zero:
        raise ValueError(f"--offload {offload} needs shards to move: add --zero 1, 2 or 3")
    config = _config(settings, Tokenizer.load().vocab_size)
    rows = config.batch_size * config.accumulate
    layout = _layout(dp, zero, dp_replicate, tp, sp, pp, schedule, microbatches, rows)
    layout.check(config.model, config.seq_len)
    if offload and layout.is_hybrid:
        raise ValueError(f"--offload {offload} is for ZeRO alone: leave it out with --tp and --pp")
    if config.compile and layout.is_hybrid:
        raise ValueError("--compile does not look through the messages inside a model: leave it out with --tp and --pp")
    plan = Plan(folder, settings, resume, layout, offload, device, save_every, validate_every, memory, export_to)
    _device(device)
    if export_to:
        _check_export(export_to, config)
    TokenDataset(_texts(settings)[0], config.seq_len)  # tokens are made once here, found by the ranks
    world_size = layout.world_size
    if is_root():
        ranks = f" on {world_size} ranks" if world_size > 1 else ""
        count = parameters(config.model).total / 1e6
        print(f"{settings['model_size']} of {count:.2f} M parameters{ranks}, kept in {folder}", flush=True)
        if not (folder / checkpoint.FILE).exists():
            _begin(folder, settings)
    try:
        if "RANK" in os.environ:
            found = launch(train, world_size, plan, timeout=TIMEOUT_S, device=_kind(device))[0]
        elif world_size > 1 or zero:
            with follow(folder, config.steps):
                found = launch(
                    train, world_size, replace(plan, progress=False), timeout=TIMEOUT_S, device=_kind(device)
                )[0]
        else:
            found = train(None, plan)
    except OSError as error:
        raise ValueError(f"{error} Free some space, then go on with --resume --run {folder.name}.") from error
    if is_root():
        _report(found, folder)
        write_json(json_file, {"provenance": provenance(), **found})
    return 130 if found["interrupted"] else 0


@dataclass(frozen=True)
class Plan:
    """What every rank of a run has to know."""

    folder: Path
    settings: dict[str, Any]
    resume: bool
    layout: ParallelConfig
    offload: str | None
    device: str
    save_every: int
    validate_every: int
    memory: bool
    export_to: Path | None
    progress: bool = True


def train(group: Group | None, plan: Plan) -> dict[str, Any]:
    """The whole run on one rank, or alone. Returns what --json writes."""
    if group:
        plan = group.gather_objects(plan)[0]  # under torchrun every process has made its own, and its own new folder
    settings, tokenizer = plan.settings, Tokenizer.load()
    config, (tokens, held_out) = _config(settings, tokenizer.vocab_size), _texts(settings)
    where = group.device if group else _device(plan.device)
    form = make_strategy(group, plan.layout, plan.offload) if group else SingleDevice()
    peak = peak_flops(machine(), where, PRECISIONS[config.precision].compute) if form.is_root else None
    if peak and where.type != "cpu":  # ranks on a CPU share it
        peak *= group.world_size if group else 1
    trainer = Trainer(config, tokens, held_out, device=where, peak_flops=peak, parallel=form)
    intervals = {"save_every": plan.save_every, "validate_every": plan.validate_every}
    done = fit(trainer, plan.folder, resume=plan.resume, census=plan.memory, progress=plan.progress, **intervals)
    found: dict[str, Any] = {"run": str(done.folder), "steps_done": done.steps_done, "interrupted": done.interrupted}
    found |= {"losses": done.losses}
    if done.peak is not None:
        found["peak_bytes"] = dict(done.peak.items())
    if done.interrupted:
        return found
    unigram = entropy(np.bincount(tokens.array).tolist())
    bits = bits_per_byte(unigram, len(tokens), tokens.text_bytes)
    found |= done.validation.to_json() | {"unigram_entropy": unigram, "unigram_bits_per_byte": bits}
    if plan.export_to:
        made = export(trainer, tokenizer, plan.export_to, _command(plan), data=settings["data"] or "stdlib")
        found["exported"] = {"folder": str(plan.export_to), **made}
    return found


def _layout(
    dp: int | None,
    zero: int,
    dp_replicate: int,
    tp: int,
    sp: bool,
    pp: int,
    schedule: str,
    microbatches: int | None,
    rows: int,
) -> ParallelConfig:
    """rows: windows of a step on each data-parallel rank. ValueError for what cannot be."""
    processes = int(os.environ.get("WORLD_SIZE", (dp or 1) * tp * pp))
    if processes != (dp or max(1, processes // (tp * pp))) * tp * pp:
        given = f"--dp {dp} " if dp else ""
        raise ValueError(
            f"{given}--tp {tp} --pp {pp} does not fit torchrun's {processes} processes: change one of them"
        )
    spread = {"dp": processes // (tp * pp), "zero": zero, "tp": tp, "sequence": sp, "pp": pp, "schedule": schedule}
    spread["dp_replicate"] = dp_replicate
    if pp == 1:
        if microbatches:
            raise ValueError(f"--microbatches {microbatches} is for a pipeline: add --pp, or use --accumulate")
        return ParallelConfig(**spread)
    if microbatches and rows % microbatches:
        raise ValueError(
            f"--microbatches {microbatches} does not divide the {rows} windows of a step on each data-parallel rank "
            "(--batch-size times --accumulate): change one of them"
        )
    problem = None
    for count in [microbatches] if microbatches else [m for m in range(4 * pp, 0, -1) if rows % m == 0]:
        try:
            return ParallelConfig(accumulate=count, **spread)
        except ValueError as error:
            problem = error
    raise problem


def peak_flops(card: Machine, device: torch.device, dtype: torch.dtype) -> float | None:
    """The measured FLOP/s that this device could do in `dtype`; None where the card has no number for it."""
    if device.type == "cuda":
        return card.gpu and (card.gpu.peak_flops_fp32 if dtype == torch.float32 else card.gpu.peak_flops_bf16)
    return {torch.float32: card.peak_flops, torch.bfloat16: card.peak_flops_bf16}.get(dtype)


def _config(settings: dict[str, Any], vocab_size: int) -> TrainConfig:
    model = preset(settings["model_size"], vocab_size, settings["seq_len"])
    return TrainConfig(model, **{name: value for name, value in settings.items() if name not in ("model_size", "data")})


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
    return DEFAULTS | saved | {"betas": tuple(saved["betas"])}  # JSON knows no tuples


def _check_export(folder: Path, config: TrainConfig) -> None:
    """Before the hours that it takes: can the model be written there?"""
    check_folder(folder, config.model)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"--export {folder}: {there} is a file, name another folder")


def _begin(folder: Path, settings: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{folder} cannot hold a run ({error.strerror}): name another --run or --runs") from error


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


def _texts(settings: dict[str, Any]) -> tuple[Tokens, Tokens]:
    """Tokens to train on and to validate on."""
    text, tokenizer = corpus(settings["data"]), Tokenizer.load()
    return tokenize(text, tokenizer, "train"), tokenize(text, tokenizer, "validation")


def _kind(device: str) -> str | None:
    """The kind of device that ranks are to use, for `launch`; None: what there is."""
    return device.partition(":")[0] or None


def _device(name: str) -> torch.device:
    return device_of(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _report(found: dict[str, Any], folder: Path) -> None:
    if peak := found.get("peak_bytes"):
        print("\nmemory of the first step, each kind at its fullest")
        print("\n".join(f"{kind:<10} {size / 2**20:>10.3f} MiB" for kind, size in peak.items()), end="\n\n")
    if found["interrupted"]:
        print(f"saved after step {found['steps_done']}: python -m minillm train --resume --run {folder.name}")
        return
    loss, bits = found["validation_loss"], found["bits_per_byte"]
    unigram, unigram_bits = found["unigram_entropy"], found["unigram_bits_per_byte"]
    print(f"validation loss {loss:.4f} nats/token, {bits:.4f} bits per byte")
    print(f"unigram entropy {unigram:.4f} nats/token, {unigram_bits:.4f} bits per byte: the best that ignores context")
    if made := found.get("exported"):
        print(
            f"exported: {made['bits_per_byte']:.3f} bits per byte; python -m minillm generate --model {made['folder']}"
        )


def _command(plan: Plan) -> str:
    """What to type to make the exported folder again."""
    words = ["python", "-m", "minillm", "train"]
    for name, value in plan.settings.items():
        if name in ("model_size", "steps") or value != DEFAULTS[name]:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return shlex.join([*words, "--export", str(plan.export_to)])
