"""The corpus in numbers: sizes, tokens, and what a model has to beat.

python -m course.lab11_data_pipeline.corpus_report [PATH]
"""

import sys

import numpy as np

from course.lab11_data_pipeline.formulas import bits_per_byte, entropy, nats_per_token
from course.lab11_data_pipeline.ngram import ngram_bits_per_byte
from minillm.data import Tokenizer, corpus, tokenize


def report(data: str | None = None, orders: range = range(1, 6)) -> str:
    """A text table for the committed tokenizer on the corpus (or `data`)."""
    text, tokenizer = corpus(data), Tokenizer.load()
    train, validation = (tokenize(text, tokenizer, split) for split in ("train", "validation"))
    lines = [f"corpus            {text.root}"]
    for name, tokens in (("train", train), ("validation", validation)):
        lines.append(
            f"{name:<18}{tokens.documents:,} documents, {tokens.text_bytes:,} bytes, {len(tokens):,} tokens, "
            f"{tokens.bytes_per_token:.3f} bytes/token"
        )
    unigram = entropy(np.bincount(train.array).tolist())
    bits = bits_per_byte(unigram, len(train), train.text_bytes)
    lines.append(f"unigram entropy   {bits:.4f} bits/byte of the training text = {unigram:.4f} nats/token")
    for order in orders:
        bits = ngram_bits_per_byte(train, validation, order)
        nats = nats_per_token(bits, len(validation), validation.text_bytes)
        lines.append(f"{order}-gram            {bits:.4f} bits/byte of the validation text = {nats:.4f} nats/token")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(*sys.argv[1:2]))
