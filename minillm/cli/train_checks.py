"""What `train` checks before any rank starts: options against each other, against the model and against the ranks."""

import math
import os
from typing import Any

from minillm.adapters.attach import adapted_shapes
from minillm.cli.folders import check_new_folder
from minillm.data import dataset_of
from minillm.model import ModelConfig
from minillm.model.hf.save import check_folder
from minillm.parallel.tensor_parallel.plan import part_of
from minillm.parallel.tensor_parallel.quantized import shard_of
from minillm.quantize.formats import NF4
from minillm.train.job import ADAPTER_SETTINGS, DEFAULTS, MODEL_SETTINGS, TrainingJob
from minillm.train.parallel_config import ParallelConfig


def check_base(job: TrainingJob, given: dict[str, Any]) -> None:
    """ValueError for options about base and adapters that have no meaning together. given: on this command line."""
    settings = job.settings
    if settings["base"] is not None and (named := [name for name in MODEL_SETTINGS if name in given]):
        option = named[0].replace("_", "-")
        raise ValueError(f"--{option} {given[named[0]]} and --base {settings['base']} both say which model: choose one")
    if settings["lora"] is None and (named := [name for name in ADAPTER_SETTINGS if settings[name] != DEFAULTS[name]]):
        option = named[0].replace("_", "-")
        raise ValueError(f"--{option} is about adapters: add --lora and a rank, such as --lora 16")


def check(job: TrainingJob) -> None:
    """Raises ValueError for whatever can be known before hours of training, an export that cannot be written included.
    Tokenizes the texts, so that every rank finds the tokens on disk."""
    config = job.config
    job.parallel.check(config.model, config.seq_len)
    if job.parallel.is_hybrid:
        if job.offload:
            raise ValueError(f"--offload {job.offload} is for ZeRO alone: leave it out with --tp, --pp and --cp")
        if config.compile:
            raise ValueError(
                "--compile does not look through the messages inside a model: leave it out with --tp, --pp and --cp"
            )
    if config.adapter:
        _check_adapter(job)
    job.torch_device()
    job.check_teacher()
    if job.export_to:
        if config.adapter is None:
            check_folder(job.export_to, config.model)
        check_new_folder("--export", job.export_to)
    for tokens in job.texts():
        dataset_of(tokens, config.seq_len)


def _check_adapter(job: TrainingJob) -> None:
    config = job.config
    try:
        adapted_shapes(config.model, config.adapter)
    except ValueError as error:
        raise ValueError(f"--target: {error}") from error
    if config.dpo and job.parallel.cp > 1:
        raise ValueError(f"--dpo {config.dpo} needs whole answers on every rank: leave --cp {job.parallel.cp} out")
    if config.qlora and config.model.moe:
        raise ValueError("--qlora covers dense layers, and this model has experts: leave it out")
    if config.qlora:
        _check_groups(config.model, job.parallel.tp)


def _check_groups(model: ModelConfig, tp: int) -> None:
    for name, shape in adapted_shapes(model, None).items():
        if not name.startswith("blocks.") or len(shape) != 2:
            continue
        if shape[1] % NF4.group:
            raise ValueError(
                f"--qlora gives each {NF4.group} weights of a row a scale, and {name} has {shape[1]} in a row: "
                "leave it out"
            )
        part = shard_of(part_of(model, name, 0, tp))
        unit = NF4.group if part.dim else 1
        if shape[part.dim] % (unit * part.num_shards):
            what = f"{NF4.group} weights of a row one scale" if part.dim else "each rank as many whole rows"
            raise ValueError(
                f"--qlora gives {what}, and {name} has {list(shape)} weights, which --tp {tp} cannot cut so: use fewer "
                "ranks, or leave one of the two out"
            )


def data_parallel(dp: int | None, cut: dict[str, int]) -> int:
    """Data-parallel ranks, given or what torchrun's processes leave for them; cut: the ranks of the other axes."""
    each = math.prod(cut.values())
    processes = int(os.environ.get("WORLD_SIZE", (dp or 1) * each))
    if processes != (dp or max(1, processes // each)) * each:
        given = " ".join(f"--{axis} {size}" for axis, size in (("dp", dp), *cut.items()) if size)
        raise ValueError(f"{given} does not fit torchrun's {processes} processes: change one of them")
    return processes // each


def parallel_config(dp: int, microbatches: int | None, rows: int, **spread: Any) -> ParallelConfig:
    """rows: windows of a step on each data-parallel rank; spread: the other fields. ValueError for what cannot be."""
    spread["dp"] = dp
    if spread["pad"] and spread["cp"] == 1:
        raise ValueError("--pad lengthens windows for --cp ranks to share: add --cp, or leave it out")
    if not spread["reshard"] and (spread["pp"] == 1 or spread["zero"] < 3):
        raise ValueError("--keep-weights is for a pipeline's gathered weights: add --pp and --zero 3")
    if spread["pp"] == 1:
        if microbatches:
            raise ValueError(f"--microbatches {microbatches} is for a pipeline: add --pp, or use --accumulate")
        return ParallelConfig(**spread)
    if microbatches and rows % microbatches:
        raise ValueError(
            f"--microbatches {microbatches} does not divide the {rows} windows of a step on each data-parallel rank "
            "(--batch-size times --accumulate): change one of them"
        )
    problem, most = None, max(1, min(rows, 4 * spread["pp"]))
    for count in [microbatches] if microbatches else [m for m in range(most, 0, -1) if rows % m == 0]:
        try:
            return ParallelConfig(accumulate=count, **spread)
        except ValueError as error:
            problem = error
    raise problem
