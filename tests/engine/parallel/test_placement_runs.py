"""Runs say where every element of a part lies, as cutting a tensor of numbers does."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import spreads

from minillm.train.checkpoint.runs import runs_of, shared


def numbers(places, shape):
    """For every rank: its part of the tensor 1, 2, 3, ...; padding is 0."""
    whole = torch.arange(1, shape.numel() + 1).reshape(shape)
    return [place.cut(whole).reshape(-1).numpy() for place in places]


@settings(max_examples=150)
@given(spreads())
def test_runs_are_what_cutting_takes(spread):
    shape, places = spread
    for place, part in zip(places, numbers(places, shape), strict=True):
        runs, found = runs_of(place), np.zeros_like(part)
        for whole, at, length in zip(runs.whole, runs.part, runs.length, strict=True):
            found[at : at + length] = np.arange(whole + 1, whole + length + 1)
        assert (found == part).all() and runs.numel == (part > 0).sum() and (runs.length > 0).all()
        assert runs.packed.tolist() == [int((part[:at] > 0).sum()) for at in runs.part]


@settings(max_examples=150)
@given(spreads(), st.data())
def test_any_layout_finds_its_part_in_any_other(spread, data):
    shape, saved = spread
    files = [part[part > 0] for part in numbers(saved, shape)]  # as a file has it: without padding
    _, others = data.draw(spreads(st.just(shape)))
    for place, wanted in zip(others, numbers(others, shape), strict=True):
        found = np.zeros_like(wanted)
        for source, stored in zip(saved, files, strict=True):
            for start, at, length in zip(*shared(runs_of(place), runs_of(source)), strict=True):
                found[at : at + length] = stored[start : start + length]
        assert (found == wanted).all()
