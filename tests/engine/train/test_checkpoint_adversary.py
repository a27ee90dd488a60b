"""What an adversary found: files that cannot be read are not damaged, and foreign states load whole or not at all."""

import copy
import errno
import itertools
import os
import resource
import shutil
from dataclasses import replace

import checkpoint_programs as programs
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_programs import MODEL, trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from minillm.__main__ import run as run_command
from minillm.comm import launch
from minillm.model import Transformer
from minillm.train import Trainer, adamw
from minillm.train.checkpoint import manifest as manifests
from minillm.train.checkpoint import reader
from minillm.train.checkpoint.manifest import Manifest, SavedTensor, committed, file_of, name_of
from minillm.train.checkpoint.reader import has_checkpoint, read_whole, restore
from minillm.train.checkpoint.shares import Piece, write_parts
from minillm.train.checkpoint.torch_format import from_torch, to_torch
from minillm.train.checkpoint.writer import Checkpointer
from minillm.train.fault_tolerance.goodput import goodput
from minillm.train.run_folder import locked

pytestmark = pytest.mark.drawn(2)

TINY = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--batch-size", "4", "--run", "a"]


@pytest.fixture
def two_saves(tmp_path):
    ours, saver = trainer(), Checkpointer(tmp_path / "run")
    for _ in range(2):
        ours.step()
        saver.save(ours)
    return tmp_path / "run"


def state(ours):
    tensors = {name: part.clone() for name, (part, _) in ours.local_state().parts().items()}
    return tensors, repr((ours.local_state().numbers(), ours.progress()))


def is_same(before, after):
    return before[1] == after[1] and all(torch.equal(part, after[0][name]) for name, part in before[0].items())


# Files that cannot be read.


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("name", ["rank-0000.bin", "manifest.json"])
def test_what_cannot_be_read_is_named_and_nobody_is_told_to_remove_it(name, number, two_saves, monkeypatch):
    ours, refusal = trainer(), OSError(number, os.strerror(number))
    before, path = state(ours), committed(two_saves)[-1] / name

    def refuse(*_, **__):
        raise refusal

    with monkeypatch.context() as patch:
        if name == "manifest.json":
            read = type(path).read_text
            refusal.filename = str(path)
            patch.setattr(type(path), "read_text", lambda p, **how: refuse() if p == path else read(p, **how))
        else:
            patch.setattr(os, "preadv", refuse)
        with pytest.raises(ValueError, match=f"{name} cannot be read \\({os.strerror(number)}\\): mend that") as error:
            restore(ours, two_saves)
    assert "Remove" not in str(error.value)
    assert str(error.value).endswith(
        "Or move save-0002-step-2 away to go on from save-0001-step-1, the checkpoint of step 1."
    )
    assert is_same(before, state(ours))
    assert restore(ours, two_saves).step == 2


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(home, monkeypatch, capsys):
    assert run_command([*TINY, "--steps", "2"]) == 0
    settings, metrics = ((home / "runs/a" / name).read_bytes() for name in ("run.json", "metrics.jsonl"))

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(manifests.os, "listdir", refuse)
    said = "runs/a/checkpoints cannot be read (Permission denied): mend that, or name another run."
    for command, *more in ((TINY, "--steps", "3"), (["train", "--run", "a"], "--resume")):
        capsys.readouterr()
        assert run_command([*command, *more]) == 2
        assert said in capsys.readouterr().err
    assert settings == (home / "runs/a/run.json").read_bytes()
    assert metrics == (home / "runs/a/metrics.jsonl").read_bytes()
    monkeypatch.undo()
    assert not has_checkpoint(home / "nowhere")


def test_a_checkpoint_of_more_ranks_than_files_may_be_open(tmp_path):
    count, numbers = reader.OPEN_AT_ONCE + 40, torch.arange(3000.0)
    folder = tmp_path / name_of(1, 0)
    folder.mkdir()
    notes, whole = [], manifests.Placement(numbers.shape)
    for rank in range(count):
        cut = manifests.FlatShard(3000 * rank // count, 3000 * (rank + 1) // count)
        piece = Piece("model/x", whole.within(cut), numbers[cut.start : cut.stop].clone())
        parts = write_parts(file_of(folder, rank), rank, [piece])
        about = {"optimizer": {"groups": [], "counted": {}}, "generators": {}, "progress": {"step": 0}}
        notes.append({"parts": parts, **about})
    (folder / manifests.FILE).write_text(Manifest.of(folder.name, notes, None).to_text())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/dev/fd")))  # by this process and the tests before this one
    free = (number for number in itertools.count() if number not in taken)
    limit = next(itertools.islice(free, reader.OPEN_AT_ONCE + 10, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        assert torch.equal(read_whole(folder)[1]["model/x"], numbers)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert isinstance(Manifest.read(folder).tensors["model/x"], SavedTensor)


def test_settings_of_another_version_are_one_sentence(two_saves):
    folder = committed(two_saves)[-1]
    manifest = Manifest.read(folder)
    config = manifest.progress["config"] | {"momentum": 0.9}
    other = replace(manifest, progress=manifest.progress | {"config": config})
    (folder / manifests.FILE).write_text(other.to_text())
    with pytest.raises(ValueError, match=r"save-0002-step-2 has settings that this version does not know \(.*momentum"):
        restore(trainer(), two_saves)


def test_a_lock_needs_no_room_on_the_disk(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with locked(tmp_path), pytest.raises(ValueError, match="is in use by another process"):
            locked(tmp_path).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_whose_folder_is_removed_can_be_resumed(home, monkeypatch, capsys):
    save = Checkpointer.save

    def remove_first(self, ours):
        if ours.steps_done == 2:
            shutil.rmtree(self.run)
        save(self, ours)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", remove_first)
        assert run_command([*TINY, "--steps", "4", "--save-every", "2"]) == 0
    assert "runs/a was moved or removed while the run went on" in capsys.readouterr().err
    assert run_command(["train", "--resume", "--run", "a"]) == 0


def test_any_json_as_settings_is_one_sentence(home, capsys):
    assert run_command([*TINY, "--steps", "1"]) == 0
    capsys.readouterr()
    (home / "runs/a/run.json").write_text("[" * 100_000)
    assert run_command(["train", "--resume", "--run", "a"]) == 2
    error = capsys.readouterr().err
    assert "run.json is damaged (it cannot be read, maximum recursion" in error and error.count("\n") == 1


# Foreign states.


@pytest.fixture(scope="module")
def foreign():
    model = Transformer(MODEL, seed=5)
    optimizer = adamw(model.named_parameters(), trainer().config)
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    return model, optimizer


def without(state, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda s: without(s, "optimizer"), "its optimizer is another one: parameters are not in the same groups"),
        (
            lambda s: s | {"model": s["model"] | {"head.weight": torch.ones(53, 16)}},
            "nothing here needs its model/head",
        ),
        (lambda s: s | {"model": s["model"] | {"norm.weight": torch.ones(16).int()}}, "norm.weight is torch.int32"),
        (lambda s: without(s, "optimizer", "state", "norm.weight", "exp_avg_sq"), "no exp_avg_sq of norm.weight"),
        (lambda s: without(s, "optimizer", "param_groups", 1), "its optimizer is another one"),
        (
            lambda s: s | {"optimizer": s["optimizer"] | {"param_groups": s["optimizer"]["param_groups"][::-1]}},
            "its optimizer is another one",
        ),
        (lambda s: s | {"progress": "[]"}, "no attribute"),
    ],
)
def test_a_foreign_state_that_does_not_fit_changes_nothing(change, said, foreign, tmp_path):
    of_model, of_optimizer = get_state_dict(*foreign)
    dcp.save(change({"model": of_model, "optimizer": of_optimizer}), checkpoint_id=tmp_path, no_dist=True)
    ours = trainer()
    ours.step()
    before = state(ours)
    with pytest.raises(ValueError, match=said) as error:
        from_torch(tmp_path, ours)
    assert str(tmp_path) in str(error.value) and is_same(before, state(ours))


def test_a_flattened_optimizer_and_junk_are_one_sentence(foreign, tmp_path):
    of_model, of_optimizer = get_state_dict(*foreign, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match="save it without flatten_optimizer_state_dict"):
        from_torch(tmp_path, trainer())
    for junk in (b"", b"junk"):
        (tmp_path / ".metadata").write_bytes(junk)
        with pytest.raises(ValueError, match="holds nothing that torch"):
            from_torch(tmp_path, trainer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_made_of_weights_where_there_are_none(dtype, foreign, tmp_path):
    model = copy.deepcopy(foreign[0]).to(dtype)
    optimizer = adamw(model.named_parameters(), trainer().config)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path, no_dist=True)
    ours = trainer(precision="bf16-master")
    from_torch(tmp_path, ours)
    for name, (part, _) in ours.local_state().parts().items():
        kind, *_, parameter = name.split("/")
        if kind in ("model", "master"):
            assert torch.equal(part, of_model[parameter].to(part.dtype)), name


def test_an_export_that_is_killed_leaves_nothing_that_loads(two_saves, tmp_path, monkeypatch):
    first, last = committed(two_saves)
    to_torch(first, tmp_path / "torch")

    def kill(*_, **__):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "finish", kill)
        with pytest.raises(dcp.api.CheckpointException, match="killed"):
            to_torch(last, tmp_path / "torch")
    with pytest.raises(ValueError, match="holds nothing that torch"):
        from_torch(tmp_path / "torch", trainer())
    to_torch(last, tmp_path / "torch")
    ours = trainer()
    from_torch(tmp_path / "torch", ours)
    assert ours.steps_done == 2


def on_stages(group, folder):
    """What each stage of a pipeline says to a folder that lacks a weight of the last one, and whether it changed; then
    to a whole one."""
    torch.set_num_threads(1)
    ours, said = programs._spread(group, programs.ParallelConfig(pp=2, accumulate=2)), []
    for name in ("lacking", "whole"):
        before = state(ours)
        try:
            from_torch(folder / name, ours)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
        said.append(is_same(before, state(ours)))
    return said


@pytest.mark.full
def test_all_stages_refuse_what_one_of_them_lacks(foreign, tmp_path):
    of_model, of_optimizer = get_state_dict(*foreign)
    whole = {"model": of_model, "optimizer": of_optimizer}
    for name, saved in (("whole", whole), ("lacking", without(whole, "model", "norm.weight"))):
        dcp.save(saved, checkpoint_id=tmp_path / name, no_dist=True)
    first, last = launch(on_stages, 2, tmp_path, timeout=120)
    assert first == last and first[1:] == [True, None, False]
    assert first[0].endswith("it has no model/norm.weight")


def test_another_text_of_the_same_length_is_refused(tmp_path):
    ours = programs.trainer()
    Checkpointer(tmp_path).save(ours)
    other = programs.tokens()
    array = np.array(other.array)
    array[len(array) // 2] ^= 1
    theirs = Trainer(ours.config, replace(other, array=array), workers=0)
    with pytest.raises(ValueError, match="saved with crc32"):
        restore(theirs, tmp_path)


def test_times_that_begin_in_the_middle_are_added_up():
    rows = [
        {"event": "step", "step": 4, "at": 10.0, "seconds": 2.0},
        {"event": "end", "step": 5, "at": 11, "seconds": 0},
    ]
    assert goodput(rows).useful == 2.0


# A manifest whose checksum is right and whose contents are not.


def changed(folder, **fields):
    """Writes the manifest of the checkpoint anew with other fields, and a checksum that fits."""
    manifest = Manifest.read(folder)
    (folder / manifests.FILE).write_text(replace(manifest, **fields).to_text())


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["loader", "loss_spikes", "scaler", "config", "step"])
@pytest.mark.parametrize("value", [7, "x", [], None, {}, -5, 10**9])
def test_progress_of_another_kind_is_one_sentence(name, value, two_saves):
    folder, ours = committed(two_saves)[-1], trainer()
    changed(folder, progress=Manifest.read(folder).progress | {name: value})
    with pytest.raises(ValueError, match=r"[a-z]{3}"):
        restore(ours, two_saves)
    assert ours.steps_done == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"generators": []},
        {"generators": [7]},
        {"generators": [{"torch": "x"}]},
        {"optimizer": {}},
        {"optimizer": {"groups": 3, "counted": {}}},
        {"optimizer": {"groups": [], "counted": []}},
    ],
)
def test_generators_and_numbers_of_another_kind_are_one_sentence(fields, two_saves):
    folder, ours = committed(two_saves)[-1], trainer()
    changed(folder, **fields)
    with pytest.raises(ValueError, match=r"manifest.json is damaged.*to go on from save-0001-step-1"):
        restore(ours, two_saves)
    assert ours.steps_done == 0
