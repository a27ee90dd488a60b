"""Bytes of a whole training step before it runs: what is held all the time, what forward keeps, and where the peak is.

    state        16 bytes per parameter with Adam, in float32 and in mixed precision alike; 18 while masters are stepped
    activations  what autograd saves: L blocks, the last norm, and the gradients that the fused loss leaves behind
    peak         the fullest of four moments; temporaries count

                 state   gradients   activations            temporaries
    loss           x     earlier     all                    two [chunk, V] tiles of logits
    backward       x     grow        shrink, block by block two [tokens, f] gradients inside the MLP
    embedding      x     all         -                      tied: its two parts and their sum
    optimizer      x     all         -                      -

For `minillm.train.Trainer` on the CPU, to the byte that is asked for (`measure.memory` counts the same); a GPU's fused
kernels keep less of a norm. Symbols as in `predict.model`; tokens T = batch · seq.
"""

from dataclasses import dataclass

from minillm.predict.model import ADAM_FP32, ADAM_MIXED, ADAM_PURE, Shape, StateBytes, matmul_parameters, parameters

CHUNK = 512  # tokens whose logits the fused loss holds at a time
ID = 8  # bytes of a token id


@dataclass(frozen=True)
class Recipe:
    """state: what is stored; compute: bytes per element that matmuls take and give (autocast: less than the weights').

    step_gradient: bytes per parameter while the optimizer steps; masters are stepped with float32 gradients.
    """

    state: StateBytes
    compute: int
    step_gradient: int

    @property
    def wide(self) -> int:
        """Bytes per element inside norms and softmax, which 16 bits would spoil."""
        return max(self.state.parameter, 4)

    @property
    def autocast(self) -> bool:
        return self.compute < self.state.parameter


_MASTER, _AUTOCAST = Recipe(ADAM_MIXED, 2, 4), Recipe(ADAM_FP32, 2, 4)
RECIPES = {
    "fp32": Recipe(ADAM_FP32, 4, 4),
    "bf16": _AUTOCAST,
    "fp16": _AUTOCAST,
    "bf16-master": _MASTER,
    "fp16-master": _MASTER,
    "bf16-pure": Recipe(ADAM_PURE, 2, 2),
}


@dataclass(frozen=True)
class StepBytes:
    """The most that each kind holds during a step, and `moments`: all that is held at each, temporaries included."""

    parameter: int
    gradient: int
    master: int
    optimizer: int
    activation: int
    buffer: int
    moments: dict[str, int]

    @property
    def state(self) -> int:
        """Bytes held between steps."""
        return self.parameter + self.master + self.optimizer

    @property
    def peak(self) -> int:
        return max(self.moments.values())

    @property
    def fullest(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=self.moments.__getitem__)


def training_step(
    shape: Shape, batch: int, seq: int, precision: str = "fp32", *, accumulate: int = 1, recompute: bool = False
) -> StepBytes:
    """The memory of one step of `accumulate` microbatches of [batch, seq] tokens.

    precision: a name of `RECIPES`; recompute: every block keeps its input only. ValueError for another name.
    """
    if precision not in RECIPES:
        raise ValueError(f"no formula for precision {precision!r}: use one of {', '.join(RECIPES)}.")
    if shape.moe:
        raise ValueError("no formula for a whole step with experts: see moe.rank_state and block_activation_bytes.")
    recipe, psi = RECIPES[precision], parameters(shape).total
    step = _Pieces(shape, batch, seq, recipe, accumulate, recompute)
    moments = {
        "loss": step.at_the_loss(),
        "backward": step.in_backward(),
        "embedding": step.at_the_embedding(),
        "optimizer": step.at_the_optimizer(),
    }
    return StepBytes(
        psi * recipe.state.parameter,
        psi * recipe.step_gradient,
        psi * recipe.state.master,
        psi * recipe.state.moments,
        step.activations(),
        step.buffer,
        {name: step.held + size for name, size in moments.items()},
    )


class _Pieces:
    """What the moments are made of. All in bytes; a moment's are those beside `held`, which is there all the time."""

    def __init__(self, shape: Shape, batch: int, seq: int, recipe: Recipe, accumulate: int, recompute: bool):
        state, tokens, count = recipe.state, batch * seq, parameters(shape)
        self.shape, self.tokens, self.recipe, self.count, self.recompute = shape, tokens, recipe, count, recompute
        self.table, self.head = tokens * shape.hidden_size, shape.vocab_size * shape.hidden_size  # elements
        self.narrow = state.parameter < recipe.wide  # 16-bit weights

        self.buffer = shape.head_dim // 2 * 4
        self.held = count.total * (state.parameter + state.master + state.moments) + self.buffer
        self.gradients = count.total * state.gradient
        self.earlier = self.gradients if accumulate > 1 else 0  # those of the microbatch before
        self.stream = self.table * state.parameter  # the residual stream between two blocks
        self.beside = self.stream if self.narrow else 0  # norms keep float32 copies, the stream comes on top
        self.block = block_activation_bytes(shape, batch, seq, state.parameter, recipe.compute)
        self.kept = shape.num_layers * (self.stream if recompute else self.block)
        self.ids = tokens * ID + seq * shape.head_dim * state.parameter  # and the rotation's cosines and sines
        self.targets = tokens * ID * (2 * accumulate - 1)  # and the other microbatches
        self.norm = (2 * self.table + tokens) * recipe.wide  # the last one
        self.loss = self.table * recipe.compute + self.head * recipe.wide  # gradients of x and head, made with the loss

    def activations(self) -> int:
        """The most that is kept: after forward, or, with recomputation, while the last block is back."""
        block_is_back = self.block + 2 * self.beside + self.table * self.recipe.compute  # and the output of its MLP
        return self.kept + self.ids + max(self.norm + self.loss, block_is_back if self.recompute else 0)

    def at_the_loss(self) -> int:
        recipe, chunk = self.recipe, min(CHUNK, self.tokens)
        tile = chunk * self.shape.vocab_size
        rounded = recipe.compute if recipe.compute < recipe.wide else 0
        logits_and_log_p = 2 * tile * recipe.wide
        log_p_and_product = tile * (recipe.wide + rounded) + self.head * recipe.compute
        casts = (self.table + self.head) * recipe.compute if recipe.autocast else 0
        rows = self.stream + self.beside + self.targets + chunk * (ID + recipe.wide)  # what the loss reads
        tiles = max(logits_and_log_p, log_p_and_product)
        return self.earlier + self.kept + self.ids + self.norm + self.loss + casts + rows + tiles

    def in_backward(self) -> int:
        """Where the loss's gradients meet their factor; else in the last block's MLP or, if weights outweigh
        activations, the first one's. Inside an MLP: the stream's gradient, two of [tokens, intermediate] and one
        weight's."""
        shape, recipe, size = self.shape, self.recipe, self.recipe.state.parameter
        casts = self.head * size if self.narrow else self.stream if recipe.autocast else 0
        scaled = self.kept + self.ids + self.norm + 2 * self.loss + casts
        inside = self.stream + 2 * self.tokens * shape.intermediate_size * recipe.compute + self.targets
        inside += shape.hidden_size * shape.intermediate_size * recipe.state.gradient
        again = self.block + self.beside if self.recompute else 0  # its output stands in for its input
        head, blocks = self.head * recipe.state.gradient, (self.count.attention + self.count.mlp) * size
        last = self.kept + again + inside + (0 if self.earlier else head)
        to_first = (shape.num_layers - 1) * ((0 if self.earlier else blocks) - self.kept) // shape.num_layers
        return self.earlier + max(scaled, last, last + to_first)

    def at_the_embedding(self) -> int:
        """All gradients; a tied embedding's two parts are still there when their sum is made."""
        parts = 2 * self.head * self.recipe.state.gradient if self.shape.tie_embeddings else 0
        return self.gradients + self.stream + parts

    def at_the_optimizer(self) -> int:
        """With masters, float32 gradients, and the last matrix's 16-bit one beside them."""
        last = self.count.head or self.shape.hidden_size * self.shape.intermediate_size
        beside = last * self.recipe.state.gradient if self.recipe.state.master else 0
        return self.count.total * self.recipe.step_gradient + beside


def block_activation_bytes(
    shape: Shape, batch: int, seq: int, weights: int = 4, compute: int | None = None, *, experts: bool = False
) -> int:
    """Bytes that one block keeps for its backward pass on the CPU. weights, compute: bytes per element (2, 4 or 8).

    Elements per token, float32 (or float64) if marked *, else in `compute` bytes:
        each norm    2·h* + 1*    its input, the same normalised, 1 / rms;  h its output (autocast: one cast per reader)
        attention    3·H·d + 2·H_kv·d + H*    q, output, output as the projection reads it; k, v; log-sum-exp
        q/k norm     2·(H + H_kv)·d* + (H + H_kv)*    inputs, the same normalised, 1 / rms
        SwiGLU       4·f    gate, silu(gate), up, their product
    experts: of a block that has some in place of the MLP, dropless, without their losses or autocast. Instead of 4·f:
        4·shared·f_e and `mixture_activation_bytes`. (The order of rows, 16·k bytes per token, is held besides.)
    Autocast also keeps a cast of each weight. With a sliding window shorter than seq, the seq · seq mask is kept too.
    Scores never are: the kernel is fused (torch has none for a head_dim of 2).
    """
    compute = compute or weights
    wide, autocast = max(weights, 4), compute < weights
    h, heads, kv_heads = shape.hidden_size, shape.num_heads, shape.num_kv_heads
    q, kv = heads * shape.head_dim, kv_heads * shape.head_dim
    readers = 3 + 2 if autocast else 2  # q, k, v and gate, up each cast the norm's output, or share it
    copies = 3 if heads > 1 and seq > 1 else 2  # one head, or one token, is already laid out as the projection reads it
    qk_norm = 2 * (q + kv) + heads + kv_heads if shape.qk_norm else 0
    exact = 2 * (2 * h + 1) + heads + qk_norm
    rounded, moe = readers * h + copies * q + 2 * kv, shape.moe
    if experts:
        if autocast or moe is None or not weights == wide:
            raise ValueError("a block of experts is worked out in float32 or float64, for a model that has experts.")
        tokens = batch * seq
        mixture = mixture_activation_bytes(shape, tokens, moe.top_k * tokens, weights)
        rounded += 4 * moe.shared_experts * moe.intermediate_size
    else:
        mixture, rounded = 0, rounded + 4 * shape.intermediate_size
    mask = seq * seq if shape.sliding_window is not None and shape.sliding_window < seq else 0
    casts = (matmul_parameters(shape) - shape.vocab_size * h) // shape.num_layers if autocast else 0
    return batch * seq * (exact * wide + rounded * compute) + (mask + casts) * compute + mixture


def mixture_activation_bytes(shape: Shape, tokens: int, rows: float, itemsize: int = 4, world_size: int = 1) -> float:
    """Bytes that routed experts keep for backward, in float32 or float64. rows: (token, expert) pairs that the experts
    of this rank compute, k per token if it has them all; world_size: ranks that share each expert's width.

        per row      h + 2·f_e           row in; gate and up
        per token    k·h + 2·k + 1 + E   rows out; weights before and after they are normalised, their sum; scores
    and k numbers of experts per token, 8 bytes each.
    """
    moe, h = shape.moe, shape.hidden_size
    weights = 2 * moe.top_k + 1 if moe.normalize else moe.top_k
    of_rows = rows * (h + 2 * -(-moe.intermediate_size // world_size))
    of_tokens = tokens * (moe.top_k * h + weights + moe.num_experts)
    return (of_rows + of_tokens) * itemsize + tokens * moe.top_k * ID
