import json
import math

import numpy as np
import pytest
import torch

from course.kit import formula, receipt, row
from course.kit.receipts import ReceiptOff, format_value


@pytest.mark.parametrize(
    ("predicted", "measured", "tolerance", "verdict"),
    [
        (4, 4, 0.0, "ok"),
        (4, 5, 0.0, "off"),
        (100, 103, 0.03, "ok"),
        (100, 103.1, 0.03, "off"),
        (100, 97, 0.03, "ok"),
        (-100, -103, 0.03, "ok"),
        (0, 0, 0.0, "ok"),
        (0, 1e-9, 0.5, "off"),
        (None, 7, 0.0, "info"),
        (4, None, 0.5, "off"),
        (4, math.nan, 0.5, "off"),
        (math.inf, math.inf, 0.0, "ok"),
        ("ring", "ring", 0.0, "ok"),
        ("ring", "tree", 0.0, "off"),
        ((2, 3), (2, 3), 0.0, "ok"),
        (True, False, 0.0, "off"),
    ],
)
def test_verdict(predicted, measured, tolerance, verdict):
    assert row("x", predicted, measured, tolerance=tolerance).verdict == verdict


def test_tensors_and_numpy_scalars_become_numbers():
    made = row("x", np.float64(2.0), torch.tensor(2.0))
    assert made.verdict == "ok" and type(made.measured) is float
    assert row("shape", (2, 3), torch.zeros(2, 3).shape).verdict == "ok"


@pytest.mark.parametrize("tolerance", [-0.1, math.nan])
def test_tolerance_must_not_be_negative(tolerance):
    with pytest.raises(ValueError, match=r"tolerance=.* of row 'x' must be 0 or more"):
        row("x", 1, 1, tolerance=tolerance)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1572864, "B", "1,572,864 B"),
        (1572864.0, "bytes", "1,572,864 B"),
        (1234.5, "B", "1,234.5 B"),
        (0.0032, "s", "3.20 ms"),
        (0.9996, "s", "1,000 ms"),
        (4.2e-5, "s", "42.0 µs"),
        (12.5, "s", "12.5 s"),
        (0.0, "s", "0.00 s"),
        (12.5e9, "FLOP/s", "12.5 GFLOP/s"),
        (3e3, "B/s", "3.00 kB/s"),
        (0.75, "", "0.7500"),
        (1.2345, "", "1.234"),
        (6, "", "6"),
        (123456.7, "tokens", "123,457 tokens"),
        (1e-9, "", "1.000e-09"),
        (None, "B", "—"),
        (True, "", "yes"),
        (math.inf, "s", "inf s"),
        ((2, 3), "", "(2, 3)"),
        ("ring", "", "ring"),
    ],
)
def test_format_value(value, unit, text):
    assert format_value(value, unit) == text


def test_text_is_an_aligned_table():
    made = receipt(
        "ring, 4 ranks", [row("bytes sent", 1572864, 1572864, "B"), row("calls", 6, 7), row("time", None, 0.002, "s")]
    )
    assert str(made) == (
        "ring, 4 ranks\n"
        "name             formula      measured   verdict\n"
        "bytes sent   1,572,864 B   1,572,864 B   ok\n"
        "calls                  6             7   off\n"
        "time                   —       2.00 ms   info"
    )
    assert not made.ok and receipt("", made.rows[:1]).ok


def test_html_escapes_and_sets_no_background_or_text_colour_of_its_own():
    html = receipt("<b>", [row("a<b", "x&y", "x&y")])._repr_html_()
    assert "&lt;b&gt;" in html and "a&lt;b" in html and "x&amp;y" in html
    assert "background:#" not in html and "color:inherit" in html


def test_json_rows_are_plain():
    rows = receipt("", [row("n", None, math.inf), row("shape", (2,), (2,), "el")]).to_json()
    assert json.loads(json.dumps(rows, allow_nan=False)) == [
        {"name": "n", "predicted": None, "measured": "inf", "unit": "", "verdict": "info"},
        {"name": "shape", "predicted": [2], "measured": [2], "unit": "el", "verdict": "ok"},
    ]


def test_guesses_formulas_simulations_and_measurements_have_columns_of_their_own():
    made = receipt(
        "",
        [
            formula("ring, 8 ranks", 1.75, "P", guess=7),
            row("simulated step", 10, 11, "ms", 0.2, kind="simulated"),
            row("measured step", 10, 12, "ms", 0.5),
            row("twice five", 10, 2 * 5, kind="computed"),
        ],
    )
    heads = "name your guess formula computed simulated measured verdict"
    assert " ".join(str(made).splitlines()[0].split()) == heads
    assert made.rows[0].columns == {"your guess": 7, "formula": 1.75} and made.rows[0].verdict == "info"
    assert "simulated" in made.rows[1].columns and "measured" not in made.rows[1].columns
    assert [line.get("kind") for line in made.to_json()] == ["formula", "simulated", None, "computed"]
    assert "verdict" not in str(receipt("", made.rows[:1]))
    with pytest.raises(ValueError, match="kind='guess' of row 'x' must be 'measured', 'simulated' or 'computed'"):
        row("x", 1, 1, kind="guess")


def test_what_is_folded_stays_with_its_parent_and_says_how_it_went():
    rows = [row(name, 1, 1) for name in ("a", "b", "c", "    of c", "d")]
    long = receipt("long", rows)
    assert long.shown == 2 and receipt("", rows[:3]).shown == 3 and receipt("", rows, open_rows=4).shown == 4
    assert repr(long).splitlines()[-1] == "... and 3 more rows, all ok; print() shows them all"
    assert len(str(long).split("\n")) == 7
    html = long._repr_html_()
    assert html.count("<details>") == 1 and "3 more rows, all ok" in html
    assert html.index("<details>") > html.index(">b<")
    assert "1 more row, ok" in receipt("", rows[:3], open_rows=2)._repr_html_()
    assert ">1 more row<" in receipt("", [*rows[:3], formula("a formula", 3)])._repr_html_()
    assert receipt("", [rows[0], *[rows[3]] * 12]).shown == 3  # a block that is too long is cut after all
    with pytest.raises(ValueError, match="open_rows=0"):
        receipt("", rows, open_rows=0)


def test_a_row_that_is_off_is_never_folded():
    rows = [row(name, 1, 1) for name in ("a", "b", "c", "d", "    of d", "    also of d")]
    wrong = receipt("", [*rows, row("    wrong", 1, 2), formula("e", 3), row("also wrong", 1, 2, noisy=True)])
    assert [each.name for each in wrong.open] == ["a", "b", "c", "d", "    wrong", "also wrong"]
    assert [each.name for each in wrong.folded] == ["    of d", "    also of d", "e"]
    lines = repr(wrong).splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["a", "b", "c", "d"]
    assert lines[5].startswith("    wrong") and lines[6].startswith("also wrong") and lines[6].endswith("off")
    assert lines[7] == "... and 3 more rows, ok; print() shows them all"
    html = wrong._repr_html_()
    assert html.index("also wrong") < html.index("<details><summary>3 more rows, ok<") < html.index("also of d")
    assert not receipt("", [*rows[:3], row("wrong", 1, 2)]).folded


def test_indented_rows_stay_indented_in_html():
    html = receipt("", [row("bytes", 1, 1), row("    of rank 0", 1, 1)])._repr_html_()
    assert ">&nbsp;&nbsp;&nbsp;&nbsp;of rank 0<" in html


@pytest.mark.parametrize(
    ("made", "steady"),
    [
        (row("bytes", 1, 2, "B"), True),
        (row("bytes on the wire", 1, 2, "B", noisy=True), False),
        (row("step", 1, 2, "s"), False),
        (row("rate", 1, 2, "token/s"), False),
        (row("simulated step", 1, 2, "s", kind="simulated"), True),
        (row("computed step", 1, 2, "ms", kind="computed"), True),
    ],
)
def test_only_what_the_machine_decides_may_be_off_in_a_strict_run(made, steady, monkeypatch):
    shown = receipt("a claim", [row("right", 1, 1), made])
    assert made.steady == steady
    assert "off" in str(shown) and "off" in shown._repr_html_()  # a learner's lab shows it
    monkeypatch.setenv("MINILLM_STRICT", "1")
    for display in (str, repr, lambda each: each._repr_html_()):
        if steady:
            with pytest.raises(ReceiptOff, match=f"receipt 'a claim' is off: {made.name}: 2.*, not 1"):
                display(shown)
        else:
            assert "off" in display(shown)


def test_rows_that_the_lab_names_are_never_folded():
    rows = [row("first", 1, 1), row("second", 1, 1), row("third", 1, 1), row("    of x", None, 2), row("last", 1, 1)]
    found = receipt("by name", rows, open_rows=1, show="of x|last")
    assert [each.name for each in found.open] == ["first", "third", "    of x", "last"]
    assert [each.name for each in found.folded] == ["second"]
    assert "second" not in repr(found) and "second" in str(found)
