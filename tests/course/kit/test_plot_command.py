import json

import pytest

from minillm.__main__ import run
from minillm.cli.plot import PARTS, loss_figure, step_time_figure

PNG = b"\x89PNG"


def row(step, **values):
    parts = {f"{part}_s": 0.1 for part in PARTS}
    return {"step": step, "loss": 5.0 / (step + 1), "seconds": 0.1 * len(PARTS)} | parts | values


def test_plot_writes_both_pictures(tmp_path, capsys):
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    rows = [row(step) for step in range(6)] + [row(3, loss=None), row(3, loss=0.5), {"step": 4, "validation_loss": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert run(["plot", "first", "--runs", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "loss.png"), str(folder / "step_time.png")]
    assert all((folder / name).read_bytes()[:4] == PNG for name in ("loss.png", "step_time.png"))
    begin = {"event": "begin", "step": 0, "at": 10.0, "seconds": 0.0}
    (folder / "time.jsonl").write_text(f"{json.dumps(begin)}\n{json.dumps(begin | {'event': 'step', 'at': 12.0})}\n")
    assert run(["plot", "first", "--runs", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.split()[2] == str(folder / "goodput.png")
    axes = loss_figure(rows, "first").axes[0]
    assert list(axes.lines[0].get_ydata()) == [5.0, 2.5, 5 / 3, 0.5, 1.0, 5 / 6]  # step 3 as it was made last
    assert list(axes.lines[2].get_xdata()) == [4]
    assert axes.get_ylabel() == "loss (nats/token)"
    times = step_time_figure(rows, "first").axes[0]
    assert [c.get_label() for c in times.collections] == list(PARTS) and "ms" in times.get_ylabel()


def test_plot_of_nothing_is_refused(tmp_path, capsys):
    assert run(["plot", "none", "--runs", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="not made a step"):
        loss_figure([], "x")
