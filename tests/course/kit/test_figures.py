import ast
import io
import sys
import types
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from course.kit import PALETTE, SPANS, bars, course, lines, look, show, sliders, style, subplots
from course.kit.interact import render
from minillm.drawing import headline, log_ticks

pytestmark = pytest.mark.drawn(2)

COURSE = Path(__file__).parents[3] / "course"


def view(count=3, kind="ring"):
    """A view for the tests."""
    figure, ax = subplots()
    ax.plot(range(count))
    return figure


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_series_differ_in_colour_marker_and_hatch():
    looks = [look(index) for index in range(7)]
    for field in ("color", "marker", "hatch"):
        assert len({getattr(one, field) for one in looks}) == 7
    assert look(7) == look(0)._replace(linestyle=look(7).linestyle)
    assert set(SPANS) == {"compute", "comm", "wait", "idle", "input", "optimizer"}
    assert len(PALETTE) == 8


def test_series_colours_are_visible_on_the_card():
    for index in range(7):
        assert 1.05 / (luminance(look(index).color) + 0.05) >= 2.0


def test_bars_put_predicted_beside_measured_with_units():
    figure = bars(["a", "b"], [1e6, 2e6], [1.1e6, 2e6], quantity="sent", unit="B", title="Bytes")
    (ax,) = figure.axes
    assert ax.get_ylabel() == "sent" and [t.get_text() for t in ax.get_legend().get_texts()] == [
        "predicted",
        "measured",
    ]
    assert [bar.get_height() for bar in ax.patches] == [1e6, 2e6, 1.1e6, 2e6]
    assert {bar.get_hatch() for bar in ax.patches} == {"//", None}
    assert ax.yaxis.get_major_formatter()(1.5e6) == "1.5 MB"


def test_lines_dash_predictions():
    figure = lines([1, 2], {"ring": [1, 2]}, {"ring": [1, 2.1]}, x_axis=("n", ""), y_axis=("time", "s"), log="xy")
    (ax,) = figure.axes
    measured, predicted = ax.lines
    assert measured.get_linestyle() == "-" and predicted.get_linestyle() == "--"
    assert measured.get_color() == predicted.get_color()
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_ylabel() == "time" and ax.get_xlabel() == "n"


def test_log_axes_have_ticks_people_can_read():
    ranks = lines([2, 4, 8], {"a": [1, 2, 3]}, x_axis=("ranks", ""), y_axis=("time", "s"), log="x").axes[0].xaxis
    message = lines([1e3, 1e6], {"a": [1, 2]}, x_axis=("message", "B"), y_axis=("time", "s"), log="x").axes[0].xaxis
    assert [ranks.get_major_formatter()(n) for n in (2, 4)] == ["2", "4"] and {2.0, 4.0} <= set(
        ranks.get_majorticklocs()
    )
    assert {1e3, 1e4, 1e5} <= set(message.get_majorticklocs()) and message.get_major_formatter()(1e4) == "10 kB"


def test_log_ticks_are_plain_numbers():
    def labels(low: float, high: float) -> list[str]:
        figure, ax = subplots()
        ax.plot([1, 2], [low, high])
        ax.set_yscale("log")
        log_ticks(ax.yaxis)
        figure.draw_without_rendering()
        assert not any(label.get_text() for label in ax.get_yticklabels(minor=True))
        shown = zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)
        return [label.get_text() for label, at in shown if low <= at <= high]

    assert labels(8, 45) == ["10", "20", "30"] and labels(0.02, 0.9) == ["0.02", "0.05", "0.1", "0.2", "0.5"]
    assert labels(90, 1e5) == ["100", "1,000", "10,000", "100,000"]


def test_a_headline_has_its_setting_beside_it():
    figure, ax = subplots()
    headline(ax, "Small messages pay latency", "4 ranks")
    assert ax.get_title(loc="left") == "Small messages pay latency" and ax.texts[0].get_text() == "4 ranks"
    figure, panels = subplots(1, 2)
    with style():
        panels[0].set_title("one panel")
    headline(figure, "Small messages pay latency", "4 ranks")
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("Small messages pay latency", "4 ranks")
    assert panels[0].get_title(loc="left") == "one panel"


def shown_points(figure: Figure) -> dict[str, float]:
    """Every text of a figure and its size in points on a page that shows 850 pixels of width, 100 to the inch."""
    figure.draw_without_rendering()
    scale = min(1.0, 8.5 / figure.get_figwidth())
    return {
        text.get_text(): text.get_fontsize() * scale
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip()
    }


@pytest.mark.parametrize(
    "lab, view",
    [
        ("05", "time_per_layer"),
        ("06", "schedule_on_a_clock"),
        ("07", "causal_work"),
        ("09", "mesh_on_nodes"),
        ("10", "goodput_by_gpus"),
        ("12", "decode_by_batch"),
        ("13", "tables_and_memory"),
        ("14", "batches_over_time"),
    ],
)
def test_text_of_views_can_be_read_where_they_are_shown(lab, view):
    sizes = shown_points(getattr(course.load("figures", lab), view)())
    assert sizes and min(sizes.values()) >= 8.49, sorted(sizes.items(), key=lambda item: item[1])[:3]


@pytest.mark.parametrize("path", sorted([*COURSE.glob("lab*/figures*.py"), *COURSE.glob("lab*/*_picture.py")]), ids=str)
def test_no_figure_asks_for_small_text_or_more_width_than_a_page(path):
    """9 points at 9 inches are 8.5 where a page shows them; this holds the figures that only a measurement draws."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        given = []
        if isinstance(node, ast.Call):
            given = [(word.arg, word.value) for word in node.keywords]
            if getattr(node.func, "id", "") == "subplots":
                wide = [value.value for name, value in given if name == "width" and isinstance(value, ast.Constant)]
                assert max(wide, default=0) <= 9, f"{path.name}:{node.lineno} is wider than 9 inches"
        elif isinstance(node, ast.Dict):
            given = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
        for name, value in given:
            if name in ("fontsize", "labelsize", "title_fontsize") and isinstance(value, ast.Constant):
                assert value.value >= 9, f"{path.name}:{value.lineno} asks for {name} {value.value}; 9 is the least"


def test_helpers_refuse_data_that_does_not_match():
    with pytest.raises(ValueError, match="2 labels, 1 measured"):
        bars(["a", "b"], None, [1], quantity="x", unit="")
    with pytest.raises(ValueError, match=r"\['tree'\], which measured has not"):
        lines([1], {"ring": [1]}, {"tree": [1]}, x_axis=("n", ""), y_axis=("t", "s"))


def test_style_is_undone_and_card_is_opaque():
    before = dict(plt.rcParams)
    with style():
        assert plt.rcParams["axes.facecolor"] == "#FFFFFF"
    assert dict(plt.rcParams) == before
    picture = Image.open(io.BytesIO(render(view)))
    assert picture.size == (1008, 460) and picture.convert("RGBA").getextrema()[3] == (255, 255)


def test_pyplot_figures_do_not_pile_up():
    def with_pyplot():
        return plt.subplots()[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(25):
            show(with_pyplot)
    assert plt.get_fignums() == []


def test_views_are_checked():
    with pytest.raises(ValueError, match="view has no parameter 'nproc'; it takes count, kind"):
        show(view, nproc=2)
    with pytest.raises(ValueError, match="view has no parameter 'nproc'"):
        sliders(view, nproc=(1, 2))

    def wrong():
        return None

    with pytest.raises(ValueError, match="wrong returned NoneType; a view returns its matplotlib Figure"):
        show(wrong)


def test_sliders_without_notebook_or_widgets_say_so(capsys, monkeypatch):
    sliders(view, count=(1, 4))
    assert "Sliders need a notebook" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    sliders(view, count=(1, 4))
    assert "Sliders need the package ipywidgets" in capsys.readouterr().out


@pytest.fixture
def notebook(monkeypatch):
    """As if in a notebook; returns what is displayed."""
    import IPython.display

    shown = []
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setattr(IPython.display, "display", lambda *objects, **options: shown.append((objects[0], options)))
    return shown


def test_show_displays_one_png_with_alternative_text(notebook):
    show(view, count=5)
    ((data, options),) = notebook
    assert data["text/plain"] == "A view for the tests." and len(data["image/png"]) > 1000
    assert options["metadata"]["image/png"] == {"alt": "A view for the tests.", "width": 700}  # of 1008 in the file


def test_alternative_text_is_the_whole_first_paragraph(notebook):
    def wide(count=2):
        """A view whose description
        takes two lines.

        count: of something."""
        return view(count=count)

    show(wide)
    ((data, _),) = notebook
    assert data["text/plain"] == "A view whose description takes two lines."


def test_moving_a_slider_redraws_the_same_function(notebook):
    def picky(count=2, kind="ring"):
        if count == 4:
            raise ValueError("4 is not allowed here")
        return view(count, kind)

    sliders(picky, count=(1, 6), kind=["ring", "tree"])
    ((box, _),) = notebook
    count, kind, message, picture = box.children
    assert (count.value, count.min, count.max, count.continuous_update) == (2, 1, 6, False)
    assert kind.options == ("ring", "tree") and picture.value == render(view, count=2)
    count.value = 5
    assert picture.value == render(view, count=5)
    count.value = 4
    assert message.value == "4 is not allowed here" and picture.value == render(view, count=5)
    count.value = 3
    assert message.value == ""
    with pytest.raises(ValueError, match=r"count=<object object at .*> is no control"):
        sliders(picky, count=object())


def test_figures_are_not_pyplots():
    figure, axes = subplots(1, 2, width=8, height=3, sharey=True)
    assert isinstance(figure, Figure) and len(axes) == 2 and plt.get_fignums() == []
