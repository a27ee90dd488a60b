"""Both pools on the backend that keeps NCCL's rules: threads hand keys over, and none of them touches a group."""

import pytest

from minillm.comm import launch
from minillm.serve.transfer import pool as module
from tests.engine.comm.nccl_like import on_nccl_like
from tests.engine.serve.transfer.pools import driven, pool_of
from tests.engine.serve.transfer.test_transfer_proof import CASES, OVER_RANKS, expected, hold_to


@pytest.mark.parametrize(
    ("prefill", "decode", "names"),
    [
        (2, 2, ("ahead-swapped",)),
        *(pytest.param(*each, OVER_RANKS, marks=pytest.mark.full) for each in [(1, 2), (2, 1), (4, 2), (2, 4)]),
    ],
)
def test_tokens_by_the_rules_of_nccl(prefill, decode, names, monkeypatch):
    monkeypatch.setattr(module, "_serve", on_nccl_like(module._serve))
    with pool_of(ranks=prefill) as pool:
        found = launch(on_nccl_like(driven), decode, pool.at, [(name, CASES[name]) for name in names], timeout=600)[0]
        assert pool.starts == 1
    for name in names:
        hold_to(found[name], expected("plain"), name, copies=max(1, decode // 2))
