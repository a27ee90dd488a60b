"""An engine's parts: how many blocks, the memory for them, what is compiled and recorded beforehand."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.model import ModelConfig, Transformer
from minillm.model.kernels import gpu_of
from minillm.model.paged import Backend, PagedCache
from minillm.model.paged.quantized import RowFormat
from minillm.model.parts import weight_of
from minillm.serve.ranks.part import agreed, group_of, layers_of
from minillm.serve.ranks.runner import RankRunner
from minillm.serve.ranks.stage import Stage
from minillm.serve.ranks.stage_runner import StageRunner
from minillm.serve.run.adapters import store_of
from minillm.serve.run.decode_graphs import wants_graphs
from minillm.serve.run.memory import blocks_of_full_length, most_windowed_blocks, pool_sizes, rows_of_each
from minillm.serve.run.model_runner import Runner
from minillm.serve.run.optimise import compile_blocks, fuse
from minillm.serve.run.warm_up import warm_up as run_warm_up
from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from minillm.adapters.store import AdapterStore
    from minillm.serve.speculate.adaptive import AdaptiveK
    from minillm.serve.speculate.proposal import Proposer
    from minillm.serve.speculate.speculation import Speculation


def prepare_model(
    model: Transformer,
    adapters: "AdapterStore | Mapping[str, str | Path] | None",
    *,
    fused: bool | None,
    compile: bool | str,
) -> "AdapterStore | None":
    """Changes how the model computes, see `optimise.py`, and gives it the store of its adapters. All as of `LLM`."""
    on_gpu = weight_of(model).is_cuda
    if on_gpu if fused is None else fused:
        fuse(model, kernels=on_gpu and compile is False)
    store = store_of(model, adapters, compile)
    if compile is not False:
        compile_blocks(model, compile)
    return store


def build_pool(
    model: Transformer,
    backend: Backend,
    block_size: int,
    num_blocks: int | None,
    num_host_blocks: int | None,
    *,
    prefix_cache: bool,
    drafts: object,
    adapters: "AdapterStore | None",
    windows_apart: bool,
    **options,
) -> BlockPool:
    """Of an engine. drafts: see `rows_of_each`. options: of `pool_sizes`."""
    config, options["rows_of_each"] = model.config, rows_of_each(drafts)
    most = most_windowed_blocks(config, block_size, options["scheduling"], options["rows_of_each"] - 1)
    options["windowed"] = most if windows_apart else 0
    options["reserved_bytes"] = getattr(backend, "workspace_bytes", 0)
    options["reserved_bytes"] += 0 if adapters is None else adapters.budget_bytes - adapters.nbytes
    sizes = pool_sizes(model, block_size, num_blocks, num_host_blocks, **options)
    total, on_host = (agreed(model, size) for size in sizes)  # rank 0's pool stands for those of all ranks
    of_both = {"num_host_blocks": on_host, "prefix_cache": prefix_cache}
    if not options["windowed"]:
        return BlockPool(total, block_size, window=config.window_of_all_layers, **of_both)
    windowed = BlockPool(min(total, most), block_size, window=config.sliding_window, **of_both)
    return BlockPool(total, block_size, windowed=windowed, **of_both)


def build_speculation(
    proposer: "Proposer | None", k: "int | str | AdaptiveK", config: ModelConfig
) -> "Speculation | None":
    """None without a proposer. k: as of `LLM`."""
    if proposer is None:
        return None
    from minillm.serve.speculate.speculation import Speculation

    return Speculation(proposer, k, config)


def build_runner(
    model: Transformer,
    scheduler: Scheduler,
    backend: Backend,
    kv_format: RowFormat | None,
    *,
    graphs: bool | None,
    warm_up: bool | None,
    adapters: "AdapterStore | None",
) -> Runner:
    """For the steps and the pool of a scheduler. graphs, warm_up: as of `LLM`."""
    weight, pool, most = weight_of(model), scheduler.pool, scheduler.max_num_seqs
    where = {"num_host_blocks": pool.num_host_blocks, "device": weight.device, "dtype": weight.dtype}
    config, layers = model.config, layers_of(model)
    apart = [layer for layer in layers if pool.windowed is not None and config.window(layer) is not None]
    kinds = zip(pool.kinds, ([layer for layer in layers if layer not in apart], apart), strict=False)
    caches = [
        PagedCache(config, each.total, each.block_size, format=kv_format, layers=own, **where) for each, own in kinds
    ]
    routed = {} if adapters is None else {"routed": _routed(model, adapters)}
    widest = blocks_of_full_length(config, pool.block_size)
    runner = runner_of(model)(
        model,
        caches[0],
        backend,
        windowed=None if pool.windowed is None else caches[1],
        table_rows=2 * most,
        table_width=widest if pool.window is not None else min(pool.total, widest),
        graphs=most if not isinstance(model, Stage) and wants_graphs(graphs, backend, weight.device) else 0,
        **routed,
    )
    if weight.is_cuda if warm_up is None else warm_up:
        with gpu_of(weight.device):
            run_warm_up(runner, scheduler.token_budget)
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
