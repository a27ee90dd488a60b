"""How many blocks of keys and values fit: what the device has left after one forward pass of the largest size.

On a GPU, as vLLM does: memory · gpu_memory_utilization, less what is in use (weights, other processes) and less what a
pass over `token_budget` tokens takes on top. On the CPU a share of the RAM that is free now; a pass there takes what is
left. In both cases never more than max_num_seqs sequences of full length could fill.
"""

from numbers import Real

import psutil
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.paged.quantized import RowFormat
from minillm.predict.model import kv_bytes_per_token
from minillm.serve.numbers import check_whole

GPU_SHARE, CPU_SHARE, DRAFT_SHARE = 0.9, 0.3, 0.1


def pool_sizes(
    model: Transformer,
    block_size: int,
    num_blocks: int | None,
    num_host_blocks: int | None,
    *,
    utilization: float | None,
    kv_format: RowFormat | None,
    scheduling: dict[str, object],
) -> tuple[int, int]:
    """(blocks on the device, blocks on the host to swap to) of an engine: those asked for, None = what fits.

    scheduling: options of its scheduler. By default the host has as many blocks as the device, if it swaps, and a share
    of the free RAM holds them. ValueError for more than the whole memory of the device, or of the host, holds.
    """
    weight, ram = model.embedding.weight, psutil.virtual_memory()
    size = block_bytes(model.config, block_size, weight.dtype, kv_format)
    if num_blocks is None:
        limits = {name: scheduling[name] for name in ("max_num_seqs", "token_budget") if name in scheduling}
        num_blocks = default_num_blocks(model, block_size, utilization, kv_format=kv_format, **limits)
    if num_host_blocks is None:
        swaps = scheduling.get("preemption") == "swap"
        num_host_blocks = min(num_blocks, int(CPU_SHARE * ram.available // size)) if swaps else 0
    device = torch.cuda.mem_get_info(weight.device)[1] if weight.is_cuda else ram.total
    _check_fits("num_blocks", num_blocks, 1, size, device)
    _check_fits("num_host_blocks", num_host_blocks, 0, size, ram.total)
    return num_blocks, num_host_blocks


def default_num_blocks(
    model: Transformer,
    block_size: int,
    utilization: float | None = None,
    *,
    max_num_seqs: int = 64,
    token_budget: int = 512,
    kv_format: RowFormat | None = None,
) -> int:
    """Blocks for an engine. kv_format: see `PagedCache`. ValueError if there is no room for a single one."""
    check_whole("max_num_seqs", max_num_seqs, 1)
    check_whole("token_budget", token_budget, 1)
    weight = model.embedding.weight
    on_gpu = weight.device.type == "cuda"
    share = (GPU_SHARE if on_gpu else CPU_SHARE) if utilization is None else utilization
    if not isinstance(share, Real) or not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization {utilization!r} must be above 0 and at most 1, or None.")
    room = _gpu_room(model, share, token_budget) if on_gpu else share * psutil.virtual_memory().available
    fits = int(room // block_bytes(model.config, block_size, weight.dtype, kv_format))
    if fits < 1:
        raise ValueError(
            f"no memory is left for keys and values on {weight.device} at gpu_memory_utilization {share}: raise it, "
            "free memory, or take a smaller model or token_budget."
        )
    return min(fits, max_num_seqs * blocks_of_full_length(model.config, block_size))


def _check_fits(name: str, number: int, least: int, block_bytes: int, memory: int) -> None:
    """ValueError for more blocks than the whole memory holds."""
    check_whole(name, number, least)
    if (size := number * block_bytes) > memory:
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


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, kv_format: RowFormat | None = None) -> int:
    """Bytes of one block: keys and values of block_size tokens in all layers."""
    if kv_format is None:
        return block_size * kv_bytes_per_token(config, dtype.itemsize)
    sizes = {"bytes_per_element": kv_format.code_dtype.itemsize, "scale_bytes": kv_format.scale_dtype.itemsize}
    return block_size * kv_bytes_per_token(config, **sizes)


def blocks_of_full_length(config: ModelConfig, block_size: int) -> int:
    return -(-config.max_seq_len // block_size)


@torch.inference_mode()
def _gpu_room(model: Transformer, share: float, token_budget: int) -> float:
    device = model.embedding.weight.device
    tokens = torch.zeros(1, min(token_budget, model.config.max_seq_len), dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model(tokens).float().max(-1)  # all rows through the head and as float32: no step has more
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return share * total - (total - free) - activations
