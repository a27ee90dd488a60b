"""The last save in the memory of two nodes each: what is lost is read from the others, and the disk is not touched."""

import os
import subprocess

import checkpoint_programs as programs
import pytest

from minillm.__main__ import run as run_command
from minillm.comm import launch
from minillm.train.checkpoint import peer_copy
from minillm.train.checkpoint.manifest import Manifest


@pytest.mark.full
def test_a_restore_needs_no_disk_while_one_copy_of_each_file_is_left(tmp_path, capfd):
    nodes = [tmp_path / "node 0", tmp_path / "node 1"]
    ranks = launch(programs.with_copies_in_memory, 4, tmp_path, nodes)
    sizes = Manifest.read(next((tmp_path / "aside").iterdir())).files
    for rank, found in enumerate(ranks):
        place = str(nodes[rank // 2])
        assert {name: found["held"].pop(name) for name in sorted(found["held"]) if name.endswith(".bin")} == {
            f"rank-{file:04d}.bin": size for file, size in enumerate(sizes)
        }
        assert list(found.pop("held")) == ["manifest.json"]
        assert found.pop("back again") == (True, 1) and found.pop("full") == (None, False, 2)
        for name, (wrong, bytes_read, where) in found.items():
            from_disk = name in ("damaged", "the other copy damaged", "both copies gone", "older than the disk")
            assert not wrong, (name, wrong)
            assert (bytes_read > 0) == from_disk and where.startswith(place) != from_disk, name
        assert len(found) == 8
    said = capfd.readouterr().out
    assert said.count("rank-0003.bin is damaged: the checksum of") == 1
    assert said.count("rank-0003.bin is damaged where rank ") == 1
    assert said.count("The checkpoint on the disk is read instead.") == 2
    assert said.count("is in memory (No space left on device): it is on the disk alone.") == 1


def test_the_memory_of_agents_that_have_ended_is_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_copy, "MEMORY", tmp_path)
    own = peer_copy.folder_of_agent()
    process = subprocess.Popen(["true"])
    process.wait()
    prefix = own.name.rsplit("-", 2)[0]
    another, foreign = (tmp_path / f"{name}-{os.getppid()}-7" for name in (prefix, "minillm-copy-1"))
    ended = tmp_path / f"{prefix}-{process.pid}-7"
    for folder in (own, ended, another, foreign, tmp_path / "something"):
        (folder / "run").mkdir(parents=True)
    assert peer_copy.folder_of_agent() == own
    assert {path.name for path in tmp_path.iterdir()} == {own.name, foreign.name, "something"}
    monkeypatch.setattr(peer_copy, "MEMORY", tmp_path / "none")
    with pytest.raises(ValueError, match="--peer-copy needs a folder in memory"):
        peer_copy.folder_of_agent()


def test_without_an_agent_that_restarts_ranks_it_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["train", "--peer-copy"]) == 2
    assert "--peer-copy is for ranks that torchrun starts again: give it --max-restarts" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
