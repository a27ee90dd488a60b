"""A mock interview: items drawn for a topic and a time, asked one by one, kept so that an interruption loses nothing.

    whiteboard task    one, if there are 20 minutes or more: written into a file, run by the lab's hidden check
    numeric drills     a number under the clock, judged with a tolerance, mistakes of units named
    cards              a question, your answer aloud, then the model answer; you grade yourself

Cards come back by the FSRS scheduler (Ye et al. 2022, https://doi.org/10.1145/3534678.3539081) through the `fsrs`
library: those that are due first, then new ones. State lies in the progress file, in the section "interview": every
card's memory, and every session that is still open, the latest last.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsrs import Card as Memory
from fsrs import Rating, Scheduler

from course.kit import exercises, progress
from course.lab24_interview import deck, drills, tasks
from course.shared.decisions import judge

SECTION = "interview"
MINUTES = {"drill": 2, "card": 2}
GRADES = {"1": Rating.Again, "2": Rating.Hard, "3": Rating.Good, "4": Rating.Easy}
GRADE_HELP = "1 did not know, 2 with gaps, 3 well, 4 at once"


class Stop(Exception):
    """The candidate ends the session; everything so far is kept."""


@dataclass
class Session:
    """items: (kind, name) in the order asked; done: (kind, name, outcome) of those answered; used_s: seconds so far."""

    seed: int
    topic: str
    minutes: int
    items: list[list[str]]
    done: list[list[str]] = field(default_factory=list)
    used_s: float = 0.0

    @property
    def open(self) -> list[list[str]]:
        return self.items[len(self.done) :]

    @property
    def name(self) -> tuple[int, str, int]:
        """What it was drawn from."""
        return self.seed, self.topic, self.minutes

    def save(self) -> None:
        """As the latest of the open sessions; one that is done is none of them any more."""
        kept = [each for each in open_sessions() if each.name != self.name] + ([self] if self.open else [])
        progress.keep(SECTION, progress.section(SECTION) | {"sessions": [each.__dict__ for each in kept]})


def start(topic: str = "", minutes: int = 45, seed: int | None = None) -> Session:
    """A new session; others that are open stay so. ValueError for a topic that there is not, or too little time."""
    check_minutes(minutes)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    draw, cards = random.Random(seed), deck.of_topic(topic)
    its_topics = {card.topic for card in cards}
    items: list[list[str]] = []
    if minutes >= 20:
        known = [name for each in its_topics for name in tasks.of_topic(each)] if topic else tasks.of_topic("")
        chosen = draw.choice(sorted(set(known)))
        items.append(["task", chosen])
        minutes_left = minutes - tasks.task(chosen).minutes
    else:
        minutes_left = minutes
    kinds = sorted({name for each in its_topics for name in drills.TOPICS.get(each, tuple(drills.DRILLS))})
    waiting = by_due(cards, random.Random(seed))
    while minutes_left >= MINUTES["card"] and waiting:
        kind = "drill" if len(items) % 3 == 1 else "card"
        name = f"{draw.choice(kinds)}:{draw.randrange(10**6)}" if kind == "drill" else waiting.pop(0).key
        items.append([kind, name])
        minutes_left -= MINUTES[kind]
    session = Session(seed, topic, minutes, items)
    session.save()
    return session


def check_minutes(minutes: int) -> None:
    """ValueError for too little time."""
    if minutes < MINUTES["card"]:
        raise ValueError(f"--minutes {minutes}: a session needs at least {MINUTES['card']}, which is one card.")


def resume(topic: str = "", seed: int | None = None) -> Session | None:
    """The latest session that was interrupted, of this topic and seed if they are given."""
    sessions = [each for each in open_sessions() if topic in ("", each.topic) and seed in (None, each.seed)]
    return sessions[-1] if sessions else None


def open_sessions() -> list[Session]:
    """Those with something left to ask, the latest last; a damaged record counts as none."""
    known, sessions = {card.key for card in deck.deck()}, []
    records = progress.section(SECTION).get("sessions")
    for record in records if isinstance(records, list) else []:
        try:
            session = Session(**record)
            if session.open and all(
                kind in _ASKED and (kind != "card" or name in known) for kind, name in session.items
            ):
                sessions.append(session)
        except (TypeError, ValueError):
            continue
    return sessions


def by_due(cards: list[deck.Card], draw: random.Random) -> list[deck.Card]:
    """Cards that are due, the longest first; then new ones in random order; then the rest by when they are due."""
    now, kept = datetime.now(UTC), memories()
    new = [card for card in cards if card.key not in kept]
    draw.shuffle(new)
    old = sorted((card for card in cards if card.key in kept), key=lambda card: kept[card.key].due)
    return [c for c in old if kept[c.key].due <= now] + new + [c for c in old if kept[c.key].due > now]


def memories() -> dict[str, Memory]:
    """The scheduler's record of each card that was graded; a damaged record counts as none."""
    known = {}
    for key, record in (progress.section(SECTION).get("cards") or {}).items():
        try:
            known[key] = Memory.from_dict(record)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return known


def grade(key: str, rating: Rating) -> datetime:
    """Record how well a card went; returns when it comes back."""
    memory = memories().get(key, Memory())
    memory, _ = Scheduler(enable_fuzzing=False).review_card(memory, rating)
    section = progress.section(SECTION)
    progress.keep(SECTION, section | {"cards": (section.get("cards") or {}) | {key: memory.to_dict()}})
    return memory.due


def when(moment: datetime) -> str:
    """In minutes if it is today, else the day."""
    minutes = (moment - datetime.now(UTC)).total_seconds() / 60
    return f"in {max(1, round(minutes))} minutes" if minutes < 12 * 60 else f"on {moment:%Y-%m-%d}"


def due(now: datetime | None = None) -> dict[str, tuple[int, int, float]]:
    """By topic: cards seen, cards due, and the mean difficulty (1 to 10) that the scheduler gives them."""
    now, kept, topics = now or datetime.now(UTC), memories(), {}
    for topic in deck.topics():
        seen = [kept[card.key] for card in deck.of_topic(topic) if card.topic == topic and card.key in kept]
        hard = [memory.difficulty or 0.0 for memory in seen]
        late = sum(memory.due <= now for memory in seen)
        topics[topic] = (len(seen), late, sum(hard) / len(hard) if hard else 0.0)
    return topics


def weakest(topics: dict[str, tuple[int, int, float]]) -> list[str]:
    """The three topics of `due` that the scheduler finds hardest for you, of those that you have seen."""
    return sorted((topic for topic in topics if topics[topic][0]), key=lambda topic: -topics[topic][2])[:3]


def run(
    session: Session, ask: Callable[[str], str], say: Callable[[str], None], folder: Path = Path("whiteboard")
) -> Session:
    """Ask what is open. `ask` returns a line, and raises EOFError or KeyboardInterrupt if the candidate leaves."""
    total = len(session.items)
    while session.open:
        kind, name = session.open[0]
        begun = time.monotonic()
        say(f"\n[{len(session.done) + 1} of {total}, {time_left(session)}]")
        try:
            outcome = _ASKED[kind](name, ask, say, folder)
        except (EOFError, KeyboardInterrupt, Stop):
            session.used_s += time.monotonic() - begun
            session.save()
            say("\nStopped. Everything so far is kept; `python -m minillm interview` goes on from here.")
            return session
        took = time.monotonic() - begun
        session.used_s += took
        say(f"That took {int(took) // 60}:{int(took) % 60:02}; planned are {planned(kind, name)} minutes.")
        session.done.append([kind, name, outcome])
        session.save()
    say(summary(session))
    return session


def time_left(session: Session, more_s: float = 0.0) -> str:
    """more_s: seconds since the session's own count."""
    left = session.minutes - (session.used_s + more_s) / 60
    return f"{left:.0f} minutes left" if left > 0 else "time is up; q keeps the rest for later"


def planned(kind: str, name: str) -> int:
    """Minutes for an item."""
    return exercises.find(name).minutes if kind == "task" else MINUTES[kind]


def summary(session: Session) -> str:
    """What went well, by kind."""
    lines = [f"\nDone in {session.used_s / 60:.0f} of {session.minutes} minutes."]
    for kind in ("task", "drill", "card"):
        outcomes = [outcome for its, _, outcome in session.done if its == kind]
        if outcomes:
            good = sum(outcome in ("right", "passed", "3", "4") for outcome in outcomes)
            lines.append(f"  {kind}s: {good} of {len(outcomes)} well")
    return "\n".join(lines)


def _task(name: str, ask: Callable[[str], str], say: Callable[[str], None], folder: Path) -> str:
    made = tasks.task(name)
    try:
        path = tasks.write(folder, made)
    except OSError as error:
        raise ValueError(f"--folder {folder} cannot be written ({error.strerror}): name another folder.") from error
    say(f"Whiteboard, {made.minutes} minutes: {name}. Write your answer into {path}.")
    while True:
        reply = _line(ask, "Enter runs the check, s skips: ")
        if reply == "s":
            return "skipped"
        try:
            result = made.judge(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            say(f"{path} cannot be read ({error}): write it again, or s skips.")
            continue
        say(result.said if result.passed else f"Not yet: {result.said}")
        if result.passed:
            return "passed"


def _drill(name: str, ask: Callable[[str], str], say: Callable[[str], None], folder: Path) -> str:
    decision = drills.drill(name)
    say(f"{decision.question} (unit: {decision.unit or 'none'})")
    while (reply := _line(ask, "Your number (s skips): ")) != "s":
        verdict = judge(decision, reply)
        say(verdict.sentence)
        if verdict.kind != "no number":
            say(decision.because)
            return verdict.kind
    say(decision.because)
    return "skipped"


def _card(name: str, ask: Callable[[str], str], say: Callable[[str], None], folder: Path) -> str:
    card = deck.card(name)
    say(f"({card.topic}, {card.level}) {card.question}")
    _line(ask, "Answer aloud, then press Enter: ")
    say(str(card))
    while (reply := _line(ask, f"Grade yourself ({GRADE_HELP}): ")) not in GRADES:
        say(f"{reply!r} is no grade: {GRADE_HELP}; q leaves.")
    say(f"It comes back {when(grade(name, GRADES[reply]))}.")
    return reply


def _line(ask: Callable[[str], str], prompt: str) -> str:
    reply = ask(prompt).strip().lower()
    if reply in ("q", "quit"):
        raise Stop
    return reply


_ASKED: dict[str, Callable[..., Any]] = {"task": _task, "drill": _drill, "card": _card}
