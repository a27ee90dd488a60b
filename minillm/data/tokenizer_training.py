"""A tokenizer from texts. The committed one is made so: `python -m minillm.data tokenizer`."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from minillm.data.tokenizer import SEPARATOR, Tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Byte-level BPE with GPT-2's cuts and one special token, the document separator (id 0).

    The same texts give the same tokenizer. Raises ValueError if `vocab_size` cannot hold the separator and 256 bytes.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size {vocab_size} is too small: the 256 bytes and {SEPARATOR} need 257 tokens")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, SEPARATOR)
