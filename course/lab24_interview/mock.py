"""A mock interview in a terminal: items asked one by one under a clock, kept so that an interruption loses nothing.

    whiteboard task    written into a file, run by the lab's hidden check
    bug                a program with one mistake in such a file
    reading            a trace, a hang report or a log, and numbers that it decides
    design             a problem of lab 20 or 21, step by step
    numeric drill      a number under the clock, judged with a tolerance, mistakes of units named
    card               a question, your answer aloud, then the model answer; you grade yourself
    claim              true, false or depends, and on what

`rounds.py` says which of them a round asks, `spacing.py` when a card comes back.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course.lab24_interview import bugs, claims, deck, designs, drills, readings, results, rounds, spacing, tasks
from course.lab24_interview.results import WELL
from course.lab24_interview.session import Session
from course.lab24_interview.spacing import GRADE_HELP, GRADES
from course.shared.decisions import MOVES, Decision, judge


class Stop(Exception):
    """The candidate ends the session; everything so far is kept."""


@dataclass
class Table:
    """Where the interview happens: what is said and asked, and the clock in front of every question."""

    session: Session
    ask: Callable[[str], str]
    say: Callable[[str], None]
    folder: Path
    begun: float

    @property
    def used_s(self) -> float:
        return self.session.used_s + time.monotonic() - self.begun

    def line(self, prompt: str) -> str:
        """The candidate's reply; the clock stands before the question, an empty line above it."""
        self.say("")
        reply = self.ask(f"[{clock(self.session, self.used_s)}] {prompt}").strip()
        if reply.lower() in ("q", "quit"):
            raise Stop
        return reply.lower() if reply.lower() == "s" else reply

    def grade(self) -> str:
        while (reply := self.line(f"Grade yourself ({GRADE_HELP}): ")) not in GRADES:
            self.say(f"{reply!r} is no grade: {GRADE_HELP}; q leaves.")
        return reply


def run(
    session: Session, ask: Callable[[str], str], say: Callable[[str], None], folder: Path = Path("whiteboard")
) -> Session:
    """Ask what is open. `ask` returns a line, and raises EOFError or KeyboardInterrupt if the candidate leaves."""
    total, over = len(session.items), False
    while session.open:
        kind, name = session.open[0]
        table = Table(session, ask, say, folder, time.monotonic())
        try:
            if is_over(session, session.used_s) and not over:
                say(f"\nTime is up, with {len(session.open)} left to ask.")
                table.line("Enter goes on without a clock, q keeps them for later: ")
                over = True
            say(f"\n[{len(session.done) + 1} of {total}] {planned_for(kind, name)}")
            outcome = _ASKED[kind](name, table)
        except (EOFError, KeyboardInterrupt, Stop):
            session.used_s = table.used_s
            session.save()
            say("\nStopped. Everything so far is kept; `python -m minillm interview` goes on from here.")
            return session
        took = table.used_s - session.used_s
        session.used_s = table.used_s
        say(f"That took {minutes(took)}; planned are {rounds.planned(kind, name)} minutes.")
        session.done.append([kind, name, outcome])
        results.record(kind, name, outcome)
        session.save()
    say(summary(session))
    return session


def is_over(session: Session, used_s: float) -> bool:
    return used_s >= 60 * session.minutes


def clock(session: Session, used_s: float) -> str:
    """Minutes and seconds left, or how long it has been over."""
    left = 60 * session.minutes - used_s
    return f"{minutes(left)} left" if left > 0 else f"{minutes(-left)} over"


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def planned_for(kind: str, name: str) -> str:
    """What comes now, and how long it may take."""
    names = {"task": "Whiteboard", "bug": "Debugging", "design": "Design"}
    which = f": {name.partition('/')[0]}" if kind in ("task", "bug") else ""
    return f"{names.get(kind, kind.capitalize())}, {rounds.planned(kind, name)} minutes{which}"


def when(moment: datetime) -> str:
    """The day on which a card comes back, and how far off that is."""
    days = (moment.astimezone().date() - datetime.now(UTC).astimezone().date()).days
    return f"on {moment.astimezone():%Y-%m-%d}, in {days} {'day' if days == 1 else 'days'}"


def summary(session: Session) -> str:
    """What went well, by kind."""
    lines = [f"\nDone in {session.used_s / 60:.0f} of {session.minutes} minutes."]
    for kind in _ASKED:
        outcomes = [outcome for its, _, outcome in session.done if its == kind]
        if outcomes:
            lines.append(f"  {kind}s: {sum(outcome in WELL for outcome in outcomes)} of {len(outcomes)} well")
    return "\n".join(lines)


def _task(name: str, table: Table) -> str:
    made = tasks.task(name)
    table.say(made.statement)
    return _written(made, made.name, table, "s skips")


def _bug(name: str, table: Table) -> str:
    bug = bugs.bug(name)
    table.say(f"{bug.task.statement}\n\nThe program in the file does this, but for one mistake. Find it and mend it.")
    outcome = _written(bug.task, name, table, "s shows the cause")
    table.say(bugs.explained(name))
    return outcome


def _written(made: tasks.Task, name: str, table: Table, skip: str) -> str:
    """The file is written once in a session, then judged until it passes."""
    path = table.folder / f"{made.name}.py"
    if name not in table.session.begun or not path.exists():
        try:
            path, older = tasks.write(table.folder, made.name, made.stub)
        except OSError as error:
            said = f"--folder {table.folder} cannot be written ({error.strerror}): name another folder."
            raise ValueError(said) from error
        table.session.begun.append(name)
        table.session.save()
        if older:
            table.say(f"What stood in {path} is now {older}.")
    table.say(f"\nWrite into this file, which says all of this again:\n    {path}")
    while True:
        if table.line(f"Enter runs the check, {skip}: ") == "s":
            return "skipped"
        try:
            result = made.judge(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            table.say(f"{path} cannot be read ({error}): write it again, or s skips.")
            continue
        table.say(result.said if result.passed else f"Not yet: {result.said}")
        if result.passed:
            return "passed"


def _drill(name: str, table: Table) -> str:
    return _number(drills.drill(name), table)


def _reading(name: str, table: Table) -> str:
    its = readings.reading(name)
    table.say(its.report)
    verdicts = []
    for decision in its.decisions:
        table.say("")
        verdicts.append(_number(decision, table))
    table.line("What else do you say, and what do you do next? Say it, then press Enter: ")
    table.say(its.strong)
    return together(verdicts)


def together(verdicts: list[str]) -> str:
    """The outcome of several numbers: the first that is not right, if there is one."""
    return next((verdict for verdict in verdicts if verdict != "right"), "right")


def asked(decision: Decision) -> str:
    """Its question, and the unit of the answer."""
    unit = f"unit: {decision.unit}" if decision.unit else "a number without unit"
    return f"{decision.question[:1].upper()}{decision.question[1:]} ({unit})"


def _number(decision: Decision, table: Table) -> str:
    """Ask until it is a number; how it is computed follows."""
    table.say(asked(decision))
    while (reply := table.line("Your number (s skips): ")) != "s":
        verdict = judge(decision, reply)
        table.say(verdict.sentence)
        if verdict.kind != "no number":
            table.say(decision.because)
            return verdict.kind
    table.say(decision.because)
    return "skipped"


def _card(name: str, table: Table) -> str:
    card = deck.card(name)
    table.say(f"({card.topic}, {card.level}) {card.question}")
    table.line("Answer aloud, then press Enter: ")
    table.say(card.answer)
    for question, reply in card.next_asked:
        table.line(f"Asked next: {question} Press Enter: ")
        table.say(reply)
    grade = table.grade()
    if grade in WEAK:
        table.say(adds(card))
    table.say(f"It comes back {when(spacing.grade(name, GRADES[grade]))}.")
    return grade


WEAK = ("1", "2")


def adds(card: deck.Card) -> str:
    """What a strong answer has and a weak one lacks: the law, the number, the condition, what comes next."""
    parts = ["the answer in its first sentence"]
    if any(sign in card.answer for sign in "=·/√"):
        parts.append("the formula with its units before the number")
    elif any(character.isdigit() for character in card.answer):
        parts.append("a number with its unit, and what it is a share of")
    parts.append("when it does not hold")
    parts.append(f"unasked, what is asked next ({card.follow_ups[0][0]})")
    where = f"lab {card.proof[4:]}" if card.proof.startswith("lab ") else f"minillm/{card.proof}"
    return f"What a strong answer adds: {'; '.join(parts)}. Derive it once more from {where}."


def _claim(name: str, table: Table) -> str:
    its = claims.claim(name)
    table.say(f"“{its.text}”")
    while not (voted := claims.vote(table.line("true, false or depends (t, f, d), and say on what: "))):
        table.say("Vote t, f or d; q leaves.")
    table.say(claims.reply(its, voted))
    return "right" if voted == its.verdict else "far"


def _design(name: str, table: Table) -> str:
    problem = designs.design(name)
    answer = problem.answer
    table.say(f"{answer.title}. {problem.question}")
    table.line(f"{MOVES['clarify']}: what do you ask first? Say it, then press Enter: ")
    table.say(answer.text("clarify"))
    for decision in problem.decisions.values():
        table.say("")
        _number(decision, table)
    for move, title in list(MOVES.items())[1:]:
        table.line(f"{title}: say it aloud, then press Enter: ")
        table.say(answer.text(move))
    for question, reply in answer.follow_ups:
        table.say(f"\nAsked next: {question}")
        table.line("Answer aloud, then press Enter: ")
        table.say(reply)
    table.say(f"\nA weak answer: “{answer.text('weak')}”\nWhat a strong one adds: {answer.text('why')}")
    return table.grade()


_ASKED: dict[str, Callable[[str, Table], Any]] = {
    "task": _task,
    "bug": _bug,
    "reading": _reading,
    "design": _design,
    "drill": _drill,
    "card": _card,
    "claim": _claim,
}
KINDS = tuple(_ASKED)
