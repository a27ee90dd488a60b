"""What a step sends and tells is what `predict.serving.ranks` says, to the byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.comm import launch
from minillm.predict import comms
from minillm.predict.serving.ranks import FIRST, HEAD, message_bytes, sent_bytes, step_calls, step_numbers
from minillm.serve import SamplingParams
from minillm.serve.ranks import message
from minillm.serve.ranks.message import from_numbers, to_numbers
from minillm.serve.run.penalties import Penalties
from minillm.serve.run.step_inputs import SamplingInputs, StepInputs
from tests.engine.serve.ranks.programs import CONFIG, traffic

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], list(range(20)), [10]]


@pytest.mark.parametrize(
    ("tp", "params", "options"),
    [
        (2, SamplingParams(8), {}),
        (4, SamplingParams(8, temperature=0.9, seed=1), {}),
        (2, [SamplingParams(8), SamplingParams(8, temperature=0.9, seed=1, n=3)] * 2, {"chunk": 7}),
        pytest.param(2, SamplingParams(8), {"proposer": "ngram", "k": 2}, marks=pytest.mark.full),
    ],
)
def test_bytes_and_calls_are_as_predicted(tp, params, options):
    ranks = launch(traffic, tp, PROMPTS, params, options)
    _, (steps, records, _) = ranks[0]
    for rank, (found, _) in enumerate(ranks):
        agreed = comms.ring_all_reduce(1, 8, tp).sent_per_rank[rank]  # on blocks, here and on the host
        reduces, gathers = [2, 2 * agreed], [0, 0]
        for step in steps:
            rows, whole = len(step.wanted), whole_of(step)
            calls = step_calls(CONFIG, tp, len(step.tokens), whole=whole, likeliest=rows - whole)
            for op, sums in (("all_reduce", reduces), ("all_gather", gathers)):
                mine = [call for call in calls if call.op == op]
                sums[0] += sum(call.count for call in mine)
                sums[1] += sent_bytes(mine, tp, rank)
        assert found["all_reduce"] == tuple(reduces) and found["all_gather"] == tuple(gathers)
        told = [message_bytes(len(to_numbers(step))) for step in steps] + [message_bytes(0)]  # and the end
        assert found["send"] == ((len(told), sum(told) * (tp - 1)) if rank == 0 else (0, 0))
        assert found["recv"][0] == (0 if rank == 0 else len(told))
    assert len(steps) == len(records)


def whole_of(step):
    """Rows of which more than the likeliest token is read, counted one by one."""
    rows = set()
    for token in range(step.sampling.count if step.sampling is not None and not step.sampling.greedy_only else 0):
        if step.sampling.temperature[token] > 0:
            rows.add(token if step.sampling.logits_rows is None else int(step.sampling.logits_rows[token]))
    return len(rows)


def test_numbers_of_a_step_are_as_predicted():
    params = [SamplingParams(6), SamplingParams(6, temperature=0.9, seed=1)]
    for chosen in (params[0], params[1], [params[0], params[1]] * 2):
        _, (steps, _, _) = launch(traffic, 1, PROMPTS, chosen, {})[0]
        for step in steps:
            sampled = 0 if step.sampling is None or step.sampling.greedy_only else step.sampling.count
            sizes = len(step.starts), len(step.tokens), len(step.wanted)
            assert len(to_numbers(step)) == step_numbers(*sizes, changed=len(step.table_places), sampled=sampled)


def test_the_formula_knows_the_message():
    assert (message.HEAD, message.FIRST) == (HEAD, FIRST)


whole_numbers = st.integers(-(2**62), 2**62)


@st.composite
def steps(draw):
    def array(kind=np.int64):
        values = st.floats(allow_nan=False) if kind is np.float64 else whole_numbers
        return np.array(draw(st.lists(values, max_size=5)), kind)

    penalties = Penalties(array(), array(np.float64), *(array() for _ in range(6))) if draw(st.booleans()) else None
    sampling = None
    if draw(st.booleans()):
        maybe = [array(np.float64) if draw(st.booleans()) else None for _ in range(5)]
        some = array() if draw(st.booleans()) else None
        sampling = SamplingInputs(draw(st.integers(0, 9)), some, *maybe, array(), penalties)
    moves = np.array(draw(st.lists(st.tuples(*[whole_numbers] * 3), max_size=3)), np.int64).reshape(-1, 3)
    return StepInputs(*(array() for _ in range(4)), moves, *(array() for _ in range(5)), draw(st.booleans()), sampling)


@given(steps())
def test_a_step_arrives_as_it_was(step):
    same(from_numbers(to_numbers(step)), step)


def same(one, other):
    if isinstance(other, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
    elif isinstance(other, StepInputs | SamplingInputs | Penalties):
        for name, value in vars(other).items():
            same(getattr(one, name), value)
    else:
        assert one == other and type(one) is type(other)
