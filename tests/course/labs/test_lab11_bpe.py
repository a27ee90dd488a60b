import json
import random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from course.lab11_data_pipeline import bpe
from course.lab11_data_pipeline.baselines import UNKNOWN, character_tokenizer, word_tokenizer
from minillm.data import corpus

ascii_text = st.text(st.characters(min_codepoint=32, max_codepoint=126, include_characters="\n\t"), max_size=300)


def library(text, vocab_size):
    """(merges, encode) of the `tokenizers` library on the same text, as byte strings."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text], trainer)
    merges = [tuple(map(to_bytes, merge)) for merge in json.loads(backend.to_str())["model"]["merges"]]
    return merges, lambda other: [to_bytes(token) for token in backend.encode(other).tokens]


def to_bytes(token):
    return bytes(bpe.CHAR_TO_BYTE[char] for char in token)


def test_by_hand():
    # a-a is seen twice; then aa-a and a-b once each, and a has a smaller id than aa
    assert bpe.train("aaab", 258) == [(b"a", b"a"), (b"a", b"b")]
    assert bpe.encode("aaab", [(b"a", b"a"), (b"a", b"b")]) == [b"aa", b"ab"]
    assert bpe.encode("aaab", [(b"a", b"b"), (b"a", b"a")]) == [b"aa", b"ab"]
    assert bpe.encode("aab", [(b"a", b"b"), (b"a", b"a")]) == [b"a", b"ab"]


@pytest.mark.parametrize("seed", range(60))
def test_merges_and_tokens_equal_the_library_on_texts_full_of_ties(seed):
    draw = random.Random(seed)
    text = "".join(draw.choice("aab bc\n") for _ in range(draw.randint(0, 400)))
    vocab_size = 256 + draw.choice([0, 1, 5, 30, 200])
    merges, encode = library(text, vocab_size)
    assert bpe.train(text, vocab_size) == merges
    assert bpe.encode(text[::-1], merges) == encode(text[::-1])


def test_merges_and_tokens_equal_the_library_on_code():
    text = "".join(document.text for document in corpus().documents("validation"))[:20_000]
    text = text.encode("ascii", "ignore").decode()
    merges, encode = library(text, 400)
    assert bpe.train(text, 400) == merges
    assert bpe.encode(text, merges) == encode(text)


@given(ascii_text)
def test_the_cut_is_gpt2s_for_ascii(text):
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert [piece.encode() for piece in bpe.split(text)] == [to_bytes(piece) for piece, _ in cut]


@given(st.text(max_size=100))
def test_nothing_is_lost_whatever_the_text(text):
    assert "".join(bpe.split(text)) == text
    assert b"".join(bpe.encode(text, bpe.train(text, 300))) == text.encode()


def test_more_merges_give_fewer_tokens():
    text = next(corpus().documents()).text[:20_000]
    merges = bpe.train(text, 600)  # a smaller vocabulary is the beginning of a larger one
    sizes = [len(bpe.encode(text, merges[: vocab_size - 256])) for vocab_size in (256, 300, 400, 600)]
    assert sizes[0] == len(text.encode())
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size 255 is too small"):
        bpe.train("text", 255)


def test_words_lose_text_and_characters_make_it_long():
    documents = [document.text for document in corpus().documents("validation")]
    train, held_out = "".join(documents[:-3]), "".join(documents[-3:])
    words, characters = word_tokenizer([train], 2000), character_tokenizer(train)
    assert words.unknown_share(held_out) > 0.02
    assert UNKNOWN in words.decode(words.encode(held_out))
    assert len(words.encode(held_out)) < len(characters.encode(held_out)) == len(held_out)
    assert characters.decode(characters.encode(train)) == train
    assert characters.unknown_share("\u4e16") == 1
