"""An engine's pool and runner: how many blocks, the memory for them, what is compiled and recorded beforehand."""

from functools import partial

from minillm.model import Transformer
from minillm.model.kernels import gpu_of
from minillm.model.paged import Backend, PagedCache
from minillm.model.paged.quantized import RowFormat
from minillm.serve.ranks.part import agreed, group_of
from minillm.serve.ranks.runner import RankRunner
from minillm.serve.run.decode_graphs import wants_graphs
from minillm.serve.run.memory import blocks_of_full_length, pool_sizes, rows_of_each
from minillm.serve.run.model_runner import Runner
from minillm.serve.run.warm_up import warm_up as run_warm_up
from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.scheduler import Scheduler


def build_pool(
    model: Transformer,
    backend: Backend,
    block_size: int,
    num_blocks: int | None,
    num_host_blocks: int | None,
    *,
    prefix_cache: bool,
    drafts: object,
    **options,
) -> BlockPool:
    """Of an engine. drafts: see `rows_of_each`. options: of `pool_sizes`."""
    options["rows_of_each"] = rows_of_each(drafts)
    options["reserved_bytes"] = getattr(backend, "workspace_bytes", 0)
    sizes = pool_sizes(model, block_size, num_blocks, num_host_blocks, **options)
    total, on_host = (agreed(model, size) for size in sizes)  # rank 0's pool stands for those of all ranks
    window = model.config.window_of_all_layers
    return BlockPool(total, block_size, num_host_blocks=on_host, prefix_cache=prefix_cache, window=window)


def build_runner(
    model: Transformer,
    scheduler: Scheduler,
    backend: Backend,
    kv_format: RowFormat | None,
    *,
    graphs: bool | None,
    warm_up: bool | None,
) -> Runner:
    """For the steps and the pool of a scheduler. graphs, warm_up: as of `LLM`."""
    weight, pool, most = model.embedding.weight, scheduler.pool, scheduler.max_num_seqs
    where = {"num_host_blocks": pool.num_host_blocks, "device": weight.device, "dtype": weight.dtype}
    cache = PagedCache(model.config, pool.total, pool.block_size, format=kv_format, **where)
    widest = blocks_of_full_length(model.config, pool.block_size)
    group = group_of(model)
    runner = (Runner if group is None else partial(RankRunner, group=group))(
        model,
        cache,
        backend,
        table_rows=2 * most,
        table_width=widest if pool.window is not None else min(pool.total, widest),
        graphs=most if wants_graphs(graphs, backend, weight.device) else 0,
    )
    if weight.is_cuda if warm_up is None else warm_up:
        with gpu_of(weight.device):
            run_warm_up(runner, scheduler.token_budget)
    return runner
