"""A folder that cannot be written is refused before the work, not after it."""

from pathlib import Path

import pytest

from minillm.cli.folders import check_new_folder
from minillm.model import ModelConfig, Transformer, save_hf

MODEL = ModelConfig(20, 8, 12, 1, 2, max_seq_len=8)


def test_a_folder_that_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match="--export /proc/x/y cannot be written"):
        check_new_folder("--export", Path("/proc/x/y"))


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, name another folder"):
        check_new_folder("--export", tmp_path / "file" / "inside")


def test_nothing_is_left_behind(tmp_path):
    check_new_folder("--export", tmp_path / "a" / "b")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "kept").write_text("")
    check_new_folder("--export", tmp_path / "there")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["there", "kept"]


def test_an_earlier_checkpoint_is_spoken_of_where_there_is_one(tmp_path, monkeypatch):
    model = Transformer(MODEL, seed=0)
    with pytest.raises(OSError, match=r"cannot save to /proc/x \(.*\)\.$"):
        save_hf(model, "/proc/x")
    save_hf(model, tmp_path)
    monkeypatch.setattr("minillm.model.hf.write.save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="the checkpoint that was there still loads"):
        save_hf(model, tmp_path)
