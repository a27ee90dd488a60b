"""A coding, a debugging and a design round in a real terminal, from the command to the summary."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from course.lab24_interview import bugs, designs, mock, readings, rounds
from course.lab24_interview import session as sessions
from tests.course.labs.test_interview_rounds import solved

ROOT = Path(__file__).parents[3]
PATIENCE_S, COLUMNS = 180, 100
PROMPT = re.compile(r"\[\d+:\d\d (?:left|over)\] [^\n]*?: $")


class Terminal:
    """`python -m minillm interview` in a pseudo-terminal of 100 columns; seen: all that it has shown."""

    def __init__(self, folder: Path, *arguments: str):
        self.board, self.seen = folder / "board", ""
        self.controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        variables = os.environ | {"MINILLM_PROGRESS": str(folder / "progress.json"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "minillm", "interview", *arguments, "--folder", str(self.board)]
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=variables
        )
        os.close(terminal)

    def prompt(self) -> str:
        """What is asked next; "" once the session is over."""
        unread = ""
        while not PROMPT.search(unread):
            assert select.select([self.controller], [], [], PATIENCE_S)[0], f"no prompt after {unread[-400:]!r}"
            try:
                unread += os.read(self.controller, 65536).decode(errors="replace").replace("\r", "")
            except OSError:  # the other end is closed
                break
        self.seen += unread
        found = PROMPT.search(unread)
        return found[0] if found else ""

    def reply(self, text: str) -> None:
        os.write(self.controller, f"{text}\n".encode())

    def close(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.send_signal(signal.SIGKILL)
            os.close(self.controller)


ROUNDS = (("coding", 32, "memory"), ("debugging", 30, "debugging"), ("design", 35, "planning"))
SEED = 5


def arguments(round: str, minutes: int, topic: str) -> list[str]:
    return ["--round", round, "--minutes", str(minutes), "--seed", str(SEED), "--topic", topic]


def answer(terminal, asked: list[list[str]]) -> None:
    """Every prompt, to the end. Tasks are first run as they are handed out, then solved; numbers are right.

    terminal: has `prompt()`, `reply(text)` and `board`, the folder of the tasks.
    """
    numbers, tried = [decision for kind, name in asked for decision in decisions(kind, name)], set()
    while prompt := terminal.prompt():
        reply = ""
        if "runs the check" in prompt:
            path = max(terminal.board.glob("*.py"), key=lambda each: each.stat().st_mtime_ns)
            if path in tried:
                path.write_text(solved(path.stem, path.read_text()))
            tried.add(path)
        elif "Your number" in prompt:
            reply = f"{numbers.pop(0).value:.9g}"
        elif "true, false" in prompt:
            reply = "depends"
        elif "Grade yourself" in prompt:
            reply = "3"
        terminal.reply(reply)
    assert not numbers


def decisions(kind, name):
    if kind == "design":
        return list(designs.design(name).decisions.values())
    if kind == "drill":
        return [rounds.drills.drill(name)]
    return readings.reading(name).decisions if kind == "reading" else []


@pytest.mark.full
@pytest.mark.parametrize(("round", "minutes", "topic"), ROUNDS)
def test_a_round_is_taken_to_its_end(tmp_path, monkeypatch, round, minutes, topic):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "mine.json"))
    asked = sessions.start(topic, minutes, SEED, round).items  # what the same seed draws
    terminal = Terminal(tmp_path, *arguments(round, minutes, topic))
    try:
        answer(terminal, asked)
    finally:
        status = terminal.close()
    seen = terminal.seen
    assert status == 0
    kinds = [kind for kind, _ in asked]
    assert kinds[0] == {"coding": "task", "debugging": "bug", "design": "design"}[round]
    assert ("reading" in kinds) == (round == "debugging")
    for place in range(len(asked)):
        assert f"[{place + 1} of {len(asked)}] " in seen
    assert seen.count("Not yet: ") == seen.count("\npassed") == sum(kind in ("task", "bug") for kind in kinds)
    for kind, name in asked:
        if kind == "bug":
            assert plain(bugs.explained(name)) in plain(seen)
        if kind in ("reading", "drill", "design"):
            assert all(plain(mock.asked(decision)) in plain(seen) for decision in decisions(kind, name))
    for kind in ("task", "bug", "reading", "design", "drill"):
        if kind in kinds:
            assert f"{kind}s: {kinds.count(kind)} of {kinds.count(kind)} well" in seen
    assert "Done in " in seen and "Traceback" not in seen
    wide = [line for line in seen.split("\n") if len(line) > COLUMNS and len(line.split()) > 1]  # a path is not folded
    assert not wide, f"wider than the terminal: {wide[:3]}"


def plain(text):
    return re.sub(r"\s+", " ", text)
