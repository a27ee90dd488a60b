"""How many blocks of keys and values fit: what the device has left after one forward pass of the largest size.

On a GPU, as vLLM does: memory · gpu_memory_utilization, less what is in use (weights, other processes) and less what a
pass over `token_budget` tokens and its sampling take on top. On the CPU a share of the RAM that is free now; a pass
there takes what is left. In both cases never more than max_num_seqs sequences of full length could fill.
"""

from dataclasses import dataclass
from functools import partial
from numbers import Real

import psutil
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.draw import Draw
from minillm.model.kernels import gpu_of
from minillm.model.paged.quantized import RowFormat
from minillm.model.parts import weight_of
from minillm.predict.model import kv_bytes_per_token
from minillm.serve.numbers import check_whole
from minillm.serve.options import EngineOptions
from minillm.serve.ranks.part import agreed, layers_of, ranks_here
from minillm.serve.ranks.stage import Stage
from minillm.serve.requests.params import SamplingParams
from minillm.serve.run.step_inputs import sampling_inputs
from minillm.serve.sample.batch import sample_on_device
from minillm.serve.schedule.held import most_held

GPU_SHARE, CPU_SHARE, DRAFT_SHARE = 0.9, 0.3, 0.1
GPU_LIMITS = {"max_num_seqs": 256, "token_budget": 8192}  # of an engine on a GPU; on a CPU those of `Scheduler`
PASS_SHARE, LEAST_BUDGET = 0.25, 512  # of the free memory for one pass, at most; tokens that a pass takes at least
MOST_PINNED_BYTES = 4 << 30  # of a GPU's host blocks, which the operating system can use for nothing else


def gpu_limits(model: Transformer, given: dict[str, object]) -> dict[str, int]:
    """`max_num_seqs` and `token_budget` of an engine on a GPU, where they are not given: GPU_LIMITS, or the half, a
    quarter, ... of the tokens if a pass over them takes too much of the free memory. None on a CPU."""
    device = weight_of(model).device
    if device.type != "cuda":
        return {}
    limits = {name: given.get(name, default) for name, default in GPU_LIMITS.items()}
    for name, limit in limits.items():
        check_whole(name, limit, 1)
    if "token_budget" not in given:
        limits["token_budget"] = max(limits.values())
        free = agreed(model, torch.cuda.mem_get_info(device)[0])
        least = max(LEAST_BUDGET, limits["max_num_seqs"])
        while limits["token_budget"] > least and _pass_bytes(model, **limits) > PASS_SHARE * free:
            limits["token_budget"] = max(least, limits["token_budget"] // 2)
    elif "max_num_seqs" not in given:
        limits["max_num_seqs"] = min(limits.values())
    return limits


def pool_sizes(
    model: Transformer, options: EngineOptions, scheduling: dict[str, object], *, windowed: int = 0, **more: int
) -> tuple[int, int]:
    """(blocks on the device, blocks on the host to swap to) of an engine: those asked for, None = what fits.

    scheduling: options of its scheduler. By default the host has as many blocks as the device, if it swaps, and a share
    of the free RAM holds them, for a GPU at most MOST_PINNED_BYTES. windowed, more: of `default_num_blocks`. ValueError
    for more than the whole memory of the device, or of the host, holds.
    """
    weight, ram = weight_of(model), psutil.virtual_memory()
    sizes = block_sizes(model, options.block_size, options.kv_format, windowed)
    num_blocks, num_host_blocks = options.num_blocks, options.num_host_blocks
    if num_blocks is None:
        limits = {name: scheduling[name] for name in ("max_num_seqs", "token_budget") if name in scheduling}
        limits |= {"windowed": windowed, "kv_format": options.kv_format} | more
        num_blocks = default_num_blocks(model, options.block_size, options.gpu_memory_utilization, **limits)
    if num_host_blocks is None:
        swaps = scheduling.get("preemption") == "swap"
        room = CPU_SHARE * ram.available / ranks_here(model)
        room = min(room, MOST_PINNED_BYTES) if weight.is_cuda else room
        num_host_blocks = min(num_blocks, int(room // sum(sizes.of_each))) if swaps else 0
    device = torch.cuda.mem_get_info(weight.device)[1] if weight.is_cuda else ram.total
    check_whole("num_blocks", num_blocks, 1)
    check_whole("num_host_blocks", num_host_blocks, 0)
    _check_fits("num_blocks", num_blocks, sizes.of(num_blocks), device)
    _check_fits("num_host_blocks", num_host_blocks, num_host_blocks * sum(sizes.of_each), ram.total)
    return num_blocks, num_host_blocks


def default_num_blocks(
    model: Transformer,
    block_size: int,
    utilization: float | None = None,
    *,
    max_num_seqs: int = 64,
    token_budget: int = 512,
    kv_format: RowFormat | None = None,
    rows_of_each: int = 1,
    reserved_bytes: int = 0,
    windowed: int = 0,
) -> int:
    """Blocks for an engine. kv_format: see `PagedCache`. rows_of_each: logits that a sequence wants in one step, more
    than 1 only with drafts. reserved_bytes: of the GPU, for what is allocated later. windowed: see `block_sizes`.
    ValueError if there is no room for a single block."""
    check_whole("max_num_seqs", max_num_seqs, 1)
    check_whole("token_budget", token_budget, 1)
    weight = weight_of(model)
    on_gpu = weight.device.type == "cuda"
    share = (GPU_SHARE if on_gpu else CPU_SHARE) if utilization is None else utilization
    if not isinstance(share, Real) or not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization {utilization!r} must be above 0 and at most 1, or None.")
    if on_gpu:
        needed = _pass_bytes(model, max_num_seqs=rows_of_each * max_num_seqs, token_budget=token_budget)
        free, total = torch.cuda.mem_get_info(weight.device)
        room = share * total - (total - free) - needed - reserved_bytes
    else:
        room = share * psutil.virtual_memory().available / ranks_here(model)
    fits = block_sizes(model, block_size, kv_format, windowed).fitting(room)
    if fits < 1:
        raise ValueError(
            f"no memory is left for keys and values on {weight.device} at gpu_memory_utilization {share}: raise it, "
            "free memory, or take a smaller model or token_budget."
        )
    return min(fits, max_num_seqs * blocks_of_full_length(model.config, block_size))


def rows_of_each(drafts: object) -> int:
    """The `rows_of_each` of `default_num_blocks`. drafts: `EngineOptions.k`, 0 without a proposer; with k draft tokens
    a step samples from k + 1 rows of each sequence."""
    return 1 + (drafts if isinstance(drafts, int) else getattr(drafts, "most", 8))


def most_windowed_blocks(config: ModelConfig, block_size: int, scheduling: dict[str, object], drafts: int) -> int:
    """Blocks of the layers with a sliding window, apart from those that see everything, that max_num_seqs sequences can
    hold, and one to keep for each (`Scheduler`'s reserve); 0 if the layers are not of both kinds."""
    if len({config.window(layer) for layer in range(config.num_layers)}) == 1:
        return 0
    check_whole("chunk", scheduling.get("chunk"), 1, optional=True)
    budget = scheduling.get("token_budget", 512)
    piece = min((scheduling.get("chunk") or budget) + drafts, budget)
    return scheduling.get("max_num_seqs", 64) * (most_held(config.sliding_window, block_size, piece) + 1)


@dataclass(frozen=True)
class BlockSizes:
    """of_each: bytes of a block, and of one in the pool of the layers with a window, if that is apart. windowed: how
    many blocks the second pool has at most: it never needs more of them than the first has."""

    of_each: tuple[int, int]
    windowed: int

    def of(self, blocks: int) -> int:
        """Bytes of so many blocks, those of the second pool included."""
        return blocks * self.of_each[0] + min(blocks, self.windowed) * self.of_each[1]

    def fitting(self, room: float) -> int:
        """Blocks in so many bytes."""
        blocks = int(room // sum(self.of_each))
        if blocks <= self.windowed or not self.windowed:
            return blocks
        return int((room - self.windowed * self.of_each[1]) // max(1, self.of_each[0]))  # 0: a stage has none such


def block_sizes(
    model: Transformer, block_size: int, kv_format: RowFormat | None = None, windowed: int = 0
) -> BlockSizes:
    """windowed: blocks that layers with a window have apart from the others (`most_windowed_blocks`); 0 = none."""
    layers = layers_of(model)
    apart = sum(model.config.window(layer) is not None for layer in layers) if windowed else 0
    of_layers = partial(block_bytes, model.config, block_size, weight_of(model).dtype, kv_format)
    return BlockSizes((of_layers(len(layers) - apart), of_layers(apart)), windowed)


def _check_fits(name: str, number: int, size: int, memory: int) -> None:
    """ValueError for more blocks than the whole memory holds. size: their bytes."""
    if size > memory:
        raise ValueError(
            f"{name} {number} blocks are {size / 1e9:,.1f} GB of keys and values, and the memory is "
            f"{memory / 1e9:,.1f} GB in all: ask for fewer, or leave it out to take what fits."
        )


def draft_num_blocks(model: Transformer, block_size: int) -> int:
    """Blocks for a draft model beside its target: 16 sequences of full length, or what a tenth of the memory holds."""
    weight, full = model.embedding.weight, blocks_of_full_length(model.config, block_size)
    free = torch.cuda.mem_get_info(weight.device)[0] if weight.is_cuda else psutil.virtual_memory().available
    fits = int(DRAFT_SHARE * free // block_bytes(model.config, block_size, weight.dtype))
    return max(full, min(16 * full, fits))


def block_bytes(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    kv_format: RowFormat | None = None,
    layers: int | None = None,
) -> int:
    """Bytes of one block: keys and values of block_size tokens in so many layers; None = all."""
    sizes = {"bytes_per_element": dtype.itemsize}
    if kv_format is not None:
        sizes = {"bytes_per_element": kv_format.code_dtype.itemsize, "scale_bytes": kv_format.scale_dtype.itemsize}
    of_a_layer = kv_bytes_per_token(config, **sizes) // config.num_layers
    return block_size * of_a_layer * (config.num_layers if layers is None else layers)


def blocks_of_full_length(config: ModelConfig, block_size: int) -> int:
    return -(-config.max_seq_len // block_size)


def _pass_bytes(model: Transformer, *, max_num_seqs: int, token_budget: int) -> int:
    """Of the GPU, what a pass over so many tokens and its sampling take on top; all of it if they do not fit."""
    device = weight_of(model).device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with gpu_of(device):
            largest_pass(model, token_budget, min(token_budget, max_num_seqs))
        return agreed(model, torch.cuda.max_memory_allocated(device) - before, "max")
    except torch.OutOfMemoryError:
        return torch.cuda.mem_get_info(device)[1]
    finally:
        torch.cuda.empty_cache()


@torch.inference_mode()
def largest_pass(model: Transformer, tokens: int, rows: int) -> None:
    """A pass over so many tokens without attention, whose memory is small, and the sampling of `rows` of them with all
    that a request can ask for."""
    device = weight_of(model).device
    is_stage = isinstance(model, Stage)
    x = model.nothing(tokens) if is_stage else torch.zeros(1, tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device) % model.config.max_seq_len
    wanted = torch.arange(rows, device=device)
    outputs = model(x, positions, attention=lambda q, k, v, **_: q.clone(), rows=wanted)[0]
    if is_stage and not model.last:
        return
    logits = outputs.float()
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=logits.shape[1] - 1, min_p=0.01, repetition_penalty=1.1)
    sample_on_device(logits, sampling_inputs([(params, [0], Draw(0))] * rows)).read()
