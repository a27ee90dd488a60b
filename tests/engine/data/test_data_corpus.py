import ast
import os
import sys

import pytest

from minillm.data import Corpus, corpus


@pytest.fixture
def folder(tmp_path):
    for n in range(200):
        path = tmp_path / f"part{n % 7}" / f"{n:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"file {n}\r\nzwei Zeilen, é\n".encode())
    return tmp_path


def test_the_standard_library_is_real_code_in_a_stable_order():
    text = corpus()
    assert list(text.names) == sorted(text.names)
    assert text.names == corpus().names
    assert {"abc.py", "asyncio/events.py", "json/decoder.py"} <= set(text.names)
    statistics = text.statistics()
    assert statistics.files > 400
    assert 5_000_000 < statistics.bytes < 20_000_000
    for name, source in text.documents("validation"):
        ast.parse(source, name)


def test_tests_tables_and_other_peoples_packages_are_left_out():
    unwanted = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "__pycache__"}
    assert not [name for name in corpus().names if unwanted & set(name.split("/"))]
    assert not [name for name in corpus().names if name.startswith("_sysconfigdata")]


def test_train_and_validation_split_the_files(folder):
    for text in (corpus(), corpus(folder)):
        train, validation = text.split_names("train"), text.split_names("validation")
        assert sorted(train + validation) == list(text.names)
        assert 0.01 < len(validation) / len(text.names) < 0.1


def test_a_new_file_moves_no_other_file_between_splits(folder):
    before = corpus(folder).split_names("validation")
    (folder / "new.txt").write_text("new")
    assert set(before) == set(corpus(folder).split_names("validation")) - {"new.txt"}


def test_few_files_still_hold_one_out(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    text = corpus(tmp_path)
    assert len(text.split_names("train")) == len(text.split_names("validation")) == 1


@pytest.mark.parametrize("line", ["a line of text\n", "x"])
def test_a_single_file_holds_out_its_end(tmp_path, line):
    path = tmp_path / "one.txt"
    path.write_text(line * 1000)
    (train,), (validation,) = (list(corpus(path).documents(split)) for split in ("train", "validation"))
    assert train.text + validation.text == line * 1000
    assert 0.04 < len(validation.text) / len(line * 1000) < 0.06
    assert next(corpus(path).documents()).text == line * 1000


def test_text_arrives_as_it_is_and_lazily(folder):
    text = corpus(folder)
    assert next(text.documents()).text == "file 0\r\nzwei Zeilen, é\n"
    documents = text.documents()
    next(documents)
    (folder / text.names[1]).write_text("changed after the first was read")
    assert next(documents).text == "changed after the first was read"


def test_fingerprint_follows_names_and_contents(folder):
    first = corpus(folder).fingerprint()
    assert corpus(folder).fingerprint() == first
    os.rename(folder / "part0" / "000.txt", folder / "part0" / "renamed.txt")
    renamed = corpus(folder).fingerprint()
    (folder / "part0" / "renamed.txt").write_text("other")
    assert len({first, renamed, corpus(folder).fingerprint()}) == 3


def test_hidden_files_and_caches_are_not_text(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no")
    (folder / ".hidden.txt").write_text("no")
    assert len(corpus(folder).names) == 200


def test_binary_files_in_a_folder_are_named_once(folder):
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "zeros.bin").write_bytes(b"abc\0def")
    with pytest.warns(UserWarning, match=r"2 of 202 files that are not UTF-8 text: picture.png, zeros.bin"):
        assert len(corpus(folder).names) == 200


def test_a_character_cut_by_the_sample_is_still_text(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("x" + "é" * 70_000, encoding="utf-8")
    assert next(corpus(path).documents()).text == "x" + "é" * 70_000


def test_bytes_that_go_wrong_late_are_named(tmp_path):
    path = tmp_path / "late.txt"
    path.write_bytes(b"x" * 100_000 + b"\xff")
    with pytest.raises(ValueError, match=r"late.txt is not UTF-8 text at byte 100000"):
        list(corpus(path).documents())


def test_bad_input_names_the_path(tmp_path):
    with pytest.raises(ValueError, match=r"no such file or folder: .*nowhere"):
        corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no UTF-8 text file \(0 files looked at\)"):
        corpus(tmp_path)
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match=r"weights.bin is not UTF-8 text"):
        corpus(binary)
    with pytest.raises(ValueError, match=r"holds no UTF-8 text file \(1 files"):
        corpus(tmp_path)
    with pytest.raises(ValueError, match="no split called 'test'"):
        Corpus(tmp_path, ("a", "b")).split_names("test")


def test_the_interpreter_that_runs_is_the_one_that_is_read():
    assert next(d for d in corpus().documents() if d.name == "this.py").text.count("\n") > 10
    assert os.path.samefile(corpus().root, os.path.dirname(sys.modules["os"].__file__))
