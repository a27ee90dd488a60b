import numpy as np
import pytest

from course.lab11_data_pipeline.ngram import KneserNey
from minillm.data import Tokenizer, corpus, tokenize
from minillm.predict.model import bits_per_byte, entropy


def by_hand(tokens, vocab_size, order, discount, context, token):
    """The definition with dictionaries of tuples, one probability at a time."""
    grams = {tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)}
    counts = {g: sum(tuple(tokens[i : i + order]) == g for i in range(len(tokens) - order + 1)) for g in grams}

    def p(counts, n, context):
        if n == 0:
            return 1 / vocab_size
        lower = {}
        for gram in counts:
            lower[gram[1:]] = lower.get(gram[1:], 0) + 1
        below = p(lower, n - 1, context[1:])
        after = {gram: count for gram, count in counts.items() if gram[:-1] == context}
        if not after:
            return below
        mine = max(counts.get((*context, token), 0) - discount, 0)
        return (mine + discount * len(after) * below) / sum(after.values())

    return p(counts, order, tuple(context))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_the_definition(order):
    draw = np.random.default_rng(order)
    tokens, other = draw.integers(0, 5, 60), draw.integers(0, 6, 30)
    got = KneserNey(tokens, 6, order).probabilities(other)
    for i in range(order - 1, 30):
        expected = by_hand(tokens.tolist(), 6, order, 0.75, other[i - order + 1 : i].tolist(), other[i])
        assert got[i] == pytest.approx(expected)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one_after_any_context(order):
    tokens = np.random.default_rng(0).integers(0, 7, 50)
    model = KneserNey(tokens, 9, order)
    for context in ([1, 2], [8, 8], [3, 8]):
        total = sum(model.probabilities(np.array([*context, token]))[-1] for token in range(9))
        assert total == pytest.approx(1)


def test_the_start_of_a_text_has_less_context():
    tokens = np.random.default_rng(0).integers(0, 5, 200)
    first = KneserNey(tokens, 5, 3).probabilities(tokens[:1])[0]
    assert first == pytest.approx(by_hand(tokens.tolist(), 5, 3, 0.75, [9, 9], tokens[0]))  # no context 9 9 was seen


def test_bad_orders_are_refused():
    tokens = np.arange(10)
    for order in (0, 6):
        with pytest.raises(ValueError, match=f"order {order} is outside 1..5"):
            KneserNey(tokens, 4096, order)
    with pytest.raises(ValueError, match="2 tokens hold no 3-gram"):
        KneserNey(tokens[:2], 4096, 3)


def test_the_largest_ids_fit(order=5):
    tokens = np.full(20, 4095)
    assert KneserNey(tokens, 4096, order).probabilities(tokens)[-1] > 0.9


@pytest.mark.full
def test_context_helps_on_held_out_code(tmp_path):
    tokenizer = Tokenizer.load()
    train, validation = (tokenize(corpus(), tokenizer, split, tmp_path) for split in ("train", "validation"))
    bits = []
    for order in range(1, 5):
        nats = KneserNey(np.asarray(train.array), train.vocab_size, order).nats_per_token(np.asarray(validation.array))
        bits.append(bits_per_byte(nats, len(validation), validation.text_bytes))
    assert bits == sorted(bits, reverse=True)
    unigram = entropy(np.bincount(train.array).tolist())
    assert bits[0] == pytest.approx(bits_per_byte(unigram, len(train), train.text_bytes), rel=0.1)
    assert bits[3] < 0.7 * bits[0]
