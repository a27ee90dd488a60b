"""What adapters cost: closed forms, equal to counted runs. r is the rank, a layer is [out, in].

numbers      r·(in + out) of each layer                                              (Hu et al. 2021, §4.1)
FLOPs        2·r·(in + out) per token forward, which nothing else pays; training 2/3 of what all weights would
             cost, since a frozen one has no gradient, and 6·r·(in + out)
bytes        the base is stored and nothing more: 2 to 4 bytes a weight, or 4.127 bits as NF4 (Dettmers et al.
             2023); 16 bytes an adapter's number with Adam; activations that only a weight's gradient reads are gone
k adapters   in one batch: the base is read once, and the adapters of those who are in it; each request's
             products are those of its own rank (Chen et al. 2023, Punica; Sheng et al. 2023, S-LoRA)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.predict.model import ADAM_FP32, Flops, Shape, StateBytes, forward_flops, parameters
from minillm.predict.training.activations import ID
from minillm.predict.training.tensor import CHUNK

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NF4_GROUP, NF4_BLOCK = 64, 256  # weights that share a scale; scales that share a scale of their own
DECODING = 13  # bytes a weight while codes become float32: a code each, its index, its scale and its level


def layer_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(out, in) of a block's linear layers, by name; of a mixture those of its shared experts, without routed ones."""
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    f = shape.intermediate_size if shape.moe is None else shape.moe.shared_experts * shape.moe.intermediate_size
    return dict(zip(LAYERS, ((q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f)), strict=True))


def nf4_bytes(numel: int) -> int:
    """Bytes of a weight as codes: half a byte each, a byte for each 64, 4 bytes for each 16,384, and 4 more."""
    scales = numel // NF4_GROUP
    return numel // 2 + scales + 4 * -(-scales // NF4_BLOCK) + 4


@dataclass(frozen=True)
class AdapterMemory:
    """Bytes of a training step on one device. base: all frozen weights; adapters: A and B; gradients, optimizer: of all
    of these; activations, temporaries: at the fullest moment."""

    base: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.base + self.adapters + self.gradients + self.optimizer + self.activations + self.temporaries


@dataclass(frozen=True)
class Adapters:
    """Adapters of one rank beside the same layers of every block. layers: some of `LAYERS`.

    ValueError for a rank below 1 and for a layer that there is not.
    """

    shape: Shape
    rank: int
    layers: Sequence[str] = ("q_proj", "v_proj")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank {self.rank} must be at least 1.")
        if unknown := [layer for layer in self.layers if layer not in LAYERS]:
            raise ValueError(f"a block has no layer {unknown[0]!r}: use some of {', '.join(LAYERS)}.")

    @property
    def parameters(self) -> int:
        """Numbers of all adapters."""
        sizes = layer_sizes(self.shape)
        return self.shape.num_layers * self.rank * sum(sum(sizes[layer]) for layer in self.layers)

    def nbytes(self, bytes_per_element: int = 2) -> int:
        """Bytes of one adapter, all layers together."""
        return self.parameters * bytes_per_element

    def forward_flops(self, context: float) -> Flops:
        """FLOPs per token, as `predict.model.forward_flops`: the base's and the adapters'."""
        base = forward_flops(self.shape, context)
        return Flops(base.matmul + 2 * self.parameters, base.attention)

    def training_flops(self, context: float) -> Flops:
        """FLOPs per token of forward and backward. A frozen weight has a gradient of its input only, and in the first
        block not before the first adapter, since nothing is learnt before it."""
        forward, sizes, layers = self.forward_flops(context), layer_sizes(self.shape), set(self.layers)
        backward = forward.matmul + 2 * self.parameters
        query, key, value = (layer in layers for layer in LAYERS[:3])
        idle = 4 - (query + key + value + (query or key))  # of the products in the first block's backward attention
        attention = 3 * forward.attention - idle * forward.attention / self.shape.num_layers / 2
        for read in (LAYERS[:3], LAYERS[3:4], LAYERS[4:6], LAYERS[6:]):  # layers with one input, in their order
            some = layers & set(read)
            backward -= sum(2 * sizes[layer][0] * sizes[layer][1] for layer in read)
            backward -= sum(2 * self.rank * sizes[layer][1] for layer in some)
            if some:
                break
        return Flops(forward.matmul + backward, attention)

    def base_bytes(self, bytes_per_element: int = 4, nf4: bool = False) -> int:
        """Bytes of the frozen weights. nf4: the blocks' linear layers as codes."""
        total = parameters(self.shape).total * bytes_per_element
        if nf4:
            sizes = [out * inputs for out, inputs in layer_sizes(self.shape).values()]
            total -= self.shape.num_layers * sum(size * bytes_per_element - nf4_bytes(size) for size in sizes)
        return total

    def block_activation_bytes(self, tokens: int, first: bool = False, size: int = 4) -> int:
        """Bytes that a block keeps for backward, in float32 or wider, without dropout. first: of the model: its input
        is nobody's gradient. As `activations.block_activation_bytes`, but that a frozen norm does not keep what it has
        normalised, nor a frozen layer its input."""
        shape, adapted = self.shape, set(self.layers)
        h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        f, early, late = shape.intermediate_size, adapted & set(LAYERS[:3]), adapted & set(LAYERS[:4])
        attends, goes_on = early or not first, late or not first
        numbers = self.rank * len(adapted)
        numbers += 0 if first else h + 1  # the norm before attention: its input, 1 / rms
        numbers += h if early else 0
        numbers += 2 * q + 2 * kv + shape.num_heads if attends else 0
        numbers += q if "o_proj" in adapted and attends and shape.num_heads > 1 and tokens > 1 else 0
        numbers += q if "o_proj" in adapted and not attends else 0
        numbers += h + 1 if goes_on else 0  # the norm before the MLP
        numbers += h if adapted & {"gate_proj", "up_proj"} else 0
        numbers += 3 * f if goes_on or adapted & {"gate_proj", "up_proj"} else 0
        numbers += f if "down_proj" in adapted else 0
        norms = 2 * (q + kv) + q // shape.head_dim + kv // shape.head_dim if shape.qk_norm and attends else 0
        return (numbers + norms // 2 if norms else numbers) * tokens * size

    def step_memory(self, batch: int, seq: int, *, nf4: bool = False, state: StateBytes = ADAM_FP32) -> AdapterMemory:
        """Of the fullest moment of a step in float32 with Adam, all of whose moments are there: at the loss, or, where
        weights are codes, while the last block's largest layer is decoded in backward."""
        shape, size, tokens = self.shape, state.parameter, batch * seq
        blocks = [self.block_activation_bytes(tokens, index == 0, size) for index in range(shape.num_layers)]
        kept = sum(blocks) + tokens * ID + seq * shape.head_dim * size  # and positions, cosines and sines
        row = tokens * shape.hidden_size * size
        end = row + tokens * size + row  # the last norm's input and 1 / rms; the gradient of x, made with the loss
        chunk = min(CHUNK, tokens)
        tiles = 2 * chunk * shape.vocab_size * size + chunk * (ID + size)
        at_loss = kept + end, 2 * row + tokens * ID + tiles
        moments = [at_loss]
        if nf4:
            largest = max(out * inputs for out, inputs in layer_sizes(shape).values())
            moments.append((kept, row + tokens * ID + DECODING * largest))
        activations, temporaries = max(moments, key=sum)
        count = self.parameters
        return AdapterMemory(
            base=self.base_bytes(size, nf4),
            adapters=size * count,
            gradients=size * count,
            optimizer=(state.master + state.moments) * count,
            activations=activations,
            temporaries=temporaries,
        )


def batch_bytes_read(base_bytes: int, adapter_bytes: Sequence[int]) -> int:
    """Bytes that one decode step reads for weights. adapter_bytes: of each different adapter in the batch."""
    return base_bytes + sum(adapter_bytes)


def merged_bytes_read(base_bytes: int, different: int) -> int:
    """The same for merged models: each of the `different` ones is a whole model."""
    return base_bytes * different


def adapters_that_fit(budget_bytes: int, adapter_bytes: int) -> int:
    """Adapters of one size that a byte budget holds."""
    return budget_bytes // adapter_bytes
