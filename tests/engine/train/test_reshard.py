"""Saved in any layout, restored in any other: the same bits, from no more bytes than a rank holds."""

import os
import random

import checkpoint_programs as programs
import pytest

from minillm.comm import launch
from minillm.train.checkpoint.manifest import Manifest, committed


def check(folder, layouts, precision, model=programs.MODEL, timeout=300):
    ranks = launch(programs.through_all, 4, folder, layouts, precision, model, timeout=timeout)
    pairs = set()
    for rank in ranks:
        for source, target, wrong, bytes_read, bytes_held, tensors in rank:
            assert not wrong, (layouts[source], layouts[target], wrong)
            assert tensors and bytes_read <= bytes_held, (layouts[source], layouts[target])
            pairs.add((source, target))
    start = Manifest.read(committed(folder / "start")[-1])
    for index, layout in enumerate(layouts):  # everything is on the disk once, and spread evenly where it can be
        manifest = Manifest.read(committed(folder / str(index))[-1])
        assert manifest.nbytes == start.nbytes, layout
        assert len(manifest.files) == len(manifest.generators) == layout.world_size
        assert max(manifest.files) < 1.6 * manifest.nbytes / layout.world_size, (layout, manifest.files)
    return pairs


@pytest.mark.full
def test_some_layouts_restore_from_each_other(tmp_path):
    assert len(check(tmp_path, programs.LAYOUTS[:3], "bf16-master")) == 9


@pytest.mark.full
def test_experts_and_the_biases_of_routers_too(tmp_path):
    assert len(check(tmp_path, programs.EXPERT_LAYOUTS, "fp32", programs.EXPERTS)) == 16


@pytest.mark.full
def test_every_layout_restores_from_every_other(tmp_path):
    """Of five that are drawn anew in each run; MINILLM_PROOF=all takes all of them."""
    seed = int(os.environ["MINILLM_SEED"])
    print(f"MINILLM_SEED={seed} draws these layouts again")
    count = len(programs.LAYOUTS) if os.environ.get("MINILLM_PROOF") == "all" else 5
    layouts = random.Random(seed).sample(programs.LAYOUTS, count)
    assert len(check(tmp_path, layouts, "fp32")) == count**2
