"""`python -m minillm train`: from the corpus to a run, and from a run to a model folder."""

import contextlib
import errno
import os
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from minillm.adapters.attach import adapted_shapes
from minillm.adapters.lora import is_adapter
from minillm.cli.given import is_given
from minillm.cli.train_checks import check, check_base, data_parallel, parallel_config
from minillm.cli.train_report import report
from minillm.comm import RankError, is_root, launch
from minillm.measure.provenance import JsonFile, provenance, write_json
from minillm.parallel.context_parallel import CONTEXTS
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from minillm.predict.model import parameters
from minillm.train.activation_checkpointing import MODES
from minillm.train.checkpoint.reader import has_checkpoint, saved_at
from minillm.train.fault_tolerance.elastic import DoesNotDivide, job_id, may_restart, possible_ranks, was_restarted
from minillm.train.fault_tolerance.goodput import read_goodput
from minillm.train.job import (
    DEFAULTS,
    SETTINGS_FILE,
    TrainingJob,
    run_of_job,
    saved_settings,
    train,
)
from minillm.train.precision import PRECISIONS
from minillm.train.presets import SIZES
from minillm.train.run import STOP, interrupts
from minillm.train.run_folder import claim_unused, locked

DISTIL_SHARE = 0.5  # of the loss, with a teacher
TIMEOUT_S = 900.0  # a rank may wait this long for another one; one that hangs is found before (heartbeat.Limits)
NODES_S = 900.0  # for which ranks of a number that does not divide wait for torchrun's nodes to come or go
RESTART_S = 60.0  # for which the ranks that torchrun starts again wait for the last of those before them to end


RUN, MODEL, ADAPTERS, DATA, DISTILLATION, OPTIMIZER, STEP, DATA_PARALLEL, PARALLEL, CHECKPOINTS, OUTPUT = (
    partial(Option, rich_help_panel=panel)
    for panel in (
        "Run", "Model", "Base and adapters", "Data", "Distillation", "Optimizer", "How a step is computed",
        "Parallel layout: data, ZeRO and experts", "Parallel layout: tensor, pipeline and context",
        "Checkpoints", "Output",
    )
)  # fmt: skip


def command(
    invocation: typer.Context,
    run: Annotated[
        str | None, RUN(metavar="NAME", help="Folder under --runs.", show_default="SIZE-1, SIZE-2, ...")
    ] = None,
    steps: Annotated[int, RUN(help="Updates to make in all.")] = DEFAULTS["steps"],
    resume: Annotated[
        bool, RUN("--resume", help="Go on with --run, or with the latest, to the same bits; its settings are kept.")
    ] = False,
    runs: Annotated[Path, RUN(metavar="FOLDER", help="Where runs are kept.")] = Path("runs"),
    seed: Annotated[int, RUN(help="Of initial weights and the order of data.")] = DEFAULTS["seed"],
    device: Annotated[str, RUN(help="cpu, cuda, cuda:1, ...", show_default="a GPU if there is one")] = "",
    model_size: Annotated[str, MODEL(metavar="SIZE", help=f"One of {', '.join(SIZES)}.")] = DEFAULTS["model_size"],
    experts: Annotated[
        int | None, MODEL(help="Experts in place of every MLP; the FLOPs of a token stay the same.")
    ] = DEFAULTS["experts"],
    top_k: Annotated[int | None, MODEL(help="Experts that a token goes to; 2 where there are some.")] = DEFAULTS[
        "top_k"
    ],
    base: Annotated[
        str | None,
        ADAPTERS(metavar="NAME|PATH", help="Start from a trained model: target, or a Hugging Face folder."),
    ] = DEFAULTS["base"],
    lora: Annotated[
        int | None,
        ADAPTERS(metavar="RANK", help="Train adapters of this rank alone; --export writes peft's folder.", min=1),
    ] = DEFAULTS["lora"],
    target: Annotated[
        str, ADAPTERS(metavar="NAMES", help="Layers with an adapter: q,v, or all, or parts of names with *.")
    ] = DEFAULTS["target"],
    alpha: Annotated[
        float | None, ADAPTERS(help="Their update is scaled by alpha / rank.", show_default="twice the rank")
    ] = DEFAULTS["alpha"],
    rslora: Annotated[bool, ADAPTERS("--rslora/--no-rslora", help="Scale by alpha / √rank instead.")] = DEFAULTS[
        "rslora"
    ],
    lora_dropout: Annotated[float, ADAPTERS(help="Of what adapters read, in training.")] = DEFAULTS["lora_dropout"],
    qlora: Annotated[bool, ADAPTERS("--qlora/--no-qlora", help="Keep the base in 4 bits (NF4).")] = DEFAULTS["qlora"],
    dpo: Annotated[
        float | None,
        ADAPTERS(metavar="BETA", help="Learn which answers of pairs are preferred (DPO); --data is a .jsonl of them."),
    ] = DEFAULTS["dpo"],
    data: Annotated[
        str | None,
        DATA(
            metavar="PATH",
            help="A folder of text, a file, or a .jsonl of chats.",
            show_default="Python's standard library",
        ),
    ] = DEFAULTS["data"],
    batch_size: Annotated[int, DATA(help="Windows of text at a time.")] = DEFAULTS["batch_size"],
    accumulate: Annotated[int, DATA(help="Batches that one update adds up.")] = DEFAULTS["accumulate"],
    seq_len: Annotated[int, DATA(help="Tokens per window; the model's context.")] = DEFAULTS["seq_len"],
    documents: Annotated[
        bool,
        DATA("--documents/--no-documents", help="Tokens see their own document only, where a window holds several."),
    ] = DEFAULTS["documents"],
    teacher: Annotated[
        str | None, DISTILLATION(metavar="NAME|PATH", help="A trained model to learn from: target, or a folder.")
    ] = DEFAULTS["teacher"],
    distil_share: Annotated[
        float, DISTILLATION(help="Of the loss, what is the teacher's.", show_default="0.5 with --teacher")
    ] = DEFAULTS["distil_share"],
    distil_temperature: Annotated[
        float, DISTILLATION(help="Flattens both models' distributions in the teacher's loss.")
    ] = DEFAULTS["distil_temperature"],
    lr: Annotated[float, OPTIMIZER(help="Highest learning rate.")] = DEFAULTS["lr"],
    warmup_steps: Annotated[int, OPTIMIZER(help="Steps until it is reached.")] = DEFAULTS["warmup_steps"],
    spike_nats: Annotated[
        float | None,
        OPTIMIZER(help="Undo a loss this far above the recent ones, from a copy in host memory.", show_default="never"),
    ] = DEFAULTS["spike_nats"],
    weight_decay: Annotated[float, OPTIMIZER(help="Of matrices.")] = DEFAULTS["weight_decay"],
    precision: Annotated[str, STEP(help=f"One of {', '.join(PRECISIONS)}.")] = DEFAULTS["precision"],
    activation_checkpointing: Annotated[str, STEP(help=f"One of {', '.join(MODES)}.")] = DEFAULTS[
        "activation_checkpointing"
    ],
    compile: Annotated[bool, STEP("--compile/--no-compile", help="Run the model through torch.compile.")] = DEFAULTS[
        "compile"
    ],
    dp: Annotated[
        int | None,
        DATA_PARALLEL(help="Data-parallel ranks.", min=1, show_default="1, or what torchrun's processes leave for it"),
    ] = None,
    zero: Annotated[int, DATA_PARALLEL(help="ZeRO stage over those ranks: 0 to 3.", min=0, max=3)] = 0,
    offload: Annotated[
        str | None, DATA_PARALLEL(metavar="cpu|PATH", help="Keep ZeRO's shards in host memory, or in a file there.")
    ] = None,
    dp_replicate: Annotated[
        int, DATA_PARALLEL(help="Groups of data-parallel ranks that hold the same ZeRO shards (HSDP).", min=1)
    ] = 1,
    ep: Annotated[
        int, DATA_PARALLEL(help="Of the data-parallel ranks, those that share the experts of a layer.", min=1)
    ] = 1,
    ep_nodes: Annotated[
        int,
        DATA_PARALLEL(
            help="Nodes that these lie on; above 1, a token crosses to a node once and goes on inside.", min=1
        ),
    ] = 1,
    tp: Annotated[int, PARALLEL(help="Tensor-parallel ranks, which share every layer.", min=1)] = 1,
    sp: Annotated[bool, PARALLEL("--sp", help="Sequence parallelism among those.")] = False,
    pp: Annotated[int, PARALLEL(help="Pipeline stages.", min=1)] = 1,
    schedule: Annotated[str, PARALLEL(help=f"Of the pipeline: {', '.join(SCHEDULES)}.")] = "1f1b",
    microbatches: Annotated[
        int | None,
        PARALLEL(help="Into how many the pipeline cuts a step's windows.", min=1, show_default="up to 4 per stage"),
    ] = None,
    cp: Annotated[int, PARALLEL(help="Context-parallel ranks, which share every sequence.", min=1)] = 1,
    context: Annotated[str, PARALLEL(help=f"Their attention: {', '.join(CONTEXTS)}.")] = "zigzag",
    node: Annotated[int, PARALLEL(help="Of a hybrid: ranks that exchange heads, with rings across.", min=1)] = 2,
    pad: Annotated[bool, PARALLEL("--pad", help="Lengthen windows that do not divide over those ranks.")] = False,
    keep_weights: Annotated[
        bool, PARALLEL("--keep-weights", help="With --pp and --zero 3: gather weights once a step and keep them.")
    ] = False,
    save_every: Annotated[int, CHECKPOINTS(help="Steps between checkpoints.", min=1)] = 200,
    keep: Annotated[int, CHECKPOINTS(help="How many checkpoints stay.", min=1)] = 2,
    save_in_background: Annotated[
        bool, CHECKPOINTS("--save-in-background", help="Train on while a checkpoint is written.")
    ] = False,
    export_to: Annotated[
        Path | None, OUTPUT("--export", metavar="PATH", help="When done, write a model folder (bf16, Llama layout).")
    ] = None,
    validate_every: Annotated[int, OUTPUT(help="Steps between validations.", min=1)] = 100,
    memory: Annotated[
        bool, OUTPUT("--memory", help="Show what memory was for, at its fullest in the first step.")
    ] = False,
    time_parts: Annotated[bool, OUTPUT("--time-parts/--no-time-parts", help="Say where a step's time went.")] = True,
    json_file: JsonFile = None,
) -> int:
    """Train a model on the standard library's source, or on your text. Ctrl-C saves; --resume goes on."""
    if model_size not in SIZES:
        raise ValueError(f"--model-size: no model size {model_size!r}: use one of {', '.join(SIZES)}")
    if run in (".", ".."):
        raise ValueError(f"--run {run} is not a name: give the run a folder of its own under {runs}")
    given = {
        name: value for name, value in invocation.params.items() if name in DEFAULTS and is_given(invocation, name)
    }
    begun = None if resume else _begun(runs, run)
    resume = resume or (begun is not None and has_checkpoint(begun))
    folder = begun or (runs / run if run else _latest(runs) if resume else None)
    dp = data_parallel(dp, {"tp": tp, "pp": pp, "cp": cp})
    is_new = not resume and not (begun and (begun / SETTINGS_FILE).exists())
    defaults = DEFAULTS | ({} if teacher is None else {"distil_share": DISTIL_SHARE})
    settings = defaults | given if is_new else _saved_settings(folder, given, dp)
    if offload and not zero:
        raise ValueError(f"--offload {offload} needs shards to move: add --zero 1, 2 or 3")
    rows = settings["batch_size"] * settings["accumulate"]
    spread = {"zero": zero, "dp_replicate": dp_replicate, "tp": tp, "sequence": sp, "pp": pp, "schedule": schedule}
    spread |= {"cp": cp, "context": context, "node": node, "pad": pad, "ep": ep, "ep_nodes": ep_nodes}
    job = TrainingJob(
        folder or runs,
        settings,
        parallel_config(dp, microbatches, rows, reshard=not keep_weights, **spread),
        resume=resume,
        offload=offload,
        device=device,
        time_parts=time_parts,
        save_every=save_every,
        keep=keep,
        save_in_background=save_in_background,
        validate_every=validate_every,
        track_memory=memory,
        export_to=export_to,
    )
    check_base(job, given)
    check(job)
    with contextlib.ExitStack() as while_running:
        if is_root():
            folder = folder or claim_unused(runs, job.model_name)
            while_running.enter_context(locked(folder, RESTART_S if begun else 0.0))
            if not begun:
                (folder / STOP).unlink(missing_ok=True)  # of a run that was killed; what is asked from here on counts
            job = replace(job, folder=folder, is_locked=True)
            _announce(job, is_new)
        found = _run(job)
    if is_root():
        if spent := read_goodput(job.folder):
            found["goodput"] = spent.to_json()
        report(found, job.folder)
        write_json(json_file, {"provenance": provenance(), **found})
    return 130 if found["interrupted"] and not may_restart() else 0  # torchrun would take 130 for a failure


def _begun(runs: Path, run: str | None) -> Path | None:
    """The run that torchrun's job began before its ranks were started again; None for a first start."""
    if run is None and may_restart() and job_id() is None:
        raise ValueError(
            "torchrun may restart this job, which then has to find its run: name the job with torchrun's --rdzv-id, or "
            "the run with --run (torchrun ... -m -- minillm train --run NAME: without -- it takes that for its own)"
        )
    found = run_of_job(runs, job_id())
    if run is None:
        return found
    return runs / run if was_restarted() or found == runs / run else None


def _saved_settings(folder: Path, given: dict[str, Any], dp: int) -> dict[str, Any]:
    """Of the run in `folder`. Ranks that its steps do not divide over wait, where torchrun may change their number: it
    ends them then."""
    try:
        return saved_settings(folder, given, dp)
    except DoesNotDivide as problem:
        if may_restart():
            if is_root():
                print(f"minillm: {problem}; waiting for nodes to come or go", file=sys.stderr, flush=True)
            time.sleep(NODES_S)
        raise


def _run(job: TrainingJob) -> dict[str, Any]:
    world_size = job.parallel.world_size
    kind = job.device.partition(":")[0] or None  # the kind of device that ranks are to use; None: what there is
    try:
        if "RANK" in os.environ:
            return launch(train, world_size, job, timeout=TIMEOUT_S, device=kind)[0]
        if world_size > 1 or job.parallel.zero:
            with interrupts(then=(job.folder / STOP).touch):  # Ctrl-C reaches the ranks by this file
                return launch(train, world_size, job, timeout=TIMEOUT_S, device=kind)[0]
        return train(None, job)
    except (OSError, RankError) as error:
        go_on = "go on with --resume" if has_checkpoint(job.folder) else "start again with"
        go_on = f"{go_on} --run {shlex.quote(job.folder.name)}"
        if getattr(error, "exitcode", None) is not None and "RANK" not in os.environ:  # killed: nothing was raised
            typer.echo(f"minillm: {str(error).splitlines()[0]}: {go_on}", err=True)
            raise typer.Exit(1) from None
        problem = error.__cause__ if isinstance(error, RankError) else error
        if not isinstance(problem, OSError) or isinstance(problem, ConnectionError):
            raise  # other ranks have gone, and the disk is not to blame
        is_full = any(os.strerror(code) in str(problem) for code in (errno.ENOSPC, errno.EDQUOT))
        advice = "free some space" if is_full else "mend that"
        said = str(problem).rstrip(".")
        raise ValueError(f"{said}: {advice}, then {go_on}.") from error


def _announce(job: TrainingJob, is_new: bool) -> None:
    world_size, count = job.parallel.world_size, parameters(job.config.model).total / 1e6
    ranks = f" on {world_size} ranks" if world_size > 1 else ""
    print(f"{job.model_name} of {count:.2f} M parameters{ranks}, kept in {job.folder}", flush=True)
    if job.config.adapter:
        shapes = adapted_shapes(job.config.model, job.config.adapter)
        trained = sum(shape.numel() for name, shape in shapes.items() if is_adapter(name))
        print(f"trains {trained:,} parameters of adapters, {trained / count / 1e6:.2%} of the model's", flush=True)
    if may_restart():
        config, dp = job.config, job.parallel.dp
        others = possible_ranks(dp * config.batch_size * config.accumulate, config.batch_size)
        print(f"its steps divide over {', '.join(map(str, others))} data-parallel ranks", flush=True)
    if is_new and not has_checkpoint(job.folder):
        job.save_settings()


def _latest(runs: Path) -> Path:
    found = [folder for folder in runs.glob("*") if has_checkpoint(folder)]
    if not found:
        raise ValueError(f"--resume: no run under {runs} has a checkpoint: start one without --resume")
    return max(found, key=saved_at)
