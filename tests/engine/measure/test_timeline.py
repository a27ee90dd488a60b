"""The timeline's picture and trace, from ledgers of known times."""

import itertools
import json
from dataclasses import dataclass, field

import pytest

from minillm.measure import save_trace, timeline, trace
from minillm.measure.timeline import STYLES


@dataclass(frozen=True)
class Span:
    name: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Event:
    op: str
    start: float
    end: float
    waited: float = 0.0
    emulated: bool = False
    group: str = "dp"
    bytes: int = 3_000_000
    messages: int = 6
    shape: tuple = (1000, 750)
    dtype: str = "float32"


@dataclass
class Ledger:
    spans: list = field(default_factory=list)
    events: list = field(default_factory=list)


def ledgers(ranks=3, emulated=False):
    """Each rank: 20 ms forward, 30 ms backward, two all-reduces (the second is waited for), an optimizer step."""
    rows = []
    for rank in range(ranks):
        t = 500.0 + rank * 0.002
        rows.append(
            Ledger(
                [
                    Span("forward", "compute", t, t + 0.020),
                    Span("backward", "compute", t + 0.020, t + 0.050),
                    Span("step", "optimizer", t + 0.070, t + 0.080),
                ],
                [
                    Event("all_reduce", t + 0.030, t + 0.048, 0.0, emulated),
                    Event("all_reduce", t + 0.040, t + 0.070, 0.020, emulated),
                ],
            )
        )
    return rows


def bars(figure):
    """(x, y, width, height, colour) of every bar, in data units."""
    (axes,) = figure.axes
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            found.append((box.x0, box.y0, box.width, box.height, tuple(collection.get_facecolor()[0][:3])))
    return found


def test_one_row_per_rank_compute_above_communication():
    figure = timeline(ledgers(3))
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert [tick.get_text() for tick in axes.get_yticklabels(minor=True)] == ["compute", "comm"] * 3
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # rank 0 on top
    assert "ms" in axes.get_xlabel()

    drawn = bars(figure)
    assert len(drawn) == 3 * (3 + 3)  # the second all-reduce is two parts: hidden and waited for
    from matplotlib.colors import to_rgb

    lane_of = {to_rgb(colour): lane for colour, _, lane, _ in STYLES.values()}
    for rank in range(3):
        row = [bar for bar in drawn if rank - 0.5 < bar[1] + bar[3] / 2 < rank + 0.5]
        assert len(row) == 6
        middles = {lane: [y + h / 2 for _, y, _, h, c in row if lane_of[c] == lane] for lane in ("compute", "comm")}
        assert max(middles["compute"]) < min(middles["comm"])


def test_times_start_at_the_earliest_and_waiting_is_at_the_end():
    from matplotlib.colors import to_rgb

    drawn = bars(timeline(ledgers(2)))
    assert min(x for x, *_ in drawn) == pytest.approx(0)
    assert max(x + w for x, _, w, *_ in drawn) == pytest.approx(82)
    waits = sorted((x, x + w) for x, _, w, _, colour in drawn if colour == to_rgb(STYLES["wait"][0]))
    assert waits == [pytest.approx((50, 70)), pytest.approx((52, 72))]


def test_overlapping_communication_is_stacked_not_hidden():
    drawn = bars(timeline(ledgers(1)))
    for a in drawn:
        for b in drawn:
            apart_in_time = a[0] + a[2] <= b[0] + 1e-6 or b[0] + b[2] <= a[0] + 1e-6
            apart_in_rows = a[1] + a[3] <= b[1] + 1e-6 or b[1] + b[3] <= a[1] + 1e-6
            assert a is b or apart_in_time or apart_in_rows


@pytest.mark.parametrize("emulated", [False, True])
def test_legend_names_what_is_there_and_what_is_emulated(emulated):
    (legend,) = timeline(ledgers(2, emulated)).legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["compute", "optimizer", "communication", "communication waited for"]
    assert ("emulated" in legend.get_title().get_text()) is emulated


def test_kinds_of_a_lane_differ_without_colour():
    """In black and white, two kinds on one lane have different hatches or clearly different greys."""
    from matplotlib.colors import to_rgb

    def grey(kind):
        red, green, blue = to_rgb(STYLES[kind][0])
        return 0.299 * red + 0.587 * green + 0.114 * blue

    for a, b in itertools.combinations(STYLES, 2):
        if STYLES[a][2] == STYLES[b][2]:
            assert STYLES[a][1] != STYLES[b][1] or abs(grey(a) - grey(b)) > 0.15, (a, b)


def test_the_notebook_shows_it_once_and_it_saves(tmp_path):
    import matplotlib.pyplot as plt

    figure = timeline(ledgers(4))
    assert not plt.get_fignums()
    figure.savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


def test_trace_is_a_process_per_rank_in_microseconds(tmp_path):
    path = save_trace(ledgers(3, emulated=True), tmp_path / "trace.json")
    data = json.loads(path.read_text())
    assert data == trace(ledgers(3, emulated=True))
    events = data["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 3 * 5
    for e in slices:
        assert threads[e["pid"], e["tid"]] == ("comm" if e["cat"] == "comm" else "compute")
    second = next(e for e in slices if e["pid"] == 1 and e["ts"] == pytest.approx(42_000))
    assert (second["name"], second["dur"]) == ("all_reduce", pytest.approx(30_000))
    assert second["args"] == {
        "group": "dp",
        "bytes": 3_000_000,
        "messages": 6,
        "shape": [1000, 750],
        "dtype": "float32",
        "waited_ms": pytest.approx(20),
        "emulated": True,
        "counted": True,
    }
    for a in slices:  # slices of one thread never overlap, so the viewer nests nothing by accident
        for b in slices:
            same = a is not b and (a["pid"], a["tid"]) == (b["pid"], b["tid"])
            assert not same or a["ts"] + a["dur"] <= b["ts"] + 1e-3 or b["ts"] + b["dur"] <= a["ts"] + 1e-3


def test_odd_ledgers():
    only_events = timeline([Ledger(events=[Event("send", 1.0, 1.0)]), Ledger()])  # no duration, and a silent rank
    assert len(only_events.axes[0].get_yticklabels()) == 2
    (bar,) = bars(timeline([Ledger(events=[Event("recv", 1.0, 1.5, waited=9.0)])]))  # waited for longer than it took
    assert (bar[0], bar[2]) == (0, pytest.approx(500))


@pytest.mark.parametrize("rows", [[], [Ledger(), Ledger()]])
def test_nothing_recorded_is_one_clear_sentence(rows):
    for draw in (timeline, trace):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(rows)


def test_bad_input_is_one_clear_sentence(tmp_path):
    with pytest.raises(ValueError, match="kind 'music'"):
        timeline([Ledger([Span("a", "music", 0, 1)])])
    with pytest.raises(ValueError, match="does not exist; create it"):
        save_trace(ledgers(1), tmp_path / "no" / "trace.json")
