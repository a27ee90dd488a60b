"""Over ranks of the pretended node: the same tokens, and no rank waits for its device but rank 0, once a step."""

from collections import Counter

import pytest

from minillm.comm import launch
from minillm.model.paged import gathered
from minillm.serve import over_ranks
from minillm.serve.ranks.runner import RankRunner
from tests.engine.node import streams
from tests.engine.node.launching import on_node
from tests.engine.serve.ranks.programs import TIGHT, alone, model_of, requests_of

OF_THE_BACKEND = ("gather.py:prepare",)  # the backend for CPUs; a GPU's is Triton's, which makes no copy of its own
KERNELS = {"backend": gathered, "fused": False, "graphs": False, "warm_up": False}


def waits(node):
    return Counter(each.kind for each in node.counting.waits if not each.site.is_within(OF_THE_BACKEND))


def decoding(group, requests, options):
    """(answers and the waits of each step on rank 0; the waits of a rank that follows)."""
    node, of_steps, follow = streams.NODE, [], RankRunner.follow
    RankRunner.follow = lambda runner: (node.counting.clear(), follow(runner))

    def use(llm):
        for number, (prompt, params) in enumerate(requests):
            llm.add(prompt, params, request_id=str(number))
        outputs = {}
        while llm.unfinished:
            before = waits(node)
            outputs |= {output.request_id: [answer.ids for answer in output.answers] for output in llm.step()}
            of_steps.append(waits(node) - before)
        return [outputs[str(number)] for number in range(len(requests))]

    model = model_of("plain").to(group.device)
    answers = over_ranks(group, model, use, **TIGHT, **KERNELS, **options)
    return answers, of_steps, waits(node)


@pytest.mark.full
def test_of_two_stages_the_first_waits_for_no_device_and_the_last_once_a_step():
    requests = [each for each in requests_of(6, 9) if not each[1].first_tokens]
    (answers, of_steps, _), (_, _, of_last) = launch(on_node(decoding), 2, requests, {"pp": 2}, device=None)
    assert answers == alone(model_of("plain"), requests)
    assert not sum(of_steps, Counter()), of_steps
    assert of_last.total() <= len(of_steps), of_last


@pytest.mark.full
def test_only_rank_0_waits_for_its_device_and_once_a_step():
    requests = [each for each in requests_of(6, 9) if not each[1].first_tokens]
    options = {"async_scheduling": True}
    (answers, of_steps, _), (_, _, of_follower) = launch(on_node(decoding), 2, requests, options, device=None)
    assert answers == alone(model_of("plain"), requests)
    assert max(each.total() for each in of_steps) <= 1, of_steps
    assert not of_follower, of_follower
