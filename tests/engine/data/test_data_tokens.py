import os
import pickle

import numpy as np
import pytest

from minillm.data import Tokenizer, Tokens, corpus, read_tokens, tokenize, write_tokens
from minillm.data import tokens as tokens_module
from minillm.data.tokens import HEADER_BYTES, cache_folder


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(70):
        (folder / f"{n:02}.txt").write_text(f"line {n} <|endoftext|> é\n" * n, "utf-8")
    return corpus(folder)


def some_tokens(vocab_size=4096, count=1000):
    array = np.random.default_rng(0).integers(0, vocab_size, count).astype(np.uint32)
    return Tokens(array, vocab_size, separator=0, documents=3, text_bytes=4000)


def test_the_tokens_are_the_documents_each_followed_by_the_separator(text, tokenizer, tmp_path):
    made = tokenize(text, tokenizer, "all", tmp_path / "cache")
    documents = list(text.documents())
    expected = [token for document in documents for token in [*tokenizer.encode(document.text), tokenizer.eos_id]]
    assert made.array.tolist() == expected
    assert (made.documents, made.array.tolist().count(0)) == (70, 70)
    assert made.text_bytes == text.statistics().bytes
    decoded = tokenizer.decode(made.array, skip_special=True)
    assert decoded == "".join(document.text for document in documents)


def test_long_documents_are_encoded_in_parts_without_loss(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "_CHUNK_CHARACTERS", 7)
    made = tokenize(text, tokenizer, "all", tmp_path)
    assert made.documents == 70
    assert tokenizer.decode(made.array, skip_special=True) == "".join(document.text for document in text.documents())


def test_the_second_time_is_read_from_the_file(text, tokenizer, tmp_path, monkeypatch):
    first = tokenize(text, tokenizer, "train", tmp_path)
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: pytest.fail("tokenised again"))
    second = tokenize(text, tokenizer, "train", tmp_path)
    assert second.path == first.path
    assert isinstance(second.array, np.memmap)
    assert second.array.tolist() == first.array.tolist()


def test_changed_text_split_or_tokenizer_makes_another_file(text, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    paths = {tokenize(text, tokenizer, split, cache).path for split in ("train", "validation", "all")}
    (text.root / text.split_names("train")[0]).write_text("changed")
    paths.add(tokenize(text, tokenizer, "train", cache).path)
    config = {"eos": "def"}
    other = Tokenizer(Tokenizer.load()._backend, **config)
    paths.add(tokenize(text, other, "train", cache).path)
    assert len(paths) == 5 == len(list(cache.iterdir()))


def test_the_cache_lies_where_xdg_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "minillm" / "tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "minillm" / "tokens"


@pytest.mark.parametrize(("vocab_size", "width"), [(4096, 2), (1 << 16, 2), ((1 << 16) + 1, 4), (151_936, 4)])
def test_ids_take_two_bytes_while_they_fit(tmp_path, vocab_size, width):
    written = write_tokens(tmp_path / "t.tokens", some_tokens(vocab_size))
    assert written.path.stat().st_size == HEADER_BYTES + 1000 * width
    assert written.array.tolist() == some_tokens(vocab_size).array.tolist()
    assert (written.vocab_size, written.documents, written.text_bytes) == (vocab_size, 3, 4000)


def test_no_tokens_are_a_valid_file(tmp_path):
    assert len(write_tokens(tmp_path / "t.tokens", some_tokens(count=0))) == 0


def test_a_pickle_names_the_file_instead_of_copying_it(tmp_path):
    written = write_tokens(tmp_path / "t.tokens", some_tokens(count=100_000))
    data = pickle.dumps(written)
    assert len(data) < 1000
    assert pickle.loads(data).array.tolist() == written.array.tolist()
    assert pickle.loads(pickle.dumps(some_tokens())).array.tolist() == some_tokens().array.tolist()


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = write_tokens(tmp_path / "t.tokens", some_tokens()).path
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"\0\0", whole[:HEADER_BYTES]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t.tokens is damaged: \d+ bytes instead of 3024 for 1000 tokens"):
            read_tokens(path)
    for foreign in (b"", b"\x93NUMPY", b"[1]", b"{}", b'{"format": "minillm-tokens-0"}', whole[:100]):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match=r"t.tokens is not a token file of this version"):
            read_tokens(path)
    with pytest.raises(ValueError, match=r"no token file at .*nothing.tokens"):
        read_tokens(tmp_path / "nothing.tokens")


def test_a_damaged_cache_file_is_made_again(text, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    first = tokenize(text, tokenizer, "train", cache)
    expected = first.array.tolist()
    first.path.write_bytes(first.path.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="is damaged.*making it again"):
        assert tokenize(text, tokenizer, "train", cache).array.tolist() == expected
    assert tokenize(text, tokenizer, "train", cache).array.tolist() == expected


def test_a_cache_that_cannot_be_written_costs_one_warning(text, tokenizer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="cannot cache tokens in .* they stay in memory") as warned:
        made = tokenize(text, tokenizer, "train", tmp_path / "file" / "cache")
    assert len(warned) == 1
    assert made.path is None
    assert made.array.tolist() == tokenize(text, tokenizer, "train", tmp_path / "cache").array.tolist()


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    written = write_tokens(tmp_path / "t.tokens", some_tokens())
    before = written.path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_tokens(written.path, some_tokens(count=2000))
    assert [path.name for path in tmp_path.iterdir()] == ["t.tokens"]
    assert written.path.read_bytes() == before


@pytest.mark.full
def test_the_library_becomes_tokens_of_three_to_four_bytes(library_tokens):
    train, validation = library_tokens
    assert all(3 < tokens.text_bytes / len(tokens) < 4.5 for tokens in (train, validation))
    assert len(train) > 1_500_000
    assert train.array.max() < 4096
