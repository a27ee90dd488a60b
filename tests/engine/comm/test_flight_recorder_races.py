"""One rank reads the flight recorder while another writes it: whoever comes in between, nobody sees half an entry."""

import contextlib

import pytest

from minillm.comm.diagnostics.flight_recorder import FlightRecorder, describe

SENDING, GROUP = True, 2
LONG = describe("all_reduce", [1024, 1024], "float32", [0, 1], "world")
SHORT = describe("barrier", [0], "float32", [0, 1], "world")
LONG_NOTE, SHORT_NOTE = "[1000000] float32", "[1] float32"


class Interrupted(FlightRecorder):
    """After each of its accesses to the shared memory somebody else gets a turn."""

    turn = None

    @contextlib.contextmanager
    def by(self, turn):
        self.turn = turn
        yield
        self.turn = None

    def _then(self, result):
        if self.turn:
            self.turn()
        return result

    def _put(self, at, data):
        return self._then(super()._put(at, data))

    def _get(self, at, layout):
        return self._then(super()._get(at, layout))


@pytest.fixture
def boards(tmp_path):
    reader, writer = Interrupted(tmp_path / "board", range(2)), Interrupted(tmp_path / "board", range(2))
    writer.post(1, GROUP, 7, LONG)
    writer.note_message(1, 0, SENDING, GROUP, 7, LONG_NOTE)
    yield reader, writer
    reader.close()
    writer.close()


def test_writer_goes_on_while_it_is_read(boards):
    reader, writer = boards
    assert reader.conflict(1, GROUP, 7, SHORT).op == "all_reduce"  # a true conflict is seen

    def go_on():
        writer.post(1, GROUP, 8, SHORT)
        writer.note_message(1, 0, SENDING, GROUP, 8, SHORT_NOTE)

    with reader.by(go_on):
        assert reader.conflict(1, GROUP, 7, LONG) is None
        assert reader.posted_in(1, GROUP).op == "barrier"
        assert reader.note_message(0, 1, not SENDING, GROUP, 7, LONG_NOTE) is None


def test_reader_looks_while_it_is_written(boards):
    reader, writer = boards
    seen = []

    def look():
        assert reader.conflict(1, GROUP, 7, LONG) is None
        assert reader.conflict(1, GROUP, 8, SHORT) is None
        assert reader.note_message(0, 1, not SENDING, GROUP, 7, "") in (None, LONG_NOTE)
        theirs = reader.note_message(0, 1, not SENDING, GROUP, 8, "")
        assert theirs in (None, SHORT_NOTE)
        posted = reader.posted_in(1, GROUP)
        seen.append((posted and posted.op, theirs))

    with writer.by(look):
        writer.post(1, GROUP, 8, SHORT)
        writer.note_message(1, 0, SENDING, GROUP, 8, SHORT_NOTE)
    assert (None, None) in seen and seen[-1] == ("barrier", SHORT_NOTE)
