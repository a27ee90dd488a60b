"""The mock interview: every number of every card, every drill, tasks that are really run, sessions that lose "
"nothing."""

import ast
import builtins
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
from fsrs import Rating

from course.kit import course, exercises, masters, progress
from course.kit.answers import names_of
from course.lab24_interview import deck, drills, in_notebook, mock, sheet, tasks
from course.shared.decisions import judge
from minillm.__main__ import run

ROOT = Path(__file__).parents[3]
ALLOWED = re.compile(  # digits that are names, not numbers
    r"\b(?:19|20)\d\d\b|H100|A100|Llama [23]|DeepSeek-V3|Mixtral 8x7B|ZeRO-?\s?[123]|1F1B|GPT-3|NF4|int[48]|fp16|fp32|"
    r"UTF-8|LoRA|FSDP2|2\^-?\d+|lab \d\d|\d+-bit|log2|TP \d+|(?:16|32|64) bits|p99|top-\d+"
)


ASSUMED = {  # what an answer supposes, or quotes with its source: nothing computes it
    "25",  # MB of a bucket, torch's default
    "126", "128",  # layers of Llama 3 405B on places of its pipeline
    "80",  # GB on a data sheet, layers of a 70B model
    "100", "1,000",  # lengths of the example of packing
    "10", "0.4", "0.8",  # per cent of bubble that is asked for; two distributions of an example
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))


@pytest.mark.parametrize("topic", deck.topics())
def test_every_number_of_a_card_is_computed(topic):
    for card in deck.of_topic(topic):
        answer = card.answer
        assert answer and "{" not in answer and card.follow_ups and card.proof, card.question
        inputs = " ".join(re.findall(r"\{\{.*?\}\}", card.template))  # what the answer assumes is what it computes with
        given = set(re.findall(r"\d[\d,.]*\d|\d", f"{card.question} {inputs}"))
        given |= {f"{float(each):,.0f}" for each in re.findall(r"[\d.]+e\d+|\d+", inputs)}
        typed = ALLOWED.sub("", re.sub(r"\{\{.*?\}\}", "", card.template))
        for number in re.findall(r"\d[\d,.]*\d", typed):  # a single digit is a coefficient of a formula
            whole = number.rstrip(".,")
            assert whole in given | ASSUMED or _is_formula(typed, number), f"{whole} in {card.template!r} is typed"


def _is_formula(text: str, number: str) -> bool:
    """Part of an expression that the sentence spells out: next to an operator."""
    return bool(re.search(rf"[·/+\-−=^(√]\s?{re.escape(number)}|{re.escape(number)}e?\d*\s?[·/+\-−^)e]", text))


def test_the_deck_is_large_and_its_questions_differ():
    cards = deck.deck()
    assert len(cards) >= 250 and len({card.key for card in cards}) == len(cards)
    assert {card.level for card in cards} == set(deck.LEVELS)
    assert set(drills.TOPICS) == set(deck.topics()) and set(tasks.TASKS.values()) <= set(deck.topics())


def test_every_proof_exists():
    for proof in {card.proof for card in deck.deck()}:
        if proof.startswith("lab "):
            assert any((ROOT / "course").glob(f"lab{proof[4:]}_*")), proof
        else:
            assert (ROOT / "minillm" / proof).is_dir() or (ROOT / "minillm" / f"{proof}.py").exists(), proof


@pytest.mark.parametrize("kind", drills.DRILLS)
def test_drills_accept_their_value_and_name_their_slips(kind):
    for seed in range(20):
        decision = drills.DRILLS[kind](random.Random(seed))
        assert judge(decision, decision.value).kind == "right"
        for factor, sentence in decision.slips.items():
            if abs(factor - 1) > decision.tolerance:
                assert judge(decision, factor * decision.value).sentence == sentence


@pytest.mark.full
def test_there_are_twenty_tasks_each_with_mistakes_and_all_can_be_written_down(monkeypatch):
    for kind in ("lab", "solution"):  # several tasks come from one master
        monkeypatch.setattr(masters, kind, cache(getattr(masters, kind)))
    names = tasks.of_topic("")
    assert len(names) >= 20
    for name in names:
        made, known = tasks.task(name), exercises.answers(name)
        assert "check(" not in made.stub and "BEGIN SOLUTION" not in made.stub
        assert sum(answer.wrong for answer in known) >= 3 and not all(answer.wrong for answer in known)
        code = ast.parse(made.stub)
        defined = {node.name for node in code.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert {node.id for node in ast.walk(ast.parse(made.candidate)) if isinstance(node, ast.Name)} <= defined, name
        reads, binds = names_of(ast.parse(solved(made)))
        assert reads <= binds | set(dir(builtins)), f"{name} leaves out {sorted(reads - binds - set(dir(builtins)))}"


def solved(made: tasks.Task) -> str:
    """The whole solved notebook's code up to the check, as a candidate's file."""
    exercise = exercises.find(made.name)
    cells = masters.solution(course.masters(ROOT)[exercise.lab]).cells
    cell = next(cell.source for cell in cells if made.name in masters.checked(cell))
    given = made.stub.partition(tasks.YOURS)[0]
    return given + "\n".join(line for line in cell.split("\n") if "check(" not in line)


@pytest.mark.parametrize(  # a function, a class, one that runs on ranks and stands on an earlier exercise
    "name", ["residual", "block-pool", pytest.param("parallel-mlp", marks=pytest.mark.full)]
)
def test_a_task_accepts_the_reference_written_down_and_rejects_what_stops(name):
    made = tasks.task(name)
    assert made.judge(solved(made)).passed
    assert not made.judge(made.stub).passed
    assert "stopped" in made.judge("raise RuntimeError('no')").said
    assert "SyntaxError" in made.judge("def (").said
    assert "SystemExit" in made.judge("exit()").said


def test_what_earlier_exercises_built_is_given():
    stub = tasks.task("parallel-mlp").stub
    assert stub.index(tasks.GIVEN) < stub.index("class Leave") < stub.index(tasks.YOURS) < stub.index("def mlp")
    assert tasks.GIVEN not in tasks.task("kv-bytes").stub


def answering(replies):
    """A candidate who gives these replies and then leaves."""
    script = iter(replies)

    def ask(prompt):
        try:
            reply = next(script)
        except StopIteration:
            raise EOFError from None
        if isinstance(reply, BaseException):
            raise reply
        return reply

    return ask


def test_an_interrupted_session_goes_on_where_it_stopped(tmp_path):
    session = mock.start("pipeline", 10, seed=3)
    assert [kind for kind, _ in session.items] == ["card", "drill", "card", "card", "drill"]
    said = []
    mock.run(session, answering(["", "9", "3", KeyboardInterrupt()]), said.append, tmp_path)
    assert "is no grade" in " ".join(said) and "kept" in said[-1]
    again = mock.resume()
    assert again.done == session.done and len(again.done) == 1 and again.items == session.items
    mock.run(again, answering(["abc", "", "s", "", "3", "", "4", "0.3"]), said.append, tmp_path)
    assert sum("without its unit" in line for line in said) == 2, "what is no number is asked for again"
    assert [outcome for _, _, outcome in again.done][1] == "skipped"
    assert mock.resume() is None and "cards: 3 of 3 well" in said[-1]
    assert sum("planned are 2 minutes" in line for line in said) == 5


def test_a_session_is_not_lost_to_another_one(tmp_path):
    first = mock.start("pipeline", 10, seed=3)
    mock.run(first, answering(["", "3"]), print, tmp_path)
    mock.start("data", 6, seed=1)
    assert mock.resume().topic == "data" and mock.resume("pipeline") == first == mock.resume(seed=3)
    assert mock.resume("debugging") is None and mock.resume("pipeline", 1) is None
    mock.start("pipeline", 10, seed=3)
    assert mock.resume("pipeline").done == [] and len(mock.open_sessions()) == 2, "the same one drawn again"


def test_a_seed_draws_the_same_task_and_drills_whatever_cards_are_due():
    def drawn():
        return [name for kind, name in mock.start("", 45, seed=7).items if kind != "card"]

    before = drawn()
    mock.grade(deck.deck()[0].key, Rating.Again)
    assert drawn() == before


def test_when_a_card_comes_back_is_said():
    now = datetime.now(UTC)
    assert mock.when(now + timedelta(minutes=10)) == "in 10 minutes"
    assert mock.when(now + timedelta(days=3)) == f"on {now + timedelta(days=3):%Y-%m-%d}"


def test_time_that_is_over_is_said():
    session = mock.Session(1, "", 10, [["drill", "waiting:1"]], used_s=300)
    assert mock.time_left(session) == "5 minutes left"
    assert "time is up" in mock.time_left(session, 301)


@pytest.mark.full
def test_the_same_session_in_a_notebook(capsys):
    interview = in_notebook.Interview(45, "collectives", seed=7)
    kinds = [kind for kind, _ in interview.session.items]
    assert kinds[:3] == ["task", "drill", "card"] and len(kinds) > 10
    with pytest.raises(ValueError, match="open is task"):
        interview.answer("3")
    interview.ask()
    interview.run(lambda *_: None)
    interview.run(exercises.find(interview.session.items[0][1]).reference)
    interview.answer("nonsense")
    assert len(interview.session.done) == 1
    interview.answer(None)
    interview.answer()
    with pytest.raises(ValueError, match="no grade"):
        interview.grade(7)
    interview.grade(4)
    out = capsys.readouterr().out
    assert "Not yet" in out and "passed" in out and "without its unit" in out and "comes back" in out
    again = in_notebook.Interview()
    assert len(again.session.done) == 3 and again.session.items == interview.session.items
    again.session.done = [[*item, "3"] for item in again.session.items]
    again.ask()
    assert "Done in" in capsys.readouterr().out


def test_cards_come_back_when_they_are_due():
    cards = deck.of_topic("collectives")
    soon, late = cards[0], cards[1]
    first = mock.grade(soon.key, Rating.Again)
    mock.grade(late.key, Rating.Easy)
    assert first < datetime.now(UTC) + timedelta(hours=1)
    order = mock.by_due(cards, random.Random(1))
    assert order[-1] == late, "what was easy comes after everything new"
    seen, _, hard = mock.due()["collectives"]
    assert seen == 2 and 1 <= hard <= 10


def test_a_task_in_the_terminal_is_written_run_and_kept(tmp_path):
    session = mock.Session(1, "", 30, [["task", "kv-bytes"]])
    path = tmp_path / "kv-bytes.py"
    said = []

    def ask(prompt):
        if not any("Not yet" in line for line in said):
            assert path.exists()
            return ""
        path.write_text(solved(tasks.task("kv-bytes")))
        return ""

    mock.run(session, ask, said.append, tmp_path)
    assert session.done == [["task", "kv-bytes", "passed"]]
    path.write_text("mine")
    assert tasks.write(tmp_path, tasks.task("kv-bytes")).read_text() == "mine"


SESSIONS_OF_NOBODY = json.dumps(
    {
        "interview": {
            "sessions": [{"seed": 1, "topic": "", "minutes": 9, "items": [["card", "no such card"], ["x", "y"]]}]
        }
    }
)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"interview": 3}', '{"interview": {"cards": {"x": 1}, "sessions": [1, {}]}}', SESSIONS_OF_NOBODY],
)
def test_a_damaged_progress_file_ends_nothing(text):
    progress.path().write_text(text)
    with pytest.warns() if text in ("", "[]", "{", '{"interview": 3}') else _nothing():
        assert mock.resume() is None and mock.memories() == {}
    progress._warn_once.cache_clear()
    assert mock.start("data", 6, seed=1).items


def test_a_full_disk_costs_a_warning_and_the_session_goes_on(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    session = mock.start("data", 6, seed=1)
    monkeypatch.setattr(Path, "write_bytes", full)
    progress._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="No space left"):
        mock.run(session, answering(["", "3", "1", "", "3"] * 3), lambda _: None, tmp_path)
    assert not session.open and len(mock.memories()) == sum(kind == "card" for kind, _ in session.items)
    progress._warn_once.cache_clear()


def test_a_task_that_cannot_be_written_is_one_sentence_and_stays_open(tmp_path, monkeypatch, capsys):
    mock.start("collectives", 45, seed=7)
    (tmp_path / "file").write_text("in the way")
    assert run(["interview", "--folder", str(tmp_path / "file")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "cannot be written" in lines[0] and "name another folder" in lines[0]
    assert mock.resume().seed == 7

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            tasks.write(tmp_path, tasks.task("kv-bytes"))
    assert tasks.write(tmp_path, tasks.task("kv-bytes")).read_text() == tasks.task("kv-bytes").stub, (
        "no empty file stays"
    )


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_exercises_and_cards_share_the_file_without_loss():
    progress.record("ring-all-gather", "01_collectives", "passed")
    mock.grade(deck.deck()[0].key, Rating.Good)
    progress.record("tree-broadcast", "01_collectives", "failed")
    assert set(progress.load()) == {"ring-all-gather", "tree-broadcast"} and len(mock.memories()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--topic", "pipelin parallell"], "pipeline parallel"),
        (["--minutes", "1"], "at least 2"),
        (["--sheet", "/no/such/folder/page.html"], "cannot be written"),
        (["--minutes", "x"], "--minutes"),
    ],
)
def test_bad_input_is_one_line(arguments, sentence, capsys):
    assert run(["interview", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and sentence in lines[0]


def test_what_is_due_and_the_weakest_topics_are_shown(tmp_path, capsys):
    assert run(["interview", "--due"]) == 0
    out = capsys.readouterr().out
    assert "pipeline parallel" in out and "No card has been asked yet" in out
    for card in deck.of_topic("pipeline"):
        mock.grade(card.key, Rating.Again)
    mock.grade(deck.of_topic("collectives")[0].key, Rating.Easy)
    later = datetime.now(UTC) + timedelta(hours=1)
    assert mock.due(later)["pipeline parallel"][1] == len(deck.of_topic("pipeline"))
    assert mock.weakest(mock.due()) == ["pipeline parallel", "collectives"]
    assert run(["progress", "--json", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    assert f"{len(deck.of_topic('pipeline')) + 1} seen" in out and "Weakest: pipeline parallel, collectives" in out
    cards = {row["topic"]: row for row in json.loads((tmp_path / "p.json").read_text())["cards"]}
    assert cards["collectives"]["seen"] == 1 and cards["data"] == {
        "topic": "data",
        "seen": 0,
        "due": 0,
        "difficulty": 0.0,
    }


def test_a_sheet_is_a_page_to_print(tmp_path):
    page = tmp_path / "page.html"
    assert run(["interview", "--topic", "pipeline", "--sheet", str(page)]) == 0
    text = page.read_text()
    assert text.count("<div>") == len(deck.of_topic("pipeline")) and text == sheet.page("pipeline")


@pytest.mark.full
def test_a_session_in_a_terminal(tmp_path):
    """45 minutes' worth of items in a pseudo-terminal: bad input, empty input, then Ctrl-C."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"MINILLM_PROGRESS": str(tmp_path / "p.json"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "minillm", "interview", "--seed", "4", "--folder", str(tmp_path / "board")]
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=ROOT,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    os.close(terminal)
    seen = ""

    def until(pattern):
        nonlocal seen
        while not re.search(pattern, seen):
            assert select.select([controller], [], [], 120)[0], f"{pattern} never came: {seen[-400:]}"
            seen += os.read(controller, 4096).decode(errors="replace")
        seen = seen[re.search(pattern, seen).end() :]

    try:
        until("s skips: ")
        os.write(controller, b"\n")
        until("Not yet")
        until("s skips: ")
        os.write(controller, b"s\n")
        until("s skips\\): ")
        os.write(controller, b"\n")
        until("without its unit")
        until("s skips\\): ")
        os.write(controller, b"1e9\n")
        until("press Enter: ")
        os.write(controller, b"\n")
        until("at once\\): ")
        os.write(controller, b"7\n")
        until("no grade")
        until("at once\\): ")
        os.write(controller, b"3\n")
        until("press Enter: ")
        for _ in range(10):  # a signal between the prompt and the read of the line is acted on after that line
            process.send_signal(signal.SIGINT)
            if select.select([controller], [], [], 10)[0]:
                break
        until("goes on from here")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(controller)
    stored = json.loads((tmp_path / "p.json").read_text())["interview"]
    assert len(stored["sessions"][-1]["done"]) == 3 and len(stored["cards"]) == 1
