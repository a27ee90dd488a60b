"""How often the host waits for its device: once in a training step, to read loss, tokens and norm; once in a decoding
step, to read the tokens. What waits more often says why in the table, and may only get better.

Counted on the pretended node without a ledger (`time_parts=False`): with one, times are read a step later, of events
that are over. Context parallelism runs on Triton's kernels there: test_context_kernels.py sees that nothing is copied.
"""

import pytest

from minillm.comm import launch
from minillm.train.parallel_config import ParallelConfig
from tests.engine.budgets.waiting import EXPERTS, decoding_waits, training_waits
from tests.engine.node.launching import on_node

ONE = {"one GPU": ParallelConfig()}
TWO = {
    **{f"data parallel, ZeRO {zero}": ParallelConfig(dp=2, zero=zero, accumulate=2) for zero in range(4)},
    "tensor": ParallelConfig(tp=2),
    "tensor, sequence": ParallelConfig(tp=2, sequence=True),
    "pipeline": ParallelConfig(pp=2, accumulate=4),
    "experts": ParallelConfig(dp=2, ep=2),
}
MOST = 1
# Above that: every layer's dispatch learns how many rows come, in all and for each expert (documented).
MORE = {"experts": EXPERTS.num_layers}


@pytest.mark.parametrize("layouts", [pytest.param(ONE, id="one"), pytest.param(TWO, id="two", marks=pytest.mark.full)])
def test_a_training_step_waits_once(layouts):
    world_size = max(layout.world_size for layout in layouts.values())
    for found in launch(on_node(training_waits), world_size, layouts, device="cuda", timeout=200):
        assert found.keys() == layouts.keys()
        for name, waits in found.items():
            assert sum(waits.values()) <= MOST + MORE.get(name, 0), f"{name}: {dict(waits)}"


PARAMS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k and top-p": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "penalty": {"temperature": 0.8, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_decoding_step_waits_once(name):
    waits = decoding_waits(3, **PARAMS[name])
    assert sum(waits.values()) <= MOST, dict(waits)
