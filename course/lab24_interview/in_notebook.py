"""The same session in a notebook: a cell asks, the next one answers, and the clock runs from the first question.

interview = Interview(minutes=45)
interview.ask()
interview.answer("12e9")        # a drill's number, or what you said aloud to a card
interview.grade(3)              # after a card: how well it went
interview.run(my_function)      # a whiteboard task: what you wrote, through the lab's hidden check
"""

import time
from typing import Any

from course.kit import exercises
from course.kit.checks import verify
from course.lab24_interview import deck, drills, mock, tasks
from course.shared.decisions import judge


class Interview:
    """Goes on with the latest open session (of that topic and seed), or draws one. Kept as in the terminal."""

    def __init__(self, minutes: int = 45, topic: str = "", seed: int | None = None, *, new: bool = False):
        open_one = None if new else mock.resume(topic, seed)
        self.session = open_one or mock.start(topic, minutes, seed)
        self._since = time.monotonic()

    def ask(self) -> None:
        """Show what is open now."""
        if not self.session.open:
            print(mock.summary(self.session))
            return
        kind, name = self.session.open[0]
        left = mock.time_left(self.session, time.monotonic() - self._since)
        print(f"[{len(self.session.done) + 1} of {len(self.session.items)}, {left}]")
        if kind == "task":
            made = tasks.task(name)
            print(
                f"Whiteboard, {made.minutes} minutes: {name}. Copy this into a cell, write it, then interview.run(...):"
            )
            print(made.stub)
        elif kind == "drill":
            decision = drills.drill(name)
            print(f"{decision.question} (unit: {decision.unit or 'none'}) Then interview.answer(number).")
        else:
            card = deck.card(name)
            print(f"({card.topic}, {card.level}) {card.question} Say it aloud, then interview.answer().")

    def answer(self, reply: object = "") -> None:
        """A drill's number is judged and counts, None skips it; a card shows its answer and waits for `grade`."""
        kind, name = self._open("drill", "card")
        if kind == "card":
            print(f"{deck.card(name)}\nGrade yourself with interview.grade(n): {mock.GRADE_HELP}.")
            return
        decision = drills.drill(name)
        if reply is None:
            print(decision.because)
            self._done("skipped")
            return
        verdict = judge(decision, reply)
        if verdict.kind == "no number":
            print(verdict.sentence)
            return
        print(f"{verdict.sentence} {decision.because}")
        self._done(verdict.kind)

    def grade(self, how_well: int) -> None:
        """1 to 4, for a card. ValueError for anything else."""
        _, name = self._open("card")
        if str(how_well) not in mock.GRADES:
            raise ValueError(f"{how_well!r} is no grade: {mock.GRADE_HELP}.")
        print(f"It comes back {mock.when(mock.grade(name, mock.GRADES[str(how_well)]))}.")
        self._done(str(how_well))

    def run(self, candidate: Any) -> None:
        """A task's function through the hidden check; it counts once it passes. None skips the task."""
        _, name = self._open("task")
        if candidate is None:
            self._done("skipped")
            return
        outcome = verify(exercises.find(name), candidate)
        print("passed" if outcome.status == "passed" else f"Not yet: {outcome.message}")
        if outcome.status == "passed":
            self._done("passed")

    def _open(self, *kinds: str) -> list[str]:
        if not self.session.open or self.session.open[0][0] not in kinds:
            asked = self.session.open[0][0] if self.session.open else "nothing"
            raise ValueError(f"open is {asked}, not {' or '.join(kinds)}: interview.ask() shows it.")
        return self.session.open[0]

    def _done(self, outcome: str) -> None:
        now = time.monotonic()
        self.session.used_s += now - self._since
        self._since = now
        self.session.done.append([*self.session.open[0], outcome])
        self.session.save()
