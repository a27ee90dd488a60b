"""The sampler's kernel in Triton's interpreter, against the reference row by row. Run by test_rows_triton.py."""

import random
from math import inf

import pytest
import torch

from minillm.model.draw import Draw
from minillm.serve import SamplingParams
from minillm.serve.run.step_inputs import sampling_inputs
from minillm.serve.sample import rows_triton
from minillm.serve.sample.batch import sample_on_device
from minillm.serve.sample.reference import filtered, sample
from minillm.serve.sample.rows_triton import sample_rows
from tests.engine.budgets.launches import Launches

KINDS = [
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"top_k": 400},
    {"top_k": 40, "top_p": 0.5},
    {"min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.3},
    {"top_k": 1},
    {"top_p": 1e-6},
    {"top_k": 3, "top_p": 0.99, "min_p": 0.01},
]


@pytest.mark.parametrize("vocab_size", [7, 300])
@pytest.mark.parametrize("spread", [0.0, 3.0], ids=["all equal", "peaked"])
def test_tokens_are_the_reference_s(vocab_size, spread, monkeypatch):
    monkeypatch.setattr(rows_triton, "BLOCK", 256)  # so that a row has several
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (spread * torch.randn(2 * len(KINDS), vocab_size, generator=generator)).round(decimals=1)  # with equals
    params = [
        SamplingParams(temperature=(0.7, 1.6)[row // len(KINDS)], **KINDS[row % len(KINDS)])
        for row in range(len(logits))
    ]
    draws = [Draw(row) for row in range(len(logits))]
    found = sample_on_device(
        logits, sampling_inputs([(each, [], draw) for each, draw in zip(params, draws, strict=True)])
    )
    right = [sample(row, each, [], Draw(seed)) for seed, (row, each) in enumerate(zip(logits, params, strict=True))]
    assert found.read() == right and found.resampled == []


def test_drawn_rows():
    """100 of them, each with settings of its own, in one launch."""
    draw = random.Random(0)
    params = [
        SamplingParams(
            temperature=draw.uniform(0.3, 2.0),
            top_k=draw.choice([None, draw.randint(1, 300)]),
            top_p=draw.choice([1.0, draw.uniform(0.01, 1.0)]),
            min_p=draw.choice([0.0, draw.uniform(0.0, 0.5)]),
        )
        for _ in range(100)
    ]
    logits = 3 * torch.randn(len(params), 257, generator=torch.Generator().manual_seed(0))
    draws = [Draw(row) for row in range(len(params))]
    found = sample_on_device(logits, sampling_inputs([(p, [], each) for p, each in zip(params, draws, strict=True)]))
    right = [sample(row, p, [], Draw(seed)) for seed, (row, p) in enumerate(zip(logits, params, strict=True))]
    assert found.read() == right and found.resampled == []


def test_the_edges_of_the_random_number_and_of_what_is_kept():
    weights = torch.tensor([[0.0, 1.0, 0.5, 0.5, 0.0, 0.25, 0.0, 0.0]]).repeat(6, 1)
    limits = torch.tensor(
        [
            [0.0, inf, 1, 0],
            [1 - 2**-53, inf, 1, 0],
            [0.999, 2, 1, 0],
            [0.999, inf, 0.6, 0],
            [0.999, 3, 0.7, 0],
            [0, 8, 1, 0],
        ],
        dtype=torch.float64,
    ).T
    assert sample_rows(weights, limits).tolist() == [1, 5, 2, 2, 2, 1]
    assert sample_rows(weights * float("nan"), limits).tolist() == [0] * 6  # told by the logits, which are not finite


def test_what_is_kept_is_what_the_reference_keeps():
    """All of it, and nothing else: random numbers at every step of the running sum."""
    logits = (2 * torch.randn(300, generator=torch.Generator().manual_seed(1))).round(decimals=1)
    for kind in KINDS:
        params = SamplingParams(temperature=1.0, **kind)
        kept = filtered(logits, params, []).softmax(-1).double()
        weights = torch.exp(logits - logits.max())[None]
        middle = (kept.cumsum(0) - kept / 2)[kept > 0]
        limit = torch.tensor([0, params.top_k or inf, params.top_p, params.min_p], dtype=torch.float64)
        limits = limit.repeat(len(middle), 1).T.contiguous()
        limits[0] = middle / kept.sum()
        found = sample_rows(weights.repeat(len(middle), 1), limits)
        assert found.tolist() == kept.nonzero().flatten().tolist(), kind


@pytest.mark.parametrize("layout", ["part of wider rows", "columns", "every second"])
def test_weights_of_other_strides(layout):
    """Rows that lie apart or across give the tokens of the same rows one after the other."""
    wide = torch.rand(9, 140, generator=torch.Generator().manual_seed(2))
    cut = {
        "part of wider rows": wide[:, 3:70],
        "columns": wide[:, :67].T.contiguous().T,
        "every second": wide[::2, ::2],
    }
    weights = cut[layout]
    assert not weights.is_contiguous()
    draw = torch.Generator().manual_seed(3)
    limits = torch.stack([torch.rand(len(weights), generator=draw, dtype=torch.float64), *torch.ones(3, len(weights))])
    limits[1:] = torch.tensor([[inf], [0.8], [0.1]])
    assert sample_rows(weights, limits).tolist() == sample_rows(weights.contiguous(), limits).tolist()


def test_top_p_takes_few_launches(monkeypatch):
    """167 of them by selection, 49 for a small top-k, 42 for a temperature alone."""
    calls = []
    monkeypatch.setattr("minillm.serve.sample.batch.ROWS_AT_ONCE", 64)  # as on a GPU
    monkeypatch.setattr(
        "minillm.serve.sample.batch.sample_rows",
        lambda weights, limits: calls.append(1) or weights.argmax(-1),
    )
    rows = [(SamplingParams(temperature=0.8, top_p=0.9), [], Draw(row)) for row in range(64)]
    logits = torch.randn(64, 300)
    with Launches() as launches:
        sample_on_device(logits, sampling_inputs(rows))
    assert len(calls) == 1 and launches.total <= 21, launches.calls
