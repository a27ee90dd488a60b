"""The same session in a notebook: a cell asks, the next one answers, and the clock runs from the first question.

interview = Interview(minutes=45)
interview.ask()
interview.answer("12e9")        # a drill's number, a claim's verdict, or what you said aloud to a card or a design
interview.answer([2, "5 ms"])   # a reading: one number for each of its questions
interview.grade(3)              # after a card or a design: how well it went
interview.run(my_function)      # a whiteboard task or a bug: what you wrote, through the lab's hidden check
interview.skip()                # whatever is open

With trial=True nothing is kept: no grade, no session. So a notebook that is only run leaves your record as it is.
"""

import time
from typing import Any

from course.kit import exercises
from course.kit.checks import OURS, is_ours, verify
from course.lab24_interview import bugs, claims, deck, designs, drills, mock, readings, results, session, spacing, tasks
from course.lab24_interview.wording import WIDTH, for_terminal
from course.shared.decisions import judge


class Interview:
    """Goes on with the latest open session of this topic, seed, round and level where they are given, or draws one."""

    def __init__(
        self,
        minutes: int = 45,
        topic: str = "",
        seed: int | None = None,
        round: str = "",
        level: str = "",
        *,
        new: bool = False,
        trial: bool = False,
    ):
        open_one = None if new or trial else session.resume(topic, seed, round, level)
        self.session = open_one or session.start(topic, minutes, seed, round or "mixed", level, kept=not trial)
        self._since = time.monotonic()
        self._shown = False  # whether `answer` has shown what is to be graded

    def ask(self) -> None:
        """Show what is open now."""
        if not self.session.open:
            _say(mock.summary(self.session))
            return
        kind, name = self.session.open[0]
        used = self.session.used_s + time.monotonic() - self._since
        left = mock.clock(self.session, used)
        _say(f"\n[{len(self.session.done) + 1} of {len(self.session.items)}, {left}] {mock.planned_for(kind, name)}")
        if kind in ("task", "bug"):
            made = tasks.task(name) if kind == "task" else bugs.bug(name).task
            print(f"Copy this into a cell, write it, then interview.run({made.candidate}):\n\n{made.stub}")
        elif kind == "drill":
            _say(f"{mock.asked(drills.drill(name))} Then interview.answer(number).")
        elif kind == "reading":
            its = readings.reading(name)
            asked = [mock.asked(decision) for decision in its.decisions]
            _say(its.report, "", *asked, f"Then interview.answer([{len(asked)} numbers]).")
        elif kind == "claim":
            _say(f"“{claims.claim(name).text}” Then interview.answer('true'), 'false' or 'depends'.")
        elif kind == "design":
            _say(f"{designs.design(name).question} Say the six moves aloud, then interview.answer().")
        else:
            card = deck.card(name)
            _say(f"({card.topic}, {card.level}) {card.question} Say it aloud, then interview.answer().")

    def answer(self, reply: object = "") -> None:
        """A drill's number, a reading's numbers or a vote count; a card or a design shows its answer and waits for
        `grade`."""
        kind, name = self._open("drill", "reading", "claim", "card", "design")
        if kind in ("card", "design"):
            shown = deck.card(name) if kind == "card" else designs.design(name).answer
            _say(f"{shown}\nGrade yourself with interview.grade(n): {mock.GRADE_HELP}.")
            self._shown = True
        elif kind == "claim":
            its, voted = claims.claim(name), claims.vote(str(reply))
            if voted is None:
                _say(f"{reply!r} is no vote: true, false or depends.")
                return
            _say(claims.reply(its, voted))
            self._done("right" if voted == its.verdict else "far")
        else:
            its = readings.reading(name) if kind == "reading" else None
            decisions = its.decisions if its else (drills.drill(name),)
            replies = reply if isinstance(reply, list | tuple) else [reply]
            if len(replies) != len(decisions):
                _say(f"There are {len(decisions)} questions: answer with a list of {len(decisions)} numbers.")
                return
            verdicts = [judge(decision, each) for decision, each in zip(decisions, replies, strict=True)]
            for decision, verdict in zip(decisions, verdicts, strict=True):
                _say(verdict.sentence if verdict.kind == "no number" else f"{verdict.sentence} {decision.because}")
            if all(verdict.kind != "no number" for verdict in verdicts):
                if its:
                    _say(its.strong)
                self._done(mock.together([verdict.kind for verdict in verdicts]))

    def grade(self, how_well: int) -> None:
        """1 to 4, for a card or a design whose answer was shown. ValueError for anything else."""
        kind, name = self._open("card", "design")
        if str(how_well) not in mock.GRADES:
            raise ValueError(f"{how_well!r} is no grade: {mock.GRADE_HELP}.")
        if not self._shown:
            raise ValueError("compare with the answer first: interview.answer() shows it.")
        if not self.session.kept:
            _say("A trial: this grade is not kept.")
        elif kind == "card":
            _say(f"It comes back {mock.when(spacing.grade(name, mock.GRADES[str(how_well)]))}.")
        self._done(str(how_well))

    def run(self, candidate: Any) -> None:
        """A task's function through the hidden check; it counts once it passes."""
        kind, name = self._open("task", "bug")
        exercise = exercises.find(name.partition("/")[0])
        if is_ours(exercise, candidate):
            _say(OURS)
            return
        outcome = verify(exercise, candidate)
        _say("passed" if outcome.status == "passed" else f"Not yet: {outcome.message}")
        if outcome.status == "passed":
            if kind == "bug":
                _say(bugs.explained(name))
            self._done("passed")

    def skip(self) -> None:
        """Leave out what is open; how a drill is computed and what was wrong with a bug is said."""
        kind, name = self._open(*mock.KINDS)
        if kind == "drill":
            _say(drills.drill(name).because)
        elif kind == "reading":
            its = readings.reading(name)
            _say(*(decision.because for decision in its.decisions), its.strong)
        elif kind == "bug":
            _say(bugs.explained(name))
        self._done("skipped")

    def _open(self, *kinds: str) -> list[str]:
        if not self.session.open or self.session.open[0][0] not in kinds:
            asked = self.session.open[0][0] if self.session.open else "nothing"
            raise ValueError(f"open is {asked}, not {' or '.join(kinds)}: interview.ask() shows it.")
        return self.session.open[0]

    def _done(self, outcome: str) -> None:
        now = time.monotonic()
        self.session.used_s += now - self._since
        self._since, self._shown = now, False
        kind, name = self.session.open[0]
        self.session.done.append([kind, name, outcome])
        if self.session.kept:
            results.record(kind, name, outcome)
        self.session.save()


def _say(*parts: object) -> None:
    """Each on a line of its own, folded between words."""
    print(for_terminal("\n".join(map(str, parts)), WIDTH))
