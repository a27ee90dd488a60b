import matplotlib.collections
import pytest

from course.commands.figures import png
from course.lab06_pipeline_parallel.pipeline_picture import KINDS, draw
from minillm.palette import TEXT
from minillm.parallel.pipeline_parallel.schedule.schedules import (
    Durations,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    simulate,
    zero_bubble,
)


def boxes(figure):
    """(left, width) of every bar, in the order drawn."""
    found = [c for c in figure.axes[0].collections if isinstance(c, matplotlib.collections.PolyCollection)]
    extents = [c.get_paths()[0].get_extents() for c in found]
    return [(round(box.x0, 6), round(box.width, 6)) for box in extents]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_bar_per_action_where_it_ran():
    timeline = simulate(zero_bubble(3, 4))
    figure = draw(timeline)
    assert boxes(figure) == [(bar.start, bar.end - bar.start) for bars in timeline.bars for bar in bars]
    assert legend(figure) == [KINDS[kind][2] for kind in "FIW"] + [f"idle {timeline.idle_share:.1%}"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert figure.axes[0].get_title(loc="left") == "zero_bubble"


def test_measured_under_planned_on_one_axis():
    planned = simulate(one_f_one_b(2, 2), Durations(F=0.01, B=0.02, W=0))
    measured = simulate(one_f_one_b(2, 2), Durations(F=0.012, B=0.02, W=0, message=0.001))
    figure = draw(planned, measured, "Two ranks", unit="s")
    assert len(boxes(figure)) == 16 and figure.axes[0].get_xlim() == (0, measured.makespan)
    faces = {tuple(c.get_facecolor()[0][:3]) for c in figure.axes[0].collections}
    assert (1, 1, 1) in faces and len(faces) == 3  # hollow, forward, backward
    assert f"{measured.idle_share:.1%} measured" in legend(figure)[-1]
    assert figure.axes[0].get_xlabel() == "time" and figure.axes[0].get_title(loc="left") == "Two ranks"
    with pytest.raises(ValueError, match="planned for 2 ranks, measured on 3"):
        draw(planned, simulate(gpipe(3, 2)))


def test_kinds_are_told_apart_in_grey():
    assert len({(colour, hatch) for colour, hatch, _ in KINDS.values()}) == len(KINDS)
    assert all(colour != TEXT for colour, _, _ in KINDS.values())
    for make in (pipedream, interleaved):
        assert png(draw(simulate(make(2, 4), Durations(U=0.5)))).startswith(b"\x89PNG")
