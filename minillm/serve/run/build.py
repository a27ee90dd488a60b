"""An engine's parts: how many blocks, the memory for them, what is compiled and recorded beforehand."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minillm.model import Transformer
from minillm.model.kernels import gpu_of
from minillm.model.paged import PagedCache, default_backend
from minillm.model.parts import weight_of
from minillm.serve.options import EngineOptions
from minillm.serve.ranks.part import agreed, group_of, layers_of
from minillm.serve.ranks.runner import RankRunner
from minillm.serve.ranks.stage import Stage
from minillm.serve.ranks.stage_runner import StageRunner
from minillm.serve.run.adapters import store_of
from minillm.serve.run.decode_graphs import wants_graphs
from minillm.serve.run.memory import blocks_of_full_length, most_windowed_blocks, pool_sizes, rows_of_each
from minillm.serve.run.model_runner import Runner
from minillm.serve.run.optimise import compile_blocks, fuse
from minillm.serve.run.warm_up import warm_up
from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from minillm.adapters.store import AdapterStore
    from minillm.serve.speculate.speculation import Speculation


def prepare_model(model: Transformer, options: EngineOptions) -> EngineOptions:
    """Changes how the model computes, see `optimise.py`, and gives it its adapters. Returns the options with their
    store, and with the backend and the blocks that this model has."""
    weight = weight_of(model)
    if weight.is_cuda if options.fused is None else options.fused:
        fuse(model, kernels=weight.is_cuda and options.compile is False)
    store = store_of(model, options.adapters, options.compile)
    if options.compile is not False:
        compile_blocks(model, options.compile)
    backend = options.backend or default_backend(weight.device, weight.dtype)
    apart = options.windows_apart and options.prefill is None
    return replace(options, adapters=store, backend=backend, windows_apart=apart)


def build_pool(model: Transformer, options: EngineOptions, scheduling: dict[str, object]) -> BlockPool:
    """scheduling: the scheduler's options."""
    config, block_size, adapters = model.config, options.block_size, options.adapters
    rows = rows_of_each(0 if options.proposer is None else options.k)
    most = most_windowed_blocks(config, block_size, scheduling, rows - 1) if options.windows_apart else 0
    reserved = getattr(options.backend, "workspace_bytes", 0)
    reserved += 0 if adapters is None else adapters.budget_bytes - adapters.nbytes
    sizes = pool_sizes(model, options, scheduling, rows_of_each=rows, reserved_bytes=reserved, windowed=most)
    total, on_host = (agreed(model, size) for size in sizes)  # rank 0's pool stands for those of all ranks
    of_both = {"num_host_blocks": on_host, "prefix_cache": options.prefix_cache}
    if not most:
        return BlockPool(total, block_size, window=config.window_of_all_layers, **of_both)
    windowed = BlockPool(min(total, most), block_size, window=config.sliding_window, **of_both)
    return BlockPool(total, block_size, windowed=windowed, **of_both)


def build_speculation(model: Transformer, options: EngineOptions) -> "Speculation | None":
    """None without a proposer."""
    if options.proposer is None:
        return None
    from minillm.serve.speculate.speculation import Speculation

    return Speculation(options.proposer, options.k, model.config)


def build_runner(model: Transformer, scheduler: Scheduler, options: EngineOptions) -> Runner:
    """For the steps and the pool of a scheduler."""
    weight, pool, most = weight_of(model), scheduler.pool, scheduler.max_num_seqs
    where = {"num_host_blocks": pool.num_host_blocks, "device": weight.device, "dtype": weight.dtype}
    where["format"] = options.kv_format
    config, layers = model.config, layers_of(model)
    apart = [layer for layer in layers if pool.windowed is not None and config.window(layer) is not None]
    kinds = zip(pool.kinds, ([layer for layer in layers if layer not in apart], apart), strict=False)
    caches = [PagedCache(config, each.total, each.block_size, layers=own, **where) for each, own in kinds]
    routed = {} if options.adapters is None else {"routed": _routed(model, options.adapters)}
    widest = blocks_of_full_length(config, pool.block_size)
    replayed = not isinstance(model, Stage) and wants_graphs(options.graphs, options.backend, weight.device)
    runner = runner_of(model)(
        model,
        caches[0],
        options.backend,
        windowed=None if pool.windowed is None else caches[1],
        table_rows=2 * most,
        table_width=widest if pool.window is not None else min(pool.total, widest),
        graphs=most if replayed else 0,
        **routed,
    )
    if weight.is_cuda if options.warm_up is None else options.warm_up:
        with gpu_of(weight.device):
            warm_up(runner, scheduler.token_budget)
    return runner


def _routed(model: Transformer | Stage, adapters: "AdapterStore") -> Callable[..., AbstractContextManager]:
    if (group := group_of(model)) is None or group.rank == 0:
        return adapters.routed
    from minillm.serve.ranks.adapters import routed_as_told

    return partial(routed_as_told, adapters)


def runner_of(model: Transformer | Stage) -> type[Runner]:
    if isinstance(model, Stage):
        return StageRunner
    return Runner if group_of(model) is None else RankRunner
