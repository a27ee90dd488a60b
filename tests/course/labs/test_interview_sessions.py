"""Sessions of the mock interview: how they are asked, interrupted, kept, forgotten; in a terminal and in a notebook."""

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
from functools import partial
from pathlib import Path

import pytest
from fsrs import Rating

from course.kit import course, exercises, masters, progress
from course.lab24_interview import (
    claims,
    deck,
    designs,
    drills,
    in_notebook,
    mock,
    readings,
    results,
    rounds,
    spacing,
    tasks,
)
from course.lab24_interview import session as sessions
from minillm.__main__ import run

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))


def answering(replies, asked=None):
    """A candidate who gives these replies and then leaves. asked: where the questions are written down."""
    script = iter(replies)

    def ask(prompt):
        if asked is not None:
            asked.append(prompt)
        try:
            reply = next(script)
        except StopIteration:
            raise EOFError from None
        if isinstance(reply, BaseException):
            raise reply
        return reply

    return ask


def test_an_interrupted_session_goes_on_where_it_stopped(tmp_path):
    session = sessions.start("pipeline", 10, seed=3)
    assert [kind for kind, _ in session.items] == ["drill", "card", "claim", "card", "card"]
    said, asked = [], []
    mock.run(
        session, answering(["abc", "", "s", "", "", "", "9", "3", KeyboardInterrupt()], asked), said.append, tmp_path
    )
    assert sum("is no number" in line for line in said) == 2, "what is no number is asked for again"
    assert "is no grade" in " ".join(said) and "kept" in said[-1]
    again = sessions.resume()
    assert again.done == session.done and len(again.done) == 2 and again.items == session.items
    assert [outcome for _, _, outcome in again.done] == ["skipped", "3"]
    mock.run(again, answering(["perhaps", "f", "", "", "", "3", "", "", "", "2"]), said.append, tmp_path)
    assert "Vote t, f or d; q leaves." in said
    assert sessions.resume() is None and "cards: 2 of 3 well" in said[-1]
    assert any("What a strong answer adds" in line for line in said), "and a weak answer hears what is missing"
    assert any(question in line for line in asked for question, _ in deck.card(session.items[1][1]).follow_ups)
    assert sum("planned are 2 minutes" in line for line in said) == 5


def test_a_session_is_not_lost_to_another_one(tmp_path):
    first = sessions.start("pipeline", 10, seed=3)
    mock.run(first, answering(["s", "", "", "", "3"]), print, tmp_path)
    sessions.start("data", 6, seed=1)
    assert sessions.resume().topic == "data" and sessions.resume("pipeline") == first == sessions.resume(seed=3)
    assert sessions.resume("debugging") is None and sessions.resume("pipeline", 1) is None
    again = sessions.start("pipeline", 10, seed=3)
    assert [each.key for each in sessions.open_sessions()[-1:]] == [again.key] and len(sessions.open_sessions()) == 3
    assert first in sessions.open_sessions(), "drawn again it is another session, and the one begun stays"
    assert sessions.discard("pipe", 3).key == again.key and sessions.resume("pipeline") == first
    assert sessions.discard("pipeline") == first and sessions.discard("pipeline") is None
    assert len(spacing.memories()) == 1, "grades of a session that is forgotten stay"


def test_a_topic_in_part_is_the_same_topic():
    whole = sessions.start("pipeline parallel", 10)
    assert sessions.resume("pipe") == whole == sessions.resume("Pipeline")
    both = sessions.start("parallel", 10)
    assert sessions.resume("parallel") == both and both.topic.count(deck.JOINT) == 2
    assert {card.topic for card in deck.of_topic(both.topic)} == set(deck.topics_of(both.topic))


def test_minutes_count_from_now_when_a_session_goes_on(tmp_path):
    session = sessions.start("pipeline", 10, seed=3)
    mock.run(session, answering(["1"]), lambda _: None, tmp_path)
    session = sessions.resume()
    session.used_s = 300.0
    before = list(session.items)
    sessions.extend(session, 20)
    assert session.minutes == 25 and session.items[:5] == before and len(session.items) > 10
    assert len({tuple(item) for item in session.items}) == len(session.items)
    sessions.extend(session, 2)
    assert session.minutes == 7 and mock.clock(session, session.used_s) == "2:00 left"
    with pytest.raises(ValueError, match="at least 2"):
        sessions.extend(session, 1)


def test_a_seed_draws_the_same_task_and_drills_whatever_cards_are_due():
    def drawn():
        return [name for kind, name in sessions.start("", 45, seed=7).items if kind != "card"]

    before = drawn()
    spacing.grade(deck.deck()[0].key, Rating.Again)
    assert drawn() == before


def test_when_a_card_comes_back_is_said():
    later = datetime.now(UTC) + timedelta(days=3)
    assert mock.when(later) == f"on {later.astimezone():%Y-%m-%d}, in 3 days"


def test_the_clock_stands_before_every_question_and_its_end_is_a_question(tmp_path):
    session = sessions.Session(1, "", 10, [["drill", "waiting:1"], ["drill", "waiting:2"]], used_s=595)
    assert mock.clock(session, 595) == "0:05 left" and mock.clock(session, 665) == "1:05 over"
    asked = []

    def ask(prompt):
        asked.append(prompt)
        session.used_s += 10
        return "1"

    mock.run(session, ask, lambda _: None, tmp_path)
    assert re.match(r"\[0:0[45] left\] Your number", asked[0]) and "q keeps them for later" in asked[1]
    assert all(re.match(r"\[\d+:\d\d (left|over)\] ", prompt) for prompt in asked) and len(asked) == 3
    session = sessions.Session(1, "", 10, [["drill", "waiting:1"]], used_s=600)
    mock.run(session, answering(["q"]), lambda _: None, tmp_path)
    assert session.done == []


@pytest.mark.full
def test_the_same_session_in_a_notebook(capsys):
    interview = in_notebook.Interview(45, "collectives", seed=7)
    kinds = [kind for kind, _ in interview.session.items]
    assert kinds[:4] == ["task", "drill", "card", "card"] and len(kinds) > 10
    with pytest.raises(ValueError, match="open is task"):
        interview.answer("3")
    interview.ask()
    interview.run(lambda *_: None)
    reference = exercises.find(interview.session.items[0][1]).reference
    interview.run(reference)
    out = capsys.readouterr().out
    assert "Not yet" in out and "course's own version" in out and not interview.session.done
    interview.run(lambda *given: reference(*given))
    interview.answer("nonsense")
    assert len(interview.session.done) == 1
    interview.skip()
    with pytest.raises(ValueError, match="compare with the answer first"):
        interview.grade(4)
    interview.answer()
    with pytest.raises(ValueError, match="no grade"):
        interview.grade(7)
    interview.grade(4)
    out = capsys.readouterr().out
    assert "passed" in out and "is no number" in out and "comes back" in out
    again = in_notebook.Interview()
    assert len(again.session.done) == 3 and again.session.items == interview.session.items
    assert in_notebook.Interview(round="debugging", level="staff").session.about.startswith("debugging round, staff")
    again.session.done = [[*item, "3"] for item in again.session.items]
    again.ask()
    assert "Done in" in capsys.readouterr().out


def test_cards_come_back_when_they_are_due_and_never_on_the_same_day():
    cards = deck.of_topic("collectives")
    soon, late = cards[0], cards[1]
    first = spacing.grade(soon.key, Rating.Again)
    spacing.grade(late.key, Rating.Easy)
    now = datetime.now(UTC)
    assert timedelta(hours=23) < first - now < timedelta(hours=25), "a session asks each card once"
    assert spacing.in_order(cards, random.Random(1), now)[-2:] == [soon, late], "after everything new"
    tomorrow = (now + timedelta(days=1)).replace(hour=0, minute=30)
    assert spacing.in_order(cards, random.Random(1), now + timedelta(days=1))[1] == soon
    assert spacing.is_due(spacing.memories()[soon.key], max(tomorrow, now + timedelta(hours=25)))
    seen, _, hard = spacing.due()["collectives"]
    assert seen == 2 and 1 <= hard <= 10


@pytest.mark.drawn(2)
@pytest.mark.parametrize("habit", [["3"], ["1", "2", "3"], ["2"], ["3", "3", "4", "1"]])
def test_sixty_sessions_in_thirty_days_ask_every_card(habit):
    """Two a day, as docs/interview.md plans a month: a round of concepts and a mixed one, on all topics."""
    day, grades, asked = datetime(2026, 3, 1, 9, tzinfo=UTC), 0, []
    memories: dict = {}

    in_order = spacing.in_order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spacing, "memories", lambda: memories)
        for number in range(60):
            moment = day + timedelta(days=number // 2, hours=10 * (number % 2))
            patch.setattr(spacing, "in_order", partial(in_order, now=moment))
            kind, length = (("concepts", 20), ("mixed", 45))[number % 2]
            for its, name in rounds.items(kind, "", length, "", random.Random(number)):
                if its == "card":
                    rating = spacing.GRADES[habit[grades % len(habit)]]
                    memory, _ = spacing.SCHEDULER.review_card(memories.get(name, spacing.Memory()), rating, moment)
                    memories[name] = memory
                    grades += 1
                    asked.append((moment.date(), name))
    assert set(memories) == {card.key for card in deck.deck()}
    assert len(asked) == len(set(asked)), "no card twice on one day"
    assert len(asked) > 1.3 * len(memories), "and those that are due come back"


def test_a_task_in_the_terminal_is_written_run_and_kept(tmp_path):
    made = tasks.task("kv-bytes")
    session = sessions.Session(1, "", 30, [["task", "kv-bytes"], ["drill", "waiting:1"]])
    path = tmp_path / "kv-bytes.py"
    said = []
    right = made.stub.replace("raise NotImplementedError", RIGHT)
    path.write_text(right)

    def ask(prompt):
        if "check" in prompt and not any("Not yet" in line for line in said):
            assert path.read_text() == made.stub, "an old answer to the same task does not pass by itself"
            return ""
        if "check" in prompt:
            path.write_text(right)
            return ""
        raise EOFError

    mock.run(session, ask, said.append, tmp_path)
    assert session.done == [["task", "kv-bytes", "passed"]] and session.begun == ["kv-bytes"]
    assert made.statement in said[1], "all of the task is on the screen"
    assert (tmp_path / "kv-bytes-1.py").read_text() == right, "what stood there is kept"
    path.write_text("half an answer")
    session.done = []
    mock.run(session, answering(["s"]), said.append, tmp_path)
    assert path.read_text() == "half an answer", "a session that goes on leaves its file alone"


RIGHT = """return (
        2 * (prompt + answer - 1) * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    )"""


@pytest.mark.parametrize("topic", deck.topics())
def test_what_is_off_the_topic_never_comes(topic):
    for kind in rounds.ROUNDS:
        for its, name in rounds.items(kind, topic, max(45, rounds.NEEDED[kind]), "", random.Random(5)):
            assert belongs(its, name, topic), f"{its} {name} in a {kind} round on {topic}"


def belongs(kind, name, topic):
    """Said by the tables alone."""
    if kind in ("task", "bug"):
        return tasks.TASKS[name.partition("/")[0]] == topic or (kind, topic) == ("bug", "debugging")
    if kind == "drill":
        return name.partition(":")[0] in drills.TOPICS[topic]
    if kind == "reading":
        return topic in (readings.TOPICS[name.partition(":")[0]], "debugging")
    if kind == "claim":
        return claims.TOPICS[claims.claim(name).topic] == topic
    return (designs.TOPICS[name] if kind == "design" else deck.card(name).topic) == topic


@pytest.mark.parametrize("topic", ["", *deck.topics()])
def test_no_two_drills_of_a_session_are_alike(topic):
    names = drills.different(topic, random.Random(7), 15)
    questions = [drills.drill(name).question for name in names]
    assert len(set(questions)) == len(questions) >= 4


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
        assert sessions.resume() is None and spacing.memories() == {}
    progress._warn_once.cache_clear()
    assert sessions.start("data", 6, seed=1).items


def test_a_full_disk_costs_a_warning_and_the_session_goes_on(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    session = sessions.start("data", 6, seed=1)
    monkeypatch.setattr(Path, "write_bytes", full)
    progress._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="No space left"):
        mock.run(session, answering(["s", "", "", "", "3", "", "", "", "3"]), lambda _: None, tmp_path)
    assert not session.open and len(spacing.memories()) == sum(kind == "card" for kind, _ in session.items)
    progress._warn_once.cache_clear()


def test_a_task_that_cannot_be_written_is_one_sentence_and_stays_open(tmp_path, monkeypatch, capsys):
    sessions.start("collectives", 45, seed=7)
    (tmp_path / "file").write_text("in the way")
    assert run(["interview", "--folder", str(tmp_path / "file")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "cannot be written" in lines[0] and "name another folder" in lines[0]
    assert sessions.resume().seed == 7

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            tasks.write(tmp_path, "kv-bytes", "a stub")
    path, older = tasks.write(tmp_path, "kv-bytes", "a stub")
    assert path.read_text() == "a stub" and older is None, "no empty file stays"


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_exercises_and_cards_share_the_file_without_loss():
    progress.record("ring-all-gather", "01_collectives", "passed")
    spacing.grade(deck.deck()[0].key, Rating.Good)
    progress.record("tree-broadcast", "01_collectives", "failed")
    assert set(progress.load()) == {"ring-all-gather", "tree-broadcast"} and len(spacing.memories()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--topic", "pipelin parallell"], "pipeline parallel"),
        (["--minutes", "1"], "at least 2"),
        (["--sheet", "/no/such/folder/page.html"], "cannot be written"),
        (["--minutes", "x"], "--minutes"),
        (["--round", "panel"], "there are mixed, coding, debugging, design, concepts, loop"),
        (["--level", "intern"], "there are junior, senior, staff"),
        (["--round", "design", "--minutes", "10"], "at least 25"),
        (["--round", "coding", "--topic", "debugging"], "has nothing on debugging"),
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
        spacing.grade(card.key, Rating.Again)
    spacing.grade(deck.of_topic("collectives")[0].key, Rating.Easy)
    later = datetime.now(UTC) + timedelta(hours=24)
    assert spacing.due()["pipeline parallel"][1] == 0
    assert spacing.due(later)["pipeline parallel"][1] == len(deck.of_topic("pipeline"))
    assert spacing.weakest(spacing.due()) == ["pipeline parallel"], "one card makes no topic weak"
    assert run(["progress", "--json", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    assert f"{len(deck.of_topic('pipeline')) + 1} seen" in out and "Weakest: pipeline parallel" in out
    cards = {row["topic"]: row for row in json.loads((tmp_path / "p.json").read_text())["cards"]}
    assert cards["collectives"]["seen"] == 1 and cards["data"] == {
        "topic": "data",
        "seen": 0,
        "due": 0,
        "difficulty": 0.0,
    }


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
        until("is no number")
        until("s skips\\): ")
        os.write(controller, b"1e9\n")
        until("Answer aloud, then press Enter: ")
        os.write(controller, b"\n")
        for _ in range(2):
            until("Asked next: [^:]*Press Enter: ")
            os.write(controller, b"\n")
        until("at once\\): ")
        os.write(controller, b"7\n")
        until("no grade")
        until("at once\\): ")
        os.write(controller, b"3\n")
        until("say on what: ")
        for _ in range(10):  # a signal between the prompt and the read of the line is acted on after that line
            process.send_signal(signal.SIGINT)
            if select.select([controller], [], [], 10)[0]:
                break
        until(r"goes on\s+from\s+here")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(controller)
    stored = json.loads((tmp_path / "p.json").read_text())["interview"]
    assert len(stored["sessions"][-1]["done"]) == 3 and len(stored["cards"]) == 1


def test_a_lab_that_is_only_run_writes_nothing_into_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "run-all.json"))
    namespace = {"__name__": "__main__"}
    for cell in masters.lab(course.masters(ROOT)["24_interview"]).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "24_interview", "exec"), namespace)
    assert progress.section(spacing.SECTION) == {}
    assert "A trial: this grade is not kept." in capsys.readouterr().out


def test_drills_and_claims_count_for_the_weakest_topics(tmp_path, capsys):
    items = [["drill", f"bubble:{seed}"] for seed in range(4)]
    mock.run(sessions.Session(1, "", 30, items), answering(["1e-9"] * 4), lambda _: None, tmp_path)
    assert results.results()["pipeline parallel"] == (0, 4)
    assert spacing.weakest(spacing.due(), results.results())[0] in ("pipeline parallel", "planning")
    progress.keep(spacing.SECTION, {"results": {"data": "no", "planning": [1]}})
    assert results.results() == {}
    mock.run(sessions.Session(1, "", 30, [["claim", "twenty_four_per_second"]]), answering(["t"]), print, tmp_path)
    assert results.results() == {"decoding and the cache": (1, 1)}
    assert run(["interview", "--due"]) == 0 and "1 of 1" in capsys.readouterr().out
