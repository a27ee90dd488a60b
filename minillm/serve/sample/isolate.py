"""Sampling in which a row that raises costs no other row its token."""

from dataclasses import replace
from math import inf

import numpy as np
from torch import Tensor

from minillm.serve.run.step_inputs import SamplingInputs
from minillm.serve.sample.batch import SampledTokens, sample_on_device
from minillm.serve.sample.seen import SeenTokens


def sample_isolated(
    logits: Tensor, inputs: SamplingInputs, sampled: Tensor | None, seen: SeenTokens | None = None
) -> tuple[SampledTokens, dict[int, Exception]]:
    """(what `sample_on_device` returns, what it raised by row). A row that raises gets the likeliest token."""
    try:
        return sample_on_device(logits, inputs, sampled, seen), {}
    except Exception as failure:  # of which rows? Alone, with the same random numbers, it shows
        faults, each = {}, np.arange(inputs.count)
        for row in each:
            try:
                sample_on_device(logits, _only(inputs, each == row), sampled, seen)
            except Exception as fault:
                faults[int(row)] = fault
        faults = faults or dict.fromkeys(each.tolist(), failure)
    return sample_on_device(logits, _only(inputs, ~np.isin(each, list(faults))), sampled, seen), faults


def _only(inputs: SamplingInputs, keep: np.ndarray) -> SamplingInputs:
    """The same for the tokens where keep [t] is true; the others get the likeliest token and nothing else."""
    if inputs.greedy_only:
        return inputs
    penalties = inputs.penalties
    if penalties is not None:
        kept = keep[penalties.rows]
        mine = {name: getattr(penalties, name)[kept] for name in ("rows", "penalty", "seen_rows")}
        penalties = replace(penalties, **mine)
    return replace(
        inputs,
        temperature=np.where(keep, inputs.temperature, 0.0),
        top_k=np.where(keep, inputs.top_k, inf),
        top_p=np.where(keep, inputs.top_p, 1.0),
        min_p=np.where(keep, inputs.min_p, 0.0),
        logprobs=np.where(keep, inputs.logprobs, -1),
        penalties=penalties,
    )
