"""Rounds of the mock interview: coding, debugging, design, concepts and the loop, each asked to its last question."""

import ast
import itertools
import random
from functools import cache

import pytest

from course.kit import course, exercises, masters
from course.lab24_interview import bugs, claims, deck, designs, in_notebook, mock, rounds, tasks
from course.lab24_interview import session as sessions
from course.shared.decisions import MOVES


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))
    for kind in ("lab", "solution"):  # several tasks come from one master
        monkeypatch.setattr(masters, kind, cache(getattr(masters, kind)))


class Candidate:
    """Answers whatever is asked: numbers and votes wrong, cards and designs aloud, tasks from the masters."""

    def __init__(self, folder):
        self.folder, self.said, self.asked = folder, [], []

    def say(self, text):
        self.said.append(text)

    def ask(self, prompt):
        self.asked.append(prompt)
        if "runs the check" in prompt:
            return self.write()
        for words, reply in (("Your number", "1e-9"), ("true, false", "d"), ("Grade yourself", "3")):
            if words in prompt:
                return reply
        return ""

    def write(self):
        """The file of the task that is open, solved."""
        path = max(self.folder.glob("*.py"), key=lambda each: each.stat().st_mtime_ns)
        path.write_text(solved(path.stem, path.read_text()))
        return ""


def solved(name, text):
    master = course.masters(course.home())[exercises.find(name).lab]
    cells = masters.solution(master).cells
    first = ast.parse(next(cell.source for cell in cells if cell.cell_type == "code")).body
    imports = [ast.unparse(node) for node in first if isinstance(node, ast.Import | ast.ImportFrom)]
    cell = next(cell.source for cell in cells if name in masters.checked(cell))
    body, _ = tasks.before_check(cell, name)
    return "\n".join([*imports, text.partition(tasks.YOURS)[0].partition("# This program")[0], body])


def held(session, tmp_path):
    candidate = Candidate(tmp_path)
    mock.run(session, candidate.ask, candidate.say, tmp_path)
    return candidate


def test_a_design_round_is_asked_move_by_move(tmp_path):
    session = sessions.start("debugging", 45, 3, "design")
    assert session.items[0][0] == "design"
    problem = designs.design(session.items[0][1])
    candidate = held(session, tmp_path)
    text = "\n".join(candidate.said)
    assert problem.question in text and all(problem.answer.text(move) in text for move in MOVES)
    assert all(decision.question in text for decision in problem.decisions.values())
    assert all(question in text and reply in text for question, reply in problem.answer.follow_ups)
    assert "What a strong one adds" in text and session.done[0] == ["design", problem.name, "3"]
    assert not session.open and all(prompt.startswith("[") for prompt in candidate.asked)


def test_all_designs_have_a_question_and_a_topic():
    assert set(designs.TOPICS) == {name for lab in designs.LABS for name in cases(lab)}
    assert set(designs.TOPICS.values()) <= set(deck.topics()) and len(designs.TOPICS) == 25
    for name in designs.TOPICS:
        question = designs.design(name).question
        assert len(question) > 60 and "*" not in question and not question.startswith("How many"), name


def cases(lab):
    return list(designs.import_module(f"course.lab{lab}.receipts").CASES)


def test_all_claims_are_drawn_under_a_topic_of_the_cards():
    assert sum(len(claims.of_topic(topic)) for topic in deck.topics()) == len(claims.statements()) == 101


def test_a_coding_round_is_tasks_until_the_time_is_full(tmp_path):
    session = sessions.start("hardware", 10, 3, "coding")
    assert session.items[0] == ["task", "matmul-cost"]
    assert sum(rounds.planned(*item) for item in session.items) <= 10
    held(session, tmp_path)
    assert session.done[0] == ["task", "matmul-cost", "passed"]


def test_a_debugging_round_hands_out_a_wrong_program_and_names_the_cause(tmp_path):
    session = sessions.start("hardware", 12, 3, "debugging")
    name = session.items[0][1]
    found = bugs.bug(name)
    assert not found.task.judge(found.task.stub).passed, "as it is handed out it fails"
    candidate = held(session, tmp_path)
    assert session.done[0] == ["bug", name, "passed"] and bugs.explained(name) in candidate.said
    assert "but for one mistake" in "\n".join(candidate.said)


def test_a_loop_has_a_part_of_each(tmp_path):
    session = sessions.start("", 90, 11, "loop")
    kinds = [kind for kind, _ in session.items]
    assert kinds[:3] == ["task", "bug", "design"] and {"card", "claim", "drill"} <= set(kinds)
    assert sum(rounds.planned(*item) for item in session.items) <= 90


@pytest.mark.parametrize("level", ["junior", "senior", "staff"])
def test_a_level_chooses_cards_and_tasks(level):
    wanted, (low, high) = rounds.LEVELS[level]
    for kind, name in rounds.items("mixed", "", 60, level, random.Random(2)):
        if kind == "card":
            assert deck.card(name).level in wanted
        if kind == "task":
            assert low <= exercises.find(name).difficulty <= high


def test_the_same_rounds_in_a_notebook(capsys):
    for kind in rounds.ROUNDS:
        interview = in_notebook.Interview(90, seed=5, round=kind, trial=True)
        for asked, _ in list(interview.session.items):
            interview.ask()
            if asked in ("card", "design"):
                interview.answer()
                interview.grade(3)
            else:
                interview.skip()
        interview.ask()
        assert "Done in" in capsys.readouterr().out


def all_bugs():
    return [name for task in tasks.TASKS for name in bugs.of_exercise(task)]


@pytest.mark.full
def test_every_bug_can_be_read_and_leaves_its_task_whole():
    names = all_bugs()
    assert len(names) >= 150
    for name in names:
        found = bugs.bug(name)
        ast.parse(found.task.stub)
        assert "BEGIN SOLUTION" not in found.task.stub and "check(" not in found.task.stub
        assert "NotImplementedError" not in found.task.stub.partition("# This program")[2], name
        assert found.cause.endswith(".") and found.task.statement in "\n".join(
            line.removeprefix("# ").removeprefix("#") for line in found.task.stub.split("\n")
        )


@pytest.mark.full
@pytest.mark.parametrize("task", ["kv-bytes", "block-pool", "one-f-one-b-order", "top-k-router", "clip-global-norm"])
def test_every_bug_of_a_program_fails_and_its_solution_passes(task):
    for name in bugs.of_exercise(task):
        made = bugs.bug(name).task
        assert not made.judge(made.stub).passed, name
        assert made.judge(solved(task, made.stub)).passed, name


def test_no_program_shows_two_of_its_mistakes_in_a_round():
    found = rounds.items("debugging", "debugging", 200, "", random.Random(1))
    programs = [name.partition("/")[0] for kind, name in found if kind == "bug"]
    assert len(programs) == len(set(programs)) >= 10
    assert all(a != b for a, b in itertools.pairwise(programs))
