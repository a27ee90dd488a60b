"""How many blocks of keys and values fit: what the device has left after one forward pass of the largest size.

On a GPU, as vLLM does: memory · gpu_memory_utilization, less what is in use (weights, other processes) and less what a
pass over `token_budget` tokens takes on top. On the CPU a share of the RAM that is free now; a pass there takes what is
left. In both cases never more than max_num_seqs sequences of full length could fill.
"""

from numbers import Real

import psutil
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.kernels import gpu_of
from minillm.model.paged.quantized import RowFormat
from minillm.predict.model import kv_bytes_per_token
from minillm.serve.numbers import check_whole

GPU_SHARE, CPU_SHARE, DRAFT_SHARE = 0.9, 0.3, 0.1


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


def default_num_host_blocks(
    model: Transformer, block_size: int, num_blocks: int, kv_format: RowFormat | None = None
) -> int:
    """Blocks on the host to swap to: as many as on the device, if a share of the free RAM holds them."""
    room = CPU_SHARE * psutil.virtual_memory().available
    size = block_bytes(model.config, block_size, model.embedding.weight.dtype, kv_format)
    return min(num_blocks, int(room // size))


def check_fits(
    model: Transformer, block_size: int, num_blocks: int, num_host_blocks: int, kv_format: RowFormat | None = None
) -> None:
    """ValueError for more blocks than the whole memory of the device, or of the host, holds."""
    weight, ram = model.embedding.weight, psutil.virtual_memory().total
    device = torch.cuda.mem_get_info(weight.device)[1] if weight.is_cuda else ram
    for name, number, memory in (("num_blocks", num_blocks, device), ("num_host_blocks", num_host_blocks, ram)):
        check_whole(name, number, int(name == "num_blocks"))
        size = number * block_bytes(model.config, block_size, weight.dtype, kv_format)
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


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, kv_format: RowFormat | None = None) -> int:
    """Bytes of one block: keys and values of block_size tokens in all layers."""
    if kv_format is None:
        return max(block_size, 1) * kv_bytes_per_token(config, dtype.itemsize)
    sizes = {"bytes_per_element": kv_format.code_dtype.itemsize, "scale_bytes": kv_format.scale_dtype.itemsize}
    return max(block_size, 1) * kv_bytes_per_token(config, **sizes)


def blocks_of_full_length(config: ModelConfig, block_size: int) -> int:
    return -(-config.max_seq_len // max(block_size, 1))


@torch.inference_mode()
def _gpu_room(model: Transformer, share: float, token_budget: int) -> float:
    device = model.embedding.weight.device
    tokens = torch.zeros(1, min(token_budget, model.config.max_seq_len), dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with gpu_of(device):
        model(tokens).float().max(-1)  # all rows through the head and as float32: no step has more
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return share * total - (total - free) - activations
