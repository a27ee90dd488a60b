"""The figures command: files written, bad input refused; and lab 01's numbers behind its figures."""

import io
import json

import matplotlib.figure
import pytest
from PIL import Image

from course.commands import figures
from course.lab01_collectives import experiments
from course.lab01_collectives import figures as pictures
from minillm import drawing
from minillm.__main__ import run
from minillm.drawing import subplots


def test_a_figure_is_written_with_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "FIGURES", {"line": lambda: (subplots()[0], {"answer": 42})})
    assert run(["figures", "01", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "01_line.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "new" / "01_line.json").read_text())
    assert record["numbers"] == {"answer": 42}
    assert record["provenance"]["command"] == "python -m minillm figures 01_line"


def test_one_figure_of_a_lab_can_be_named(monkeypatch):
    monkeypatch.setattr(pictures, "FIGURES", {"line": subplots, "bars": subplots})
    named = [[name for name, _ in figures.registered([which])] for which in ("01", "01_collectives", "01_bars")]
    assert named == [["01_line", "01_bars"], ["01_line", "01_bars"], ["01_bars"]]


def test_bad_input_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for argv in (["figures", "77"], ["figures", "01", "--out", str(tmp_path / "file" / "below")]):
        assert run(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_every_lab_has_its_figures_and_nothing_else_counts_as_a_lab():
    labs = {name.split("_")[0] for name, _ in figures.registered([])}
    assert {"01", "14", "15"} <= labs and all(lab.isdigit() for lab in labs)
    with pytest.raises(ValueError, match=r"are 00, 01(, \d\d)*$"):
        list(figures.registered(["77"]))


def test_a_figure_is_written_finer_than_it_is_shown():
    picture = Image.open(io.BytesIO(figures.png(subplots(width=5, height=2)[0])))
    assert picture.size == (5 * drawing.FILE_DPI, 2 * drawing.FILE_DPI)


def test_a_figure_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(figures, "LARGEST_BYTES", 10)
    with pytest.raises(ValueError, match="keep it under 10"):
        figures.png(subplots()[0])


def test_crossover_lies_where_the_lines_cross():
    sizes = [1000, 2000, 4000, 8000]
    assert experiments.crossover(sizes, [3, 3, 3, 3], [1, 2, 4, 8]) == pytest.approx(2000 * 2**0.585, rel=0.01)
    assert experiments.crossover(sizes, [3, 3, 3, 9], [1, 2, 4, 8]) is None
    assert experiments.crossover(sizes, [1, 1, 1, 1], [2, 2, 2, 2]) == 1000
    assert experiments.crossover(sizes, [1, 9, 1, 1], [2, 2, 2, 2]) > 2000  # from the last crossing on


def test_fit_finds_alpha_and_beta_of_a_round():
    sizes, (alpha, beta) = experiments.SIZES, (1e-3, 1e8)
    seconds = [6 * (alpha + size / 4 / beta) for size in sizes]
    fit = experiments.fit_rounds(sizes, seconds, 4)
    assert (fit.latency_s, fit.bandwidth_bytes_per_s) == pytest.approx((alpha, beta))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_pure_views_draw_any_parameters(ranks):
    assert isinstance(pictures.ring_rounds(ranks, 9), matplotlib.figure.Figure)
    assert isinstance(pictures.times_by_size(max(2, ranks), 1.0, 400.0), matplotlib.figure.Figure)


def test_every_round_of_the_ring_adds_one_contribution():
    for done in range(4):
        texts = [text.get_text() for text in pictures.ring_rounds(4, done).axes[0].texts]
        assert max(text.count("+") for text in texts) == done
