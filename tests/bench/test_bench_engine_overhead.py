"""The engine without a model: the rows are there, and the ready model's tokens come out."""

from pathlib import Path

import pytest

from minillm.bench import bench
from minillm.bench.engine_overhead import _engine as engine
from minillm.bench.ready_model import ReadyModel
from minillm.serve import LLM, SamplingParams


def test_the_ready_model_says_the_token_that_it_has_ready():
    [output] = LLM(ReadyModel(), num_blocks=8).generate([[3, 4]], SamplingParams(max_tokens=5))
    assert output.answers[0].ids == [1] * 5


@pytest.mark.full
def test_a_row_for_a_number_of_sequences():
    report = bench("engine-overhead", sizes=(2,))
    assert [row.name for row in report.rows] == ["engine overhead, 2 sequences"]
    assert report.ok and all(row.ours > 0 for row in report.rows)


def test_an_engine_that_cannot_start_is_told_by_its_last_words(tmp_path):
    Path(tmp_path, "minillm").mkdir()
    Path(tmp_path, "minillm", "__init__.py").write_text("raise ImportError('no engine here')")
    with pytest.raises(ValueError, match=r"cannot be measured: ImportError: no engine here"), engine(str(tmp_path)):
        pass
