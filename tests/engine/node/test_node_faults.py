"""Faults planted in minillm are caught on the pretended node, and the message names the cause."""

import re

import pytest
import torch

from minillm.comm import Group, RankError, launch
from tests.engine.node.launching import on_node
from tests.engine.node.planted import FAULTS, run_with, said

ALONE = [name for name, fault in FAULTS.items() if fault.alone]
TOGETHER = [name for name in FAULTS if name not in ALONE]


@pytest.fixture(scope="module")
def session_patch():
    """A rank that has raised leaves the other one alone with its collectives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_LIKE_TIMEOUT_S", "6")
        yield patch


@pytest.fixture(scope="module")
def messages(session_patch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Of each rank. One launch for all of them."""
    return launch(on_node(said, keeps_tensors=False), 2, TOGETHER, device="cuda", timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("name", TOGETHER)
def test_a_planted_fault_is_caught(name: str, messages: list[dict[str, str]]) -> None:
    texts = [each[name] for each in messages]
    assert any(re.search(FAULTS[name].message, text) for text in texts), texts


@pytest.mark.full
@pytest.mark.parametrize("name", ALONE)
def test_a_fault_of_one_rank_is_caught(name: str) -> None:
    with pytest.raises(RankError, match=FAULTS[name].message):
        launch(on_node(run_with), 2, FAULTS[name], device="cuda")


def other_order(group: Group) -> None:
    """Two communicators, used in another order on odd ranks. Each alone is used in one order."""
    own = group.subgroup([0, 1], "own")
    x = torch.ones(3, device=group.device)
    calls = [lambda: group.all_reduce(x.clone(), async_op=True), lambda: own.all_gather(x, async_op=True)]
    for work in [call() for call in (calls if group.rank == 0 else reversed(calls))]:
        work.wait()


@pytest.mark.full
def test_communicators_in_another_order(session_patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankError) as caught:
        launch(on_node(other_order), 2, device="cuda")
    text = str(caught.value)
    assert "communicators are used in another order on different ranks" in text
    assert "rank 0 comes to all_reduce" in text and "rank 1 comes to all_gather" in text and "in <lambda>" in text
