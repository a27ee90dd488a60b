"""One rank reads the flight recorder while another writes it: whoever comes in between, nobody sees half an entry."""

import contextlib

import pytest

from minillm.comm.diagnostics.flight_recorder import FlightRecorder, describe

SENDING, GROUP = True, 2
LONG = describe("all_reduce", [1024, 1024], "float32", [0, 1], "world")
SHORT = describe("barrier", [0], "float32", [0, 1], "world")
LONG_NOTE, SHORT_NOTE = b"[1000000] float32", b"[1] float32"


class SharedMemory:
    """After each access somebody else gets a turn."""

    def __init__(self, memory):
        self._memory, self.turn = memory, None

    def __getitem__(self, place):
        data = self._memory[place]
        self._give_way()
        return data

    def __setitem__(self, place, data):
        self._memory[place] = data
        self._give_way()

    def _give_way(self):
        if self.turn:
            self.turn()

    def close(self):
        self._memory.close()


class Interrupted(FlightRecorder):
    def __init__(self, path, ranks):
        super().__init__(path, ranks)
        self._map = SharedMemory(self._map)

    @contextlib.contextmanager
    def by(self, turn):
        self._map.turn = turn
        yield
        self._map.turn = None


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
    assert reader.conflict([1], GROUP, 7, SHORT)[1].op == "all_reduce"  # a true conflict is seen

    def go_on():
        writer.post(1, GROUP, 8, SHORT)
        writer.note_message(1, 0, SENDING, GROUP, 8, SHORT_NOTE)

    with reader.by(go_on):
        assert reader.conflict([1], GROUP, 7, LONG) is None
        assert reader.posted_in(1, GROUP).op == "barrier"
        assert reader.note_message(0, 1, not SENDING, GROUP, 7, LONG_NOTE) is None


def test_reader_looks_while_it_is_written(boards):
    reader, writer = boards
    seen = []

    def look():
        assert reader.conflict([1], GROUP, 7, LONG) is None
        assert reader.conflict([1], GROUP, 8, SHORT) is None
        assert reader.note_message(0, 1, not SENDING, GROUP, 7, b"") in (None, LONG_NOTE)
        theirs = reader.note_message(0, 1, not SENDING, GROUP, 8, b"")
        assert theirs in (None, SHORT_NOTE)
        posted = reader.posted_in(1, GROUP)
        seen.append((posted and posted.op, theirs))

    with writer.by(look):
        writer.post(1, GROUP, 8, SHORT)
        writer.note_message(1, 0, SENDING, GROUP, 8, SHORT_NOTE)
    assert (None, None) in seen and seen[-1] == ("barrier", SHORT_NOTE)
