"""What autograd saves of one block for its backward pass: exactly the bytes that a run on the CPU keeps.

Elements per token, in float32 (or float64) where marked *, else in the bytes that matrix products take and give:

    each norm    2·h* + 1*    its input, the same normalised, 1 / rms
    its reader   h            the norm's output; under autocast a cast for each projection that reads it
    attention    3·H·d + 2·H_kv·d + H*    q, output, output as the projection reads it; k, v; log-sum-exp
    q/k norm     2·(H + H_kv)·d* + (H + H_kv)*    inputs, the same normalised, 1 / rms
    SwiGLU       4·f          gate, silu(gate), up, their product
    experts      4·f_e of the shared ones in place of 4·f, and `mixture_activation_bytes`

Tensor parallelism divides what lies inside its regions, the last four lines; sequence parallelism divides the norms,
and their outputs if backward gathers them again. Scores are never kept: the kernel is fused (torch has none for a
head_dim of 2). Symbols as in `predict.model`.

With a fused norm, as on a GPU, in place of what is marked *: a norm h + 1*, its input and 1 / rms; a q/k norm
(H + H_kv)·d + (H + H_kv)*. Inputs are as wide as the weights. Both of torch's fused attention kernels there, cuDNN's
and FlashAttention, keep what the CPU's keeps.
"""

from minillm.predict.model import Shape, matmul_parameters

ID = 8  # bytes of a token id


def block_activation_bytes(
    shape: Shape,
    batch: int,
    seq: int,
    weights: int = 4,
    compute: int | None = None,
    *,
    tp: int = 1,
    sequence: bool = False,
    regather: bool = True,
    rows: float | None = None,
    fused_norms: bool = False,
) -> float:
    """Bytes that one block of one of `tp` tensor-parallel ranks keeps for backward; of a mixture of experts if the
    shape has one.

    weights, compute: bytes per element (2, 4 or 8) of the weights and of what matrix products take and give; None: the
    same. Fewer than the weights' is autocast, which also keeps a cast of each weight. sequence, regather: of sequence
    parallelism, see `tensor_parallel.regions.Region`. rows: (token, expert) pairs that this rank's experts compute;
    None: k per token. fused_norms: norms are one kernel, as on a GPU. A sliding window shorter than seq adds its
    seq · seq mask. The order of experts' rows, 16·k bytes per token, is held besides.

    Raises ValueError for experts in 16 bits or under autocast, and for autocast on several ranks.
    """
    compute = compute or weights
    wide, autocast, h, moe = max(weights, 4), compute < weights, shape.hidden_size, shape.moe
    if moe and (autocast or weights != wide):
        raise ValueError("what a block of experts keeps is known in float32 or float64 only, without autocast.")
    if autocast and tp > 1:
        raise ValueError(f"what a block of one of {tp} tensor-parallel ranks keeps is known without autocast only.")
    q, kv, f = local_widths(shape, tp)
    heads, kv_heads = q // shape.head_dim, kv // shape.head_dim
    mixture, whole_inputs = 0, 0
    if moe:
        f, whole_inputs = -(-moe.shared_experts * moe.intermediate_size // tp), 1  # routers see whole sequences
        rows = moe.top_k * batch * seq if rows is None else rows
        mixture = mixture_activation_bytes(shape, batch * seq, rows, weights, tp)
    copies = 3 if heads > 1 and seq > 1 else 2  # one head, or one token, is already laid out as the projection reads it
    norm_input = weights if fused_norms else 2 * wide  # bytes per element: without a kernel of its own twice, and wide
    qk_norm = (q + kv) * norm_input + (heads + kv_heads) * wide if shape.qk_norm else 0
    inputs = 3 + 2 if autocast else 2  # q, k, v and gate, up each cast the norm's output, or share it
    casts = (matmul_parameters(shape) - shape.vocab_size * h) // shape.num_layers if autocast else 0
    mask = seq * seq if shape.sliding_window is not None and shape.sliding_window < seq else 0

    tokens, shards = batch * seq, tp if sequence else 1
    norms = 2 * (h * norm_input + wide) * (tokens // shards)
    read = (inputs - whole_inputs) * h * (tokens // (shards if regather else 1)) + whole_inputs * h * tokens
    inside = (copies * q + 2 * kv + 4 * f) * tokens
    return norms + (heads * wide + qk_norm) * tokens + (read + inside + mask + casts) * compute + mixture


def mixture_activation_bytes(shape: Shape, tokens: int, rows: float, itemsize: int = 4, tp: int = 1) -> float:
    """Bytes that routed experts keep for backward, in float32 or float64. rows: (token, expert) pairs that the experts
    of this rank compute, k per token if it has them all; tp: ranks that share each expert's width.

        per row      h + 2·f_e           row in; gate and up
        per token    k·h + 2·k + 1 + E   rows out; weights before and after they are normalised, their sum; scores
    and k numbers of experts per token, 8 bytes each.
    """
    moe, h = shape.moe, shape.hidden_size
    weights = 2 * moe.top_k + 1 if moe.normalize else moe.top_k
    of_rows = rows * (h + 2 * -(-moe.intermediate_size // tp))
    of_tokens = tokens * (moe.top_k * h + weights + moe.num_experts)
    return (of_rows + of_tokens) * itemsize + tokens * moe.top_k * ID


def local_widths(shape: Shape, tp: int) -> tuple[int, int, int]:
    """Outputs of q_proj, of k_proj and of gate_proj on one of `tp` ranks; kv heads are copied where there are fewer."""
    kv_parts = min(tp, shape.num_kv_heads)
    q = shape.num_heads // tp * shape.head_dim
    return q, shape.num_kv_heads // kv_parts * shape.head_dim, -(-shape.intermediate_size // tp)
