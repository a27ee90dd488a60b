"""Sampling in which a row that raises costs no other row its token."""

from dataclasses import replace
from math import inf

import numpy as np
from torch import Tensor

from minillm.serve.run.step_inputs import SamplingInputs
from minillm.serve.sample.batch import SampledTokens, sample_on_device


def sample_isolated(
    logits: Tensor, inputs: SamplingInputs, sampled: Tensor | None
) -> tuple[SampledTokens, dict[int, Exception]]:
    """(what `sample_on_device` returns, what it raised by row). A row that raises gets the likeliest token."""
    try:
        return sample_on_device(logits, inputs, sampled), {}
    except Exception as failure:  # of which rows? Alone, with the same random numbers, it shows
        faults, each = {}, np.arange(inputs.count)
        for row in each:
            try:
                sample_on_device(logits, _only(inputs, each == row), sampled)
            except Exception as fault:
                faults[int(row)] = fault
        faults = faults or dict.fromkeys(each.tolist(), failure)
    return sample_on_device(logits, _only(inputs, ~np.isin(each, list(faults))), sampled), faults


def _only(inputs: SamplingInputs, keep: np.ndarray) -> SamplingInputs:
    """The same for the tokens where keep [t] is true; the others get the likeliest token and nothing else."""
    if inputs.greedy_only:
        return inputs
    kept = keep[inputs.penalty_rows]
    return replace(
        inputs,
        temperature=np.where(keep, inputs.temperature, 0.0),
        top_k=np.where(keep, inputs.top_k, inf),
        top_p=np.where(keep, inputs.top_p, 1.0),
        min_p=np.where(keep, inputs.min_p, 0.0),
        logprobs=np.where(keep, inputs.logprobs, -1),
        penalty=inputs.penalty[kept],
        penalty_rows=inputs.penalty_rows[kept],
        penalty_ids=inputs.penalty_ids[kept],
    )
