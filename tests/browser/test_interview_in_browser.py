"""Three rounds of the mock interview in JupyterLab's terminal, from the command to the summary, seen in Chromium.

The screenshots under test-artifacts/ show every item as a candidate has it.
"""

import json
import re
import shutil
import time

import pytest

from course.lab24_interview import session as sessions
from tests.browser.jupyterlab import REPO, STEP_S, choose, marks, opened, serving, shoot
from tests.browser.test_first_hour import listen
from tests.course.labs import test_interview_terminal as rounds

LAB = "24_interview"
pytestmark = marks


class Terminal:
    """The terminal that is in front on a page. printed: frames of its socket, a list that grows."""

    def __init__(self, page, printed, board, name):
        self.page, self.printed, self.board, self.name = page, printed, board, name
        self.read, self.shots = len(printed), 0

    def prompt(self) -> str:
        """What is asked next; "" once the session's summary stands there."""
        deadline = time.monotonic() + 4 * STEP_S
        while True:
            text = self.unread()
            if found := rounds.PROMPT.search(text):
                break
            if re.search(r"Done in \d+ of \d+ minutes\.\n(  .* well\n)+", text):
                break
            assert time.monotonic() < deadline, f"no prompt after:\n{text[-600:]}"
            self.page.wait_for_timeout(100)
        self.page.wait_for_timeout(300)  # until it is drawn
        self.shots += 1
        shoot(self.page, "interview", f"{self.name}-{self.shots:02}")
        self.read = len(self.printed)
        return found[0] if found else ""

    def unread(self) -> str:
        parts = (json.loads(frame) for frame in self.printed[self.read :])
        text = "".join(str(part[1]) for part in parts if part[0] == "stdout")
        return re.sub(r"\x1b\[[\d;?]*\w", "", text).replace("\r", "")

    def reply(self, text: str) -> None:
        self.page.keyboard.type(f"{text}\n")


@pytest.fixture
def home(tmp_path):
    for path in (f"labs/{LAB}.ipynb", f"course/lab{LAB}/notebook.py"):
        (tmp_path / "course" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / path, tmp_path / "course" / path)
    return tmp_path / "course"


@pytest.mark.parametrize(("round", "minutes", "topic"), rounds.ROUNDS)
def test_a_round_is_taken_to_its_end(home, tmp_path, monkeypatch, round, minutes, topic):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "mine.json"))
    asked = sessions.start(topic, minutes, rounds.SEED, round).items
    with serving(home, LAB, tmp_path) as address, opened(address, 1280, 860) as page:
        complaints, printed = listen(page)
        choose(page, "File", "New", "Terminal")
        page.locator(".jp-Terminal .xterm-helper-textarea").wait_for()
        page.locator(".jp-Terminal").click()
        board = tmp_path / "board"
        command = " ".join(rounds.arguments(round, minutes, topic))
        page.keyboard.type(f"clear; python -m minillm interview {command} --folder {board}\n")
        rounds.answer(Terminal(page, printed, board, round), asked)
        assert not complaints, "\n".join(complaints)
    kept = json.loads((tmp_path / "progress.json").read_text())["interview"]
    assert not kept["sessions"] and sum(count for _, count in kept["results"].values()) >= len(
        [kind for kind, _ in asked if kind != "card"]
    )
