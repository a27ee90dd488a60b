"""HTTP beside the engine alone: the same texts from both, an absent peer is said, a wrong text is not timed."""

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed: requirements.txt")
from minillm.api import bench as http
from minillm.api.answers import DONE, event
from minillm.model.generate import folder_of
from minillm.serve.engine import LLM


def test_a_texts_pieces_are_read_from_events_however_they_are_sent():
    events = [event({"choices": [{"text": piece}], "usage": None}) for piece in ("a\r\n", "", "b\n\nc")]
    events += [event({"choices": [], "usage": {"completion_tokens": 3}}), DONE]
    single = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events)
    joined = b"%x\r\n%b\r\n0\r\n\r\n" % (len(b"".join(events)), b"".join(events))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    assert http.text_of(head + single) == http.text_of(head + joined) == "a\r\nb\n\nc"


def test_both_ways_give_the_same_texts_and_what_is_no_answer_is_refused():
    llm = LLM.load(folder_of("target"), **http.ENGINE | {"num_blocks": 64})
    prompts = http.texts(2)
    with http.in_thread(llm) as (server, engine):
        over, without = server.answer(prompts), http.without_http(engine, prompts)
        assert over.texts == without.texts and len(set(over.texts)) == 2
        for each in (over, without):
            assert all(0 < ttft <= each.seconds for ttft in each.ttft)
        with pytest.raises(ValueError, match=r"minillm answered b'HTTP/1\.1 400"):
            http.Server("minillm", server.url, server.asked | {"max_tokens": -1}).answer(prompts[:1])
    assert llm.pool.used == 0


def test_a_server_that_ends_at_its_start_is_told_by_its_last_words():
    with (
        pytest.raises(ValueError, match="theirs ended at its start: no such option"),
        http.process("theirs", [http.sys.executable, "-c", "raise SystemExit('no such option')"], {}),
    ):
        pass


def test_rows_say_that_the_peer_was_not_compared():
    class Ours:
        def answer(self, prompts):
            return http.Answered(list(prompts), [0.01, 0.02], 0.5)

    rows = http.alone(Ours(), ["a", "b"], 5, "it is not installed")
    assert [row.name for row in rows] == ["2 at once: requests", "2 at once: TTFT p50", "2 at once: TTFT p99"]
    assert all(row.correct and row.theirs is None and "not compared: it is not installed" in row.peer for row in rows)
    assert rows[0].ours == 4.0 and "it is not installed" in str(rows[0].cells)


@pytest.mark.full
def test_every_row():
    rows = http.run(streams=(1, 2))
    assert len(rows) == 2 + 2 * 3 and all(row.correct and row.ours > 0 for row in rows)
