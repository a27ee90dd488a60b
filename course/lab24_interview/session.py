"""A session of the mock interview: what it asks, how far it is, and where it is kept.

Open sessions lie in the progress file, in the section "interview", the latest last. Each has a key of its own, so one
that is drawn again never takes the place of another.
"""

import random
import secrets
from dataclasses import dataclass, field

from course.kit import progress
from course.lab24_interview import deck, rounds
from course.lab24_interview.spacing import SECTION


@dataclass
class Session:
    """items: (kind, name) in the order asked; done: (kind, name, outcome) of those answered; used_s: seconds so far.

    begun: names of tasks and bugs whose file was written for this session. kept: False for a trial, which leaves
    nothing behind.
    """

    seed: int
    topic: str
    minutes: int
    items: list[list[str]]
    done: list[list[str]] = field(default_factory=list)
    used_s: float = 0.0
    round: str = "mixed"
    level: str = ""
    begun: list[str] = field(default_factory=list)
    key: str = ""
    kept: bool = True

    def __post_init__(self) -> None:
        self.key = self.key or f"{self.seed}-{self.minutes}-{self.topic}"  # of a record that is older than keys

    @property
    def open(self) -> list[list[str]]:
        return self.items[len(self.done) :]

    @property
    def about(self) -> str:
        """In words: round, level, topic, minutes, how far."""
        parts = [f"{self.round} round" if self.round != "loop" else "loop", self.level, self.topic or "all topics"]
        return f"{', '.join(filter(None, parts))}, {self.minutes} minutes, {len(self.done)} of {len(self.items)} done"

    def save(self) -> None:
        """As the latest of the open sessions; one that is done is none of them any more."""
        if self.kept:
            _keep([each for each in open_sessions() if each.key != self.key] + ([self] if self.open else []))


def start(
    topic: str = "",
    minutes: int = 45,
    seed: int | None = None,
    round: str = "mixed",
    level: str = "",
    *,
    kept: bool = True,
) -> Session:
    """A new session; others that are open stay so. ValueError for what there is not, or too little time."""
    rounds.check(round, minutes, level)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    topic = deck.topic_named(topic)
    items = rounds.items(round, topic, minutes, level, random.Random(seed))
    if not items:
        raise ValueError(f"--round {round} has nothing on {topic}: leave out --topic, or take another round.")
    made = Session(seed, topic, minutes, items, round=round, level=level, key=secrets.token_hex(4), kept=kept)
    made.save()
    return made


def resume(topic: str = "", seed: int | None = None, round: str = "", level: str = "") -> Session | None:
    """The latest session that was interrupted, of this topic, seed, round and level where they are given."""
    sessions = matching(topic, seed, round, level)
    return sessions[-1] if sessions else None


def extend(session: Session, minutes: int) -> None:
    """Give a session so many minutes from now, and more to ask if that is more than what is left of it."""
    rounds.check(session.round, minutes, session.level, resumed=True)
    left = minutes - sum(rounds.planned(*item) for item in session.open)
    asked = {(kind, name) for kind, name in session.items}
    draw = random.Random(f"{session.seed} {len(session.items)}")
    if left >= rounds.MINUTES["card"]:
        session.items += rounds.items(session.round, session.topic, left, session.level, draw, asked)
    session.minutes = minutes + round(session.used_s / 60)
    session.save()


def discard(topic: str = "", seed: int | None = None, round: str = "", level: str = "") -> Session | None:
    """Forget the session that `resume` would go on with; grades of its cards stay. None if there is none."""
    session = resume(topic, seed, round, level)
    if session:
        _keep([each for each in open_sessions() if each.key != session.key])
    return session


def matching(topic: str = "", seed: int | None = None, round: str = "", level: str = "") -> list[Session]:
    """Open sessions of this topic, seed, round and level where they are given, the latest last."""
    topic = deck.topic_named(topic)
    return [
        each
        for each in open_sessions()
        if topic in ("", each.topic)
        and seed in (None, each.seed)
        and round in ("", each.round)
        and level in ("", each.level)
    ]


def open_sessions() -> list[Session]:
    """Those with something left to ask, the latest last; a damaged record, or one of a topic that there is no longer,
    counts as none."""
    sessions: list[Session] = []
    records = progress.section(SECTION).get("sessions")
    for record in records if isinstance(records, list) else []:
        try:
            session = Session(**record)
            deck.of_topic(session.topic)
            if session.open and all(rounds.exists(kind, name) for kind, name in session.open):
                sessions.append(session)
        except (TypeError, ValueError, AttributeError):
            continue
    return sessions


def _keep(sessions: list[Session]) -> None:
    progress.keep(SECTION, progress.section(SECTION) | {"sessions": [each.__dict__ for each in sessions]})
