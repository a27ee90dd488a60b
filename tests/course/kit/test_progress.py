import json
import types
import warnings

import pytest

from course.kit import exercise, progress
from minillm.__main__ import run


@pytest.fixture
def lab():
    for name, minutes in (("first-one", 5), ("second-one", 10)):
        exercise(name, reference=1, hints="abc", minutes=minutes, lab="90_demo")(lambda candidate: [])


def test_where_it_is_kept(monkeypatch, tmp_path):
    assert progress.path() == tmp_path / "progress.json"
    monkeypatch.delenv("MINILLM_PROGRESS")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert str(progress.path()) == "/data/minillm/progress.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(progress.path()) == "/home/someone/.local/share/minillm/progress.json"


def test_records_survive_and_leave_no_other_file(tmp_path):
    progress.record("first-one", "90_demo", "failed")
    progress.record_hint("first-one", "90_demo", 2)
    progress.record_hint("first-one", "90_demo", 1)
    progress.record("first-one", "90_demo", "passed")
    assert progress.load() == {"first-one": progress.Entry("90_demo", True, "passed", 2, 2)}
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_table_per_lab_and_json(lab, tmp_path, capsys):
    progress.record("first-one", "90_demo", "passed")
    progress.record_hint("second-one", "90_demo", 3)
    assert run(["progress", "--json", str(tmp_path / "rows.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["lab", "passed", "attempts", "hints", "used", "minutes"]
    assert lines[1].split() == ["90_demo", "1", "of", "2", "1", "3", "5", "of", "15"]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows == [
        {"lab": "90_demo", "exercises": 2, "passed": 1, "attempts": 1, "hints": 3, "minutes": 5, "minutes_planned": 15}
    ]


def test_reset_keeps_a_copy_that_can_be_put_back(lab, tmp_path, capsys):
    for number in (1, 2):
        done = progress.record(f"exercise-{number}", "90_demo", "passed")
        assert run(["progress", "--reset", "--yes"]) == 0 and progress.load() == {}
        copy = tmp_path / f"progress-{number}.json"
        assert f"To have it back: mv {copy} {tmp_path / 'progress.json'}\n" in capsys.readouterr().out
    copy.rename(tmp_path / "progress.json")
    assert progress.load() == {"exercise-2": done} and (tmp_path / "progress-1.json").exists()
    progress.path().unlink()
    assert run(["progress", "--reset", "--yes"]) == 0 and "no progress to forget" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "kept"), [("", True), ("n", True), (EOFError, True), ("y", False), ("Yes", False)])
def test_reset_asks_in_a_terminal(lab, monkeypatch, answer, kept):
    def answered(question):
        assert question.endswith("[y/N] ") and str(progress.path()) in question
        if answer is EOFError:
            raise EOFError
        return answer

    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", answered)
    progress.record("first-one", "90_demo", "passed")
    assert run(["progress", "--reset"]) == (1 if kept else 0)
    assert bool(progress.load()) is kept


def test_reset_without_a_terminal_is_refused(lab, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: False))
    progress.record("first-one", "90_demo", "passed")
    assert run(["progress", "--reset"]) == 2 and progress.load()
    assert "add --yes" in capsys.readouterr().err
    assert run(["progress", "--yes"]) == 2


def test_json_that_cannot_be_written_is_one_line(lab, tmp_path, capsys):
    assert run(["progress", "--json", str(tmp_path / "missing" / "rows.json")]) == 2
    assert "--json" in capsys.readouterr().err


def test_unwritable_place_warns_once_and_still_counts(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "file" / "progress.json"))
    with pytest.warns(UserWarning, match="set MINILLM_PROGRESS"):
        progress.record("first-one", "90_demo", "failed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert progress.record("first-one", "90_demo", "failed").attempts == 2
        assert progress.load()["first-one"].attempts == 2


@pytest.mark.parametrize("content", ["{half", "[]", '{"exercises": {"a": {"unknown": 1}}}', "\xff"])
def test_corrupt_file_is_kept_aside(tmp_path, content):
    file = tmp_path / "progress.json"
    file.write_text(content, encoding="latin-1")
    with pytest.warns(UserWarning, match="counting starts anew"):
        assert progress.load() == {}
    assert (tmp_path / "progress.json.bak").read_text(encoding="latin-1") == content
    assert progress.record("first-one", "90_demo", "passed").passed
