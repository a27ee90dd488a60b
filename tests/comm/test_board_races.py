"""One rank reads the notice board while another writes it: whoever comes in between, nobody sees half an entry."""

import pytest

from minillm.comm import board as module
from minillm.comm.board import Board, describe

SENDING, GROUP = True, 2
LONG = describe("all_reduce", [1024, 1024], "float32", [0, 1], "world")
SHORT = describe("barrier", [0], "float32", [0, 1], "world")


class Interrupted:
    """A struct after each use of which somebody else gets a turn."""

    def __init__(self, struct, turn):
        self.struct, self.turn, self.size = struct, turn, struct.size

    def pack_into(self, *args):
        self.struct.pack_into(*args)
        self.turn()

    def unpack_from(self, *args):
        found = self.struct.unpack_from(*args)
        self.turn()
        return found


@pytest.fixture
def boards(tmp_path):
    two = Board(tmp_path / "board", 2), Board(tmp_path / "board", 2)
    yield two
    for board in two:
        board.close()


@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(turn): from now on `turn` runs after each access to a record or note, but not inside itself."""
    plain = {name: getattr(module, name) for name in ("_RECORD", "_NOTE", "_NUMBER")}

    def start(turn):
        def once():
            with monkeypatch.context() as inside:
                for name, struct in plain.items():
                    inside.setattr(module, name, struct)
                turn()

        for name, struct in plain.items():
            monkeypatch.setattr(module, name, Interrupted(struct, once))

    return start


def test_writer_goes_on_while_it_is_read(boards, interrupt):
    reader, writer = boards
    writer.post(1, GROUP, 7, LONG)
    writer.note_message(1, 0, SENDING, GROUP, 7, "[1000000] float32")
    assert reader.conflict(1, GROUP, 7, SHORT).op == "all_reduce"  # a true conflict is seen

    def go_on():
        writer.post(1, GROUP, 8, SHORT)
        writer.note_message(1, 0, SENDING, GROUP, 8, "[1] float32")

    interrupt(go_on)
    assert reader.conflict(1, GROUP, 7, LONG) is None
    assert reader.posted_in(1, GROUP).op == "barrier"
    writer.post(1, GROUP, 7, LONG)
    assert reader.note_message(0, 1, not SENDING, GROUP, 7, "[1000000] float32") is None


def test_reader_looks_while_it_is_written(boards, interrupt):
    reader, writer = boards
    writer.post(1, GROUP, 7, LONG)
    writer.note_message(1, 0, SENDING, GROUP, 7, "[1000000] float32")
    seen = []

    def look():
        assert reader.conflict(1, GROUP, 7, LONG) is None
        assert reader.conflict(1, GROUP, 8, SHORT) is None
        assert reader.note_message(0, 1, not SENDING, GROUP, 7, "") in (None, "[1000000] float32")
        theirs = reader.note_message(0, 1, not SENDING, GROUP, 8, "")
        assert theirs in (None, "[1] float32")
        posted = reader.posted_in(1, GROUP)
        seen.append((posted and posted.op, theirs))

    interrupt(look)
    writer.post(1, GROUP, 8, SHORT)
    writer.note_message(1, 0, SENDING, GROUP, 8, "[1] float32")
    assert (None, None) in seen and seen[-1] == ("barrier", "[1] float32")
