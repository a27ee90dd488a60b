"""A save that is stopped anywhere leaves a folder that loads, and loads one of the two checkpoints whole."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minillm
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.model.hf import write as writing

CONFIG = ModelConfig(67, 32, 48, 2, 4, 2, max_seq_len=64)
LAYOUTS = [None, 20_000]  # one file, shards


def whole(folder):
    """The seed of the checkpoint in the folder; fails if it mixes two."""
    found = dict(load_hf(folder).named_parameters())
    for seed in (1, 2):
        if all(torch.equal(p, found[name]) for name, p in Transformer(CONFIG, seed=seed).named_parameters()):
            return seed
    raise AssertionError("the folder holds a mixture of checkpoints")


class Killed(BaseException):
    """Like a killed process: nothing after it may touch the disk."""


def kill_at(monkeypatch, step):
    """Every change the save makes to the disk counts; number `step` does not happen, and none after it."""
    count = itertools.count()

    def guarded(function):
        def call(*args, **kwargs):
            if next(count) >= step:
                raise Killed
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(writing, "save_file", guarded(writing.save_file))
    monkeypatch.setattr(writing.os, "replace", guarded(os.replace))
    monkeypatch.setattr(writing.Path, "unlink", guarded(writing.Path.unlink))
    monkeypatch.setattr(writing.Path, "write_text", guarded(writing.Path.write_text))
    return count


@pytest.mark.full
@pytest.mark.parametrize("before, after", itertools.product(LAYOUTS, LAYOUTS))
def test_killed_at_any_step(before, after, tmp_path):
    seen = set()
    for step in itertools.count():
        folder = tmp_path / str(step)
        save_hf(Transformer(CONFIG, seed=1), folder, max_shard_bytes=before)
        (folder / "tokenizer.json").write_text("kept")
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, step)
            try:
                save_hf(Transformer(CONFIG, seed=2), folder, max_shard_bytes=after)
                finished = True
            except Killed:
                finished = False
        seen.add(whole(folder))
        assert (folder / "tokenizer.json").read_text() == "kept"
        if finished:
            break
        save_hf(Transformer(CONFIG, seed=2), folder, max_shard_bytes=after)  # the next save cleans up
        assert whole(folder) == 2
        shards = list(folder.glob("model-*.safetensors"))
        assert not list(folder.glob(".*.tmp")) and len({path.name.split("-")[-1] for path in shards}) == bool(after)
    assert step > 3 and seen == {1, 2} and whole(folder) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full
def test_disk_full(layout, tmp_path):
    """The operating system refuses to write past a file size: a real failed write, in the middle of a file."""
    folder = tmp_path / "checkpoint"
    save_hf(Transformer(CONFIG, seed=1), folder, max_shard_bytes=layout)
    names = sorted(os.listdir(folder))
    script = f"""
import resource, signal
from minillm.model import ModelConfig, Transformer, save_hf
model = Transformer({CONFIG!r}, seed=2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    save_hf(model, {str(folder)!r}, max_shard_bytes={layout})
except OSError as error:
    print(error)
"""
    root = str(Path(minillm.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "cannot save to" in done.stdout and "the checkpoint that was there still loads" in done.stdout
    assert whole(folder) == 1 and sorted(os.listdir(folder)) == names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_is_on_the_disk_before_the_first_rename(layout, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(writing, "flush", lambda path, flush=writing.flush: (flush(path), done.append(path)))
    monkeypatch.setattr(
        writing.os, "replace", lambda new, final, replace=os.replace: (replace(new, final), done.append(new))
    )
    save_hf(Transformer(CONFIG), tmp_path, max_shard_bytes=layout)
    renamed = [path for path in done if done.count(path) == 2 and path != tmp_path]
    first = min(len(done) - 1 - done[::-1].index(path) for path in renamed)
    flushed = done[:first]
    assert len(renamed) == 4 and flushed[-1] == tmp_path == done[-1] and set(renamed) <= set(flushed)
    assert {path.name for path in tmp_path.glob("model-*")} <= {path.name for path in flushed}


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot save to"):
        save_hf(Transformer(CONFIG), tmp_path / "file" / "checkpoint")
