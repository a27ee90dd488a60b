"""The flight recorder: what is posted can be read, by others, at any moment, and never half."""

import os
import time

import pytest

from minillm.comm import launch
from minillm.comm.diagnostics.flight_recorder import FINISHED, RECORDS, RUNNING, FlightRecorder, describe
from minillm.comm.diagnostics.hang_report import hang_report


def text(op: str = "all_reduce", shape=(4,), ranks=(0, 1), name="world", peers=None) -> bytes:
    return describe(op, list(shape), "float32", list(ranks), name, peers)


def test_post_read_clear(tmp_path) -> None:
    mine, theirs = FlightRecorder(tmp_path / "board", range(2)), FlightRecorder(tmp_path / "board", range(2))
    assert theirs.state(1) == (0, 0, 0.0) and theirs.posted(1) == []
    mine.set_state(1, RUNNING)
    before = time.monotonic()
    mine.post(1, 2, 7, text())
    posted = theirs.posted_in(1, 2)
    assert (posted.ordinal, posted.sequence, posted.waiting, posted.name) == (2, 7, True, "world")
    assert posted.signature == ("all_reduce", [4], "float32") and str(posted) == "all_reduce [4] float32"
    assert before <= posted.since <= time.monotonic()
    assert theirs.signs(1)[1] == posted.since
    assert theirs.state(1)[:2] == (os.getpid(), RUNNING)
    mine.clear(1, 2)
    assert theirs.signs(1)[1] is None and not theirs.posted_in(1, 2).waiting
    assert theirs.signs(1)[0] >= posted.since
    assert theirs.posted_in(1, 4) is None and theirs.posted(0) == []
    mine.close()


def test_conflict_is_about_the_same_operation_only(tmp_path) -> None:
    board = FlightRecorder(tmp_path / "board", range(2))
    board.post(0, 2, 5, text())
    assert board.conflict([0], 2, 5, text()) is None
    assert str(board.conflict([1, 0], 2, 5, text(shape=(8,)))[1]) == "all_reduce [4] float32"
    assert board.conflict([0], 2, 4, text(shape=(8,))) is None  # rank 0 is further on
    assert board.conflict([0], 2, 6, text(shape=(8,))) is None  # rank 0 is not there yet
    assert board.conflict([0], 4, 5, text(shape=(8,))) is None  # another group
    assert board.conflict([1], 2, 5, text(shape=(8,))) is None  # a rank that posted nothing


def test_text_always_fits(tmp_path) -> None:
    """The longest that a record has to hold can still be read back."""
    board, longest = FlightRecorder(tmp_path / "board", range(64)), list(range(64))
    raw = describe("o" * 100, [10**9] * 30, "complex128", longest, "名" * 100, longest)
    board.post(63, 2, 1, raw)
    assert board.posted_in(63, 2).ranks == longest and board.conflict([63], 2, 1, raw) is None
    assert board.conflict([63], 2, 1, text()) is not None


def test_more_groups_than_records(tmp_path) -> None:
    """Groups share records then: the newest is seen, an older one does not disturb it."""
    board = FlightRecorder(tmp_path / "board", range(1))
    for group in range(1, RECORDS):  # two ordinals per group
        board.post(0, 2 * group, 1, text(name=f"group{group}"))
    assert len(board.posted(0)) == RECORDS // 2
    newest = board.posted_in(0, 2 * (RECORDS - 1))
    assert newest.name == f"group{RECORDS - 1}"
    shared = 2 * (RECORDS - 1) - RECORDS  # an older group in the same record
    assert board.posted_in(0, shared) is None and board.conflict([0], shared, 1, text(shape=(9,))) is None
    board.clear(0, shared)
    assert board.posted_in(0, 2 * (RECORDS - 1)).waiting
    board.clear(0, 2 * (RECORDS - 1))
    assert not board.posted_in(0, 2 * (RECORDS - 1)).waiting


def test_notes_between_two_ranks(tmp_path) -> None:
    board = FlightRecorder(tmp_path / "board", range(3))
    assert board.note_message(0, 1, True, 2, 1, b"4 float32") is None
    assert board.note_message(1, 0, False, 2, 1, b"8 float32") == b"4 float32"
    assert board.note_message(0, 1, True, 2, 1, b"4 float32") == b"8 float32"
    assert board.note_message(1, 0, True, 2, 1, b"9 int8") is None  # the other direction
    assert board.note_message(2, 0, False, 2, 1, b"9 int8") is None  # another pair
    assert board.note_message(1, 0, False, 2, 2, b"8 float32") is None  # another message
    assert board.note_message(0, 1, True, 4, 2, b"8 float32") is None  # another group
    assert len(board.note_message(1, 0, False, 4, 2, b"z" * 1000)) == 9


def test_first_rank_of_a_node(tmp_path) -> None:
    board = FlightRecorder(tmp_path / "board", [4, 5])
    assert [board.has(rank) for rank in (3, 4, 5, 6)] == [False, True, True, False]
    board.post(5, 2, 1, text(ranks=(4, 5, 6)))
    board.set_state(5, RUNNING)
    board.set_state(4, FINISHED)
    table = hang_report(board).splitlines()
    assert table[2].startswith("4     finished") and table[3].endswith("rank 4")  # rank 6 is on another node: unknown


def hammer(group, path, count):
    """Rank 0 posts and notes as fast as it can; rank 1 reads all the time: what it sees is whole, or nothing."""
    board, seen = FlightRecorder(path, range(2)), 0
    texts = [text(shape=(k,) * 7, ranks=range(50), name="n" * k) for k in range(1, 9)]
    notes = [b"%d float32 in " % k + b"x" * k for k in range(60)]
    if group.rank == 0:
        board.set_state(0, RUNNING)
    group.barrier()
    if group.rank == 0:
        for i in range(1, count + 1):
            board.post(0, 2, i, texts[i % 8])
            board.note_message(0, 1, True, 2, i, notes[i % 60])
            board.clear(0, 2)
            board.set_state(0, RUNNING)
        board.set_state(0, FINISHED)
        return []
    wrong, begin = [], time.monotonic()
    while board.state(0)[1] != FINISHED:
        posted = board.posted_in(0, 2)
        if posted is None:
            continue
        seen += 1
        i = posted.sequence
        if posted.shape != [i % 8 + 1] * 7:
            wrong.append(("record", posted))
        for j in range(i, i + 30):
            if board.conflict([0], 2, j, texts[j % 8]):
                wrong.append(("conflict", j))
            note = board.note_message(1, 0, False, 2, j, b"")
            if note not in (None, notes[j % 60]):
                wrong.append(("note", j, note))
        sign, wait = board.signs(0)
        if not begin - 60 < sign <= time.monotonic() or not (wait is None or begin - 60 < wait):
            wrong.append(("sign", sign, wait))
        if board.state(0)[0] == 0 or not begin - 60 < board.state(0)[2]:
            wrong.append(("state", board.state(0)))
    return [seen > 0, *wrong[:5]]


def test_a_reader_never_sees_half_a_text(tmp_path) -> None:
    assert launch(hammer, 2, str(tmp_path / "board"), 40_000)[1] == [True]


def test_no_room_for_the_board_is_one_sentence(monkeypatch):
    """As on a full /dev/shm or temp folder; the file itself is not left behind."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ValueError, match=r"no room for [\d,]+ bytes in .*: free some space, or set TMPDIR to another one"
    ):
        launch(print, 2)
