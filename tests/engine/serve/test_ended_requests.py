"""A request that has ended is held by nobody, however long it might have taken."""

import gc
import weakref

from minillm.model.generate import folder_of
from minillm.serve import LLM, SamplingParams
from minillm.serve.requests.table import FEW


def test_a_request_with_a_timeout_is_let_go_when_it_ends():
    """But for the few whose row in the block tables nobody has taken over."""
    llm, alive = LLM.load(folder_of("draft"), num_blocks=64, max_num_seqs=4), weakref.WeakSet()
    for number in range(3 * FEW):
        llm.add([5, 6, number], SamplingParams(max_tokens=1, ignore_eos=True), timeout_s=600.0)
        alive.update(llm.requests.arrived.values())
        while llm.unfinished:
            llm.step()
    gc.collect()
    assert len(alive) <= FEW + 8


def test_a_timeout_still_ends_its_request_after_many_have_ended():
    now = [0.0]
    llm = LLM.load(folder_of("draft"), num_blocks=64, clock=lambda: now[0])
    late = llm.add([5, 6], SamplingParams(max_tokens=200, ignore_eos=True), timeout_s=50.0)
    later = llm.add([5, 7], SamplingParams(max_tokens=200, ignore_eos=True), timeout_s=60.0)
    for number in range(2 * FEW):
        llm.add([5, 6, number], SamplingParams(max_tokens=1, ignore_eos=True), timeout_s=600.0)
        llm.step(), llm.step()
    now[0] = 55.0
    ended = {output.request_id: output.answers[0].reason for output in (*llm.step(), *llm.step())}
    assert ended == {late: "timeout"} and later not in ended and llm.unfinished == 1
