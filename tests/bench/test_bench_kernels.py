import shutil
from dataclasses import replace

import pytest
import torch

from minillm.__main__ import run
from minillm.bench import kernels

CPU = torch.device("cpu")


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler")
def test_compiled_kernels_agree_with_torch():
    rows = kernels.run(sizes=(2,), repeats=5, device="cpu")
    assert len(rows) == 4 and all(row.correct and row.ratio > 0 and row.peer == "torch" for row in rows)


def test_results_that_differ_are_found_before_they_are_timed():
    work = next(kernels.works(2, CPU))
    assert kernels.same(work.torch, work.torch, work.inputs)
    assert not kernels.same(lambda x, b: work.torch(x, b) + 0.01, work.torch, work.inputs)
    assert not kernels.same(replace(work, torch=lambda x, b: x + b).torch, work.torch, work.inputs)


def test_works_count_their_bytes():
    """fewer: passes of torch's operations over those of one kernel, by arrays as large as the result."""
    assert [work.fewer for work in kernels.works(1, CPU)] == [(2 + 2) / 2, (2 + 3) / 2, (2 + 3) / 3, (6 + 4) / 2]


def test_bad_input_is_one_line(capsys, monkeypatch):
    assert run(["bench", "kernels", "--sizes", "0"]) == 2
    assert "numbers start at 1" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert run(["bench", "kernels"]) == 2
    assert "needs a C++ compiler" in capsys.readouterr().err
