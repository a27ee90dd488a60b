"""What is done to a checkpoint's files is noticed, named, and answered with the checkpoint before it."""

import gc
import random
import re
import shutil
import threading
import zlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoint_programs import trainer

from minillm.train.checkpoint.checksum import pieces_sum
from minillm.train.checkpoint.manifest import Manifest, committed
from minillm.train.checkpoint.reader import read_whole, restore
from minillm.train.checkpoint.writer import Checkpointer


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    """A run with the checkpoints of steps 1 and 2, and the trainer after step 2."""
    folder, ours = tmp_path_factory.mktemp("run"), trainer()
    saver = Checkpointer(folder)
    for _ in range(2):
        ours.step()
        saver.save(ours)
    return folder, ours


@pytest.fixture
def run(two_saves, tmp_path):
    shutil.copytree(two_saves[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(run, said):
    """The latest checkpoint is refused so, and nothing has changed; without it the earlier one loads."""
    ours = trainer()
    before = {name: part.detach().clone() for name, part in ours.parallel.parts().items()}
    with pytest.raises(ValueError, match=said) as error:
        restore(ours, run)
    offer = "Remove save-0002-step-2 to go on from save-0001-step-1, the checkpoint of step 1."
    assert str(error.value).endswith(offer) and str(error.value).count("\n") == 0
    assert all(torch.equal(part, before[name]) for name, part in ours.parallel.parts().items())
    assert ours.steps_done == ours.loader.position == 0
    shutil.rmtree(committed(run)[-1])
    assert restore(ours, run).step == 1


def test_any_flipped_bit_is_noticed(two_saves, run):
    """In the tensors it is the checksum of one of them that differs; in the manifest it is the manifest's own."""
    draw, ours = random.Random(0), trainer()
    last = committed(run)[-1]
    for name in ["rank-0000.bin"] * 30 + ["manifest.json"] * 30:
        path = last / name
        whole = bytearray(path.read_bytes())
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=rf"save-0002-step-2/{name} (is damaged|cannot be read)"):
            restore(ours, run)
        path.write_bytes(whole)
    assert restore(ours, run).step == 2


@pytest.mark.parametrize("name", ["rank-0000.bin", "manifest.json"])
def test_truncated_deleted_or_swapped_files_are_refused_by_name(name, run, tmp_path_factory):
    aside = tmp_path_factory.mktemp("aside") / "run"
    shutil.copytree(run, aside)
    for change, said in {
        "cut": "is damaged",
        "longer": "is damaged",
        "gone": "is missing|cannot be read: No such file",
        "empty": "is damaged",
        "swap": "is damaged",
        "folder": "is missing|cannot be read: Is a directory",
    }.items():
        shutil.rmtree(run)
        shutil.copytree(aside, run)
        first, last = (folder / name for folder in committed(run))
        data = last.read_bytes()
        last.unlink()
        if change == "swap":
            shutil.copy(first, last)
        elif change == "folder":
            last.mkdir()
        elif change != "gone":
            last.write_bytes({"cut": data[:-7], "longer": data + b" x", "empty": b""}[change])
        refused(run, f"{re.escape(str(last))} ({said})")


def test_a_checkpoint_under_another_name_is_refused(run):
    first, last = committed(run)
    first.rename(run / "aside")
    last.rename(first)
    (run / "aside").rename(last)
    with pytest.raises(
        ValueError, match=r"save-0002-step-2/manifest\.json is damaged: it belongs to save-0001-step-1\."
    ):
        restore(trainer(), run)


def test_another_model_and_other_settings_are_one_sentence(run):
    with pytest.raises(ValueError, match=r"trained with lr 0\.01, not 0\.5: use the same settings or another run\."):
        restore(trainer(lr=0.5), run)
    with pytest.raises(ValueError, match="trained with precision fp32, not bf16-master"):
        restore(trainer(precision="bf16-master"), run)
    manifest = Manifest.read(committed(run)[-1])
    assert manifest.progress["config"]["model"]["hidden_size"] == 16 and manifest.step == 2


def test_a_whole_checkpoint_in_one_process(two_saves):
    folder, ours = two_saves
    manifest, tensors = read_whole(committed(folder)[-1])
    assert sum(tensor.nbytes for tensor in tensors.values()) == manifest.nbytes
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(tensors[f"model/{name}"], parameter)
        assert torch.equal(tensors[f"optimizer/exp_avg/{name}"], ours.optimizer.state[parameter]["exp_avg"])


def test_checksums_of_pieces_add_up():
    draw = random.Random(1)
    for size in (1, 2, 1000, 100_003):
        whole = draw.randbytes(size)
        cuts = [0, *sorted(draw.choices(range(size + 1), k=9)), size]
        pieces = [whole[start:stop] for start, stop in pairwise(cuts)]
        after = np.array([size - stop for stop in cuts[1:]])
        added = pieces_sum(np.array([zlib.crc32(piece) for piece in pieces], dtype=np.uint32), after)
        assert np.bitwise_xor.reduce(added) == zlib.crc32(whole)
    assert pieces_sum(np.array([5], dtype=np.uint32), np.array([1 << 40])).shape == (1,)


def test_a_forgotten_checkpointer_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    saver = Checkpointer(tmp_path, background=True)
    saver.save(trainer())
    saver.finish()
    (writer,) = set(threading.enumerate()) - before
    del saver
    gc.collect()
    writer.join(60)
    assert not writer.is_alive()
