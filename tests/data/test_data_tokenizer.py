import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from course.lab11_data_pipeline import bpe
from minillm.data import Tokenizer, corpus, train_tokenizer
from minillm.data.__main__ import main
from minillm.data.tokenizer import COMMITTED, SEPARATOR

TOKENIZER = Tokenizer.load()
HARD = "def f(x):\n\treturn 'é世界🎉' # \u00a0\u200d\ufeff\r\n" + SEPARATOR + "    e\u0301\0"


def test_the_committed_tokenizer_is_small_and_complete():
    assert TOKENIZER.vocab_size == 4096
    assert (TOKENIZER.eos, TOKENIZER.eos_id, TOKENIZER.bos_id) == (SEPARATOR, 0, None)
    assert COMMITTED.stat().st_size < 300_000
    assert b"".join(TOKENIZER.decode_bytes([token]) for token in range(1, 257)) == bytes(
        bpe.CHAR_TO_BYTE[char] for char in sorted(bpe.CHAR_TO_BYTE)
    )


@pytest.mark.slow
def test_the_committed_tokenizer_is_what_its_command_makes():
    source = json.loads(COMMITTED.with_suffix(".source.json").read_text())
    if corpus().fingerprint("train") != source["sha256"]:
        pytest.skip(f"the tokenizer was trained on the library of Python {source['python']}, this is another one")
    again = train_tokenizer(document.text for document in corpus().documents("train"))
    assert again.fingerprint == TOKENIZER.fingerprint


def test_training_is_deterministic_and_its_command_writes_the_source(tmp_path):
    (tmp_path / "text").mkdir()
    for n in range(30):
        (tmp_path / "text" / f"{n}.txt").write_text(f"the {n} same words again and again\n" * n)
    for name in ("a.json", "b.json"):
        options = ["--data", str(tmp_path / "text"), "--vocab-size", "300", "--out", str(tmp_path / name)]
        assert main(["tokenizer", *options]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert Tokenizer.load(tmp_path / "a.json").vocab_size == 300
    assert json.loads((tmp_path / "a.source.json").read_text())["files"] < 30


def test_the_command_refuses_bad_input_in_one_line(tmp_path, capsys):
    assert main(["tokenizer", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "t.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "t.json").exists()


@given(st.text())
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.binary())
def test_any_bytes_come_back(data):
    assert TOKENIZER.decode_bytes(TOKENIZER.encode_bytes(data)) == data


@given(st.lists(st.sampled_from([b"\xff", b"\xc3", b"\xa9", b"\xe4\xb8", b"def ", "é世".encode(), b"\0"])))
def test_any_mixture_of_text_and_broken_characters_comes_back(parts):
    data = b"".join(parts)
    assert TOKENIZER.decode_bytes(TOKENIZER.encode_bytes(data)) == data


@given(st.text())
def test_bytes_and_text_take_the_same_tokens(text):
    assert TOKENIZER.encode_bytes(text.encode()) == TOKENIZER.encode(text)


def test_hard_text_comes_back():
    assert TOKENIZER.decode(TOKENIZER.encode(HARD)) == HARD


def test_text_cannot_forge_the_separator_unless_allowed():
    assert 0 not in TOKENIZER.encode(HARD)
    with_special = TOKENIZER.encode(HARD, special=True)
    assert with_special.count(0) == 1
    assert TOKENIZER.decode(with_special) == HARD
    assert TOKENIZER.decode(with_special, skip_special=True) == HARD.replace(SEPARATOR, "")
    assert TOKENIZER.encode(SEPARATOR, special=True) == [0]


def test_the_library_tokenizer_is_the_mechanism_of_bpe():
    merges = json.loads(COMMITTED.read_text())["model"]["merges"]
    merges = [tuple(bytes(bpe.CHAR_TO_BYTE[char] for char in part) for part in merge) for merge in merges]
    text = corpus().documents("validation").__next__().text[:5000]
    assert bpe.encode(text, merges) == [TOKENIZER.decode_bytes([token]) for token in TOKENIZER.encode(text)]


def test_batches_and_threads_give_what_single_calls_give():
    texts = [HARD, "", "a", SEPARATOR] * 5
    alone = [TOKENIZER.encode(text) for text in texts]
    assert [ids.tolist() for ids in TOKENIZER.encode_batch(texts)] == alone
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(TOKENIZER.encode, texts)) == alone


@given(st.text())
def test_streamed_pieces_join_to_the_text_and_are_always_whole_characters(text):
    push = TOKENIZER.stream()
    pieces = [push(token) for token in TOKENIZER.encode(text)]
    assert "".join(pieces) == text
    assert push(final=True) == ""


def test_a_stream_holds_back_half_characters():
    push = TOKENIZER.stream()
    ids = TOKENIZER.encode_bytes(b"\xf0\x9f")
    assert [push(token) for token in ids] == ["", ""]
    assert push(*TOKENIZER.encode_bytes(b"\x8e"), *TOKENIZER.encode_bytes(b"\x89")) == "🎉"
    assert push(*ids, final=True) == "\ufffd"
    assert TOKENIZER.stream()(0) == ""
    assert TOKENIZER.stream(skip_special=False)(0) == SEPARATOR


@pytest.mark.parametrize("token", [4096, -1, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=f"token id {token} is not in this vocabulary of 4096"):
        TOKENIZER.decode([5, token])


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="no Unicode string"):
        TOKENIZER.encode("\ud800")


def test_transformers_reads_the_same_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(COMMITTED))
    assert peer(HARD)["input_ids"] == TOKENIZER.encode(HARD, special=True)
    assert peer.decode(TOKENIZER.encode(HARD)) == HARD
    TOKENIZER.save(tmp_path / "model")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (peer.eos_token, peer.eos_token_id) == (SEPARATOR, 0)
    peer.save_pretrained(tmp_path / "theirs")
    theirs = Tokenizer.load(tmp_path / "theirs")
    assert theirs.encode(HARD) == TOKENIZER.encode(HARD)
    assert theirs.eos_id == 0


def test_save_load_and_pickle_keep_everything(tmp_path):
    TOKENIZER.save(tmp_path)
    for copy in (
        Tokenizer.load(tmp_path),
        Tokenizer.load(tmp_path / "tokenizer.json"),
        pickle.loads(pickle.dumps(TOKENIZER)),
    ):
        assert copy.fingerprint == TOKENIZER.fingerprint
        assert copy.encode(HARD) == TOKENIZER.encode(HARD)


def test_special_tokens_are_named_by_the_config(tmp_path):
    TOKENIZER.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"bos_token": {"content": SEPARATOR}, "eos_token": "def"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    other = Tokenizer.load(tmp_path)
    assert (other.bos_id, other.eos) == (0, "def")
    assert other.fingerprint != TOKENIZER.fingerprint
    config["eos_token"] = "<nothing>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no end-of-text token"):
        _ = Tokenizer.load(tmp_path).eos_id


def test_unreadable_tokenizers_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer\.json"):
        Tokenizer.load(tmp_path)
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="not byte-level BPE"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="vocab_size 256 is too small"):
        train_tokenizer(["text"], 256)
