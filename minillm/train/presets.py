"""Models by name, for `python -m minillm train --model-size NAME`, all with tied embeddings.

Parameters are those with the committed tokenizer, whose 4,096 tokens alone take 4096 · hidden_size. The last two are
large enough that computing, messages and memory of a step are those of real training.
"""

from dataclasses import replace

from minillm.model import ModelConfig, MoEConfig

_SIZES = {  # hidden, intermediate, layers, heads, kv heads
    "tiny": (32, 96, 2, 2, 1),  # 0.16 M: for tests
    "draft": (96, 192, 2, 4, 2),  # 0.56 M: guesses ahead for the target
    "target": (256, 768, 6, 8, 4),  # 5.8 M: learns to write Python in minutes on two cores
    "medium": (512, 1536, 8, 8, 4),  # 27 M: for a GPU
    "large": (1024, 3072, 24, 16, 8),  # 0.31 B: for a GPU of 16 GB and more
    "1b": (2048, 8192, 16, 32, 8),  # 0.98 B, the blocks of Llama 3.2 1B: 16 GB of model states, for several GPUs
}
SIZES = tuple(_SIZES)


BALANCE_LOSS = 0.01  # Fedus et al. 2021, §2.2


def preset(
    size: str, vocab_size: int, seq_len: int, experts: int | None = None, top_k: int | None = None
) -> ModelConfig:
    """The model called `size`. Its context is seq_len, since it will have seen no later position.

    experts: in every layer, in place of the MLP. They are 1 / top_k as wide, so that a token, which meets top_k of them
    (None: 2), costs what it costs in the dense model but for the router.
    """
    if size not in _SIZES:
        raise ValueError(f"no model size {size!r}: use one of {', '.join(SIZES)}.")
    hidden, intermediate, layers, heads, kv_heads = _SIZES[size]
    dense = ModelConfig(
        vocab_size, hidden, intermediate, layers, heads, kv_heads, max_seq_len=seq_len, tie_embeddings=True
    )
    if experts is None:
        if top_k is not None:
            raise ValueError(f"top_k {top_k} chooses among experts: say how many there are (experts), or leave it out.")
        return dense
    top_k = 2 if top_k is None else top_k
    if top_k < 1 or intermediate % top_k:
        raise ValueError(
            f"top_k {top_k} does not divide the {intermediate} columns of the MLP among experts: use 1 or 2."
        )
    return replace(dense, moe=MoEConfig(experts, top_k, intermediate // top_k, balance_loss=BALANCE_LOSS))
