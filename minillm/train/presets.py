"""Models by name, for `python -m minillm train --model-size NAME`, all with tied embeddings.

Parameters are those with the committed tokenizer, whose 4,096 tokens alone take 4096 · hidden_size.
"""

from minillm.model import ModelConfig

_SIZES = {  # hidden, intermediate, layers, heads, kv heads
    "tiny": (32, 96, 2, 2, 1),  # 0.16 M: for tests
    "draft": (96, 192, 2, 4, 2),  # 0.56 M: guesses ahead for the target
    "target": (256, 768, 6, 8, 4),  # 5.8 M: learns to write Python in minutes on two cores
    "medium": (512, 1536, 8, 8, 4),  # 27 M: for a GPU
}
SIZES = tuple(_SIZES)


def preset(size: str, vocab_size: int, seq_len: int) -> ModelConfig:
    """The model called `size`; its context is seq_len, as it will have seen no position beyond."""
    if size not in _SIZES:
        raise ValueError(f"no model size {size!r}: use one of {', '.join(SIZES)}.")
    hidden, intermediate, layers, heads, kv_heads = _SIZES[size]
    return ModelConfig(
        vocab_size, hidden, intermediate, layers, heads, kv_heads, max_seq_len=seq_len, tie_embeddings=True
    )
