"""What the layers of a model see of real text: statistics of their inputs, a block at a time.

    tokens ── embedding ──▶ block 0 ──▶ block 1 ──▶ …      all windows go through one block before the next is begun:
                            1. run, and collect the inputs     memory holds the inputs of one block, not of all
                            2. the caller quantizes it
                            3. run again: the next block sees the inputs that it will see in use

Layers that share an input (query, key and value; gate and up) share its statistics.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from minillm.data import TokenDataset, Tokens
from minillm.model.moe import MoE
from minillm.model.transformer import MLP, Block, RMSNorm, Transformer

BATCH_TOKENS = 4096  # tokens that go through a block at once


class Inputs:
    """Of a layer, summed over all rows seen. gram: [in, in], Σ x xᵀ, from which the error of any rounding follows;
    absolute: [in], Σ |x|; largest: [in], max |x|."""

    def __init__(self, size: int, device: torch.device):
        self.gram = torch.zeros(size, size, device=device)
        self.absolute, self.largest = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """x: [..., in]."""
        x = x.reshape(-1, x.shape[-1]).float()
        if not len(x):
            return
        self.gram.addmm_(x.T, x)
        self.absolute += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.rows += len(x)

    def error(self, difference: Tensor) -> float:
        """Σ ‖difference · x‖² over the rows, of a matrix [out, in]."""
        return float(((difference.detach() @ self.gram) * difference.detach()).sum())


@dataclass
class Group:
    """Layers that see the same inputs. divide: divides these inputs, channel by channel, where they are made; None =
    nothing before the layers can. shared: channels that must be divided alike, as an axis; see `reduce`.
    """

    layers: dict[str, nn.Linear]
    divide: Callable[[Tensor], None] | None = None
    shared: tuple[int, ...] = ()
    inputs: Inputs | None = field(default=None, repr=False)

    def reduce(self, channels: Tensor, by: Callable[[Tensor, int], Tensor]) -> Tensor:
        """[in] -> [in], where channels that are divided alike have one value. With grouped-query attention the query
        heads of one kv head see the same values, so `shared` is (kv heads, query heads of each, head_dim)."""
        if not self.shared:
            return channels
        parts = channels.view(self.shared)
        return by(parts, 1).unsqueeze(1).expand(self.shared).reshape(-1)


def groups_of(block: Block) -> list[Group]:
    """The layers of a block that can be quantized, by what they see. Their names begin in the block."""
    attention, mlp = block.attention, block.mlp
    names = {f"attention.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    head_dim, kv_heads = attention.head_dim, attention.v_proj.out_features // attention.head_dim
    shape = (kv_heads, attention.o_proj.in_features // head_dim // kv_heads, head_dim)
    o_proj = names.pop("attention.o_proj")
    found = [
        Group(names, _of_norm(block.attention_norm)),
        Group({"attention.o_proj": o_proj}, _of_values(attention.v_proj, shape), shape),
    ]
    if not isinstance(mlp, MoE):
        return found + _groups_of_mlp(mlp, "mlp.", _of_norm(block.mlp_norm))
    for number, expert in enumerate(mlp.experts):
        found += _groups_of_mlp(expert, f"mlp.experts.{number}.", None)
    return found + ([] if mlp.shared is None else _groups_of_mlp(mlp.shared, "mlp.shared.", None))


def windows_of(tokens: Tokens, windows: int, seq_len: int) -> Tensor:
    """[windows, seq_len] ids, cut from the text at even distances. ValueError for a text shorter than one window."""
    if windows < 1 or seq_len < 1:
        raise ValueError(f"calibration over {windows} windows of {seq_len} tokens sees no text: use 1 or more of both.")
    dataset = TokenDataset(tokens, seq_len)
    return dataset.batch(dataset.spread(windows))[0]


@torch.no_grad()
def block_by_block(model: Transformer, windows: Tensor, progress: bool = False) -> Iterator[tuple[Block, list[Group]]]:
    """Each block with its groups, whose `inputs` are those of the windows [n, seq]. What the caller makes of the block
    is what the next one's inputs come from."""
    device = model.embedding.weight.device
    hidden = [model.embedding(part.to(device)) for part in windows.split(max(1, BATCH_TOKENS // windows.shape[1]))]
    rotation = model.rope(torch.arange(windows.shape[1], device=device), hidden[0].dtype)
    for block in tqdm(model.blocks, desc="calibrating", unit="block", disable=not progress, leave=False):
        groups = groups_of(block)
        hooks = [_collect(group, device) for group in groups]
        for x in hidden:
            block(x, rotation, model.attention)
        for hook in hooks:
            hook.remove()
        yield block, groups
        hidden = [block(x, rotation, model.attention) for x in hidden]


def _collect(group: Group, device: torch.device):
    layer = next(iter(group.layers.values()))
    group.inputs = Inputs(layer.in_features, device)
    return layer.register_forward_pre_hook(lambda _, arguments: group.inputs.add(arguments[0]))


def _groups_of_mlp(mlp: MLP, prefix: str, divide: Callable[[Tensor], None] | None) -> list[Group]:
    return [
        Group({f"{prefix}gate_proj": mlp.gate_proj, f"{prefix}up_proj": mlp.up_proj}, divide),
        Group({f"{prefix}down_proj": mlp.down_proj}, lambda factors: _divide_rows(mlp.up_proj, factors)),
    ]


def _of_norm(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None] | None:
    if not isinstance(norm, RMSNorm):
        return None  # norms after the branches: the residual stream is read as it is

    def divide(factors: Tensor) -> None:
        whole = norm.weight.float() + norm.offset
        norm.weight.data = (whole / factors - norm.offset).to(norm.weight.dtype)

    return divide


def _of_values(v_proj: nn.Linear, shape: tuple[int, ...]) -> Callable[[Tensor], None]:
    return lambda factors: _divide_rows(v_proj, factors.view(shape)[:, 0].flatten())


def _divide_rows(linear: nn.Linear, factors: Tensor) -> None:
    linear.weight.data = (linear.weight.float() / factors[:, None]).to(linear.weight.dtype)
    if linear.bias is not None:
        linear.bias.data = (linear.bias.float() / factors).to(linear.bias.dtype)
