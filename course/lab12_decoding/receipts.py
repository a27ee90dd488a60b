"""Stop 12: decoding: passes, entries and bytes of the cache, what a step reads and computes; speed for information."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from course.lab12_decoding import checks as answers
from course.lab12_decoding import checks_sampling as sampling
from course.lab12_decoding import checks_speed as speed
from course.lab12_decoding import experiments
from course.lab12_decoding import experiments_breaks as breaks
from course.lab12_decoding import formulas as predict
from course.shared.measuring import one_thread
from minillm.labkit.receipts import Row, row


def rows() -> Iterator[Row]:
    """What a cache holds and saves, what a step costs, which decoder is broken; one against many on one core."""
    with one_thread():
        yield from _cache()
        yield from _step()
        yield from _sampling()
        yield from _other_passes()
        yield from _speed()


def _cache() -> Iterator[Row]:
    for check, learnt, name in (
        (answers.check_generate, answers.generate, "decode"),
        (speed.check_kv_bytes, speed.kv_bytes, "cache"),
    ):
        found = check(learnt)
        yield from (replace(each, name=f"{name}: {each.name.strip()}") for each in getattr(found, "rows", found))
    for size, ways in experiments.one_more_token((31, 127)).items():
        for way, numbers in ways.items():
            yield row(f"{size} tokens, {way}: FLOPs of the next", numbers["predicted"], numbers["flops"])
        yield row("    same logits", True, ways["cached"]["apart"] < 1e-3)


def _step() -> Iterator[Row]:
    for batch, context in ((1, 64), (8, 512)):
        for what, (predicted, counted) in experiments.bytes_of_a_step(batch, context).items():
            yield row(f"decode step, batch {batch}, context {context}: {what} read", predicted, counted, "B")
    for found in speed.check_latencies(speed.latencies).rows[:2]:
        yield replace(found, name=f"engine's log, {found.name.strip()}")


def _sampling() -> Iterator[Row]:
    found = sampling.check_distribution(sampling.distribution)
    yield from (replace(each, name=f"sampling: {each.name}") for each in found[3:8])


def _other_passes() -> Iterator[Row]:
    for dtype, most in ((torch.float64, 1e-9), (torch.bfloat16, None)):
        found = breaks.in_other_passes(dtype, batch=4)
        name = f"{str(dtype).split('.')[1]}, the same tokens in other passes"
        yield row(f"{name}: greedy tokens changed", None if most is None else 0, found.changed)
        if most is not None:
            yield row(f"    logits differ by less than {most}", True, found.apart < most)


def _speed() -> Iterator[Row]:
    roof = experiments.roof()
    name = str(roof.dtype).split(".")[1]
    shapes = [("decode", 1, 1, 63), ("decode", 8, 1, 63), ("decode", 64, 1, 63), ("prefill", 1, 64, 0)]
    for point in experiments.points(shapes, sweeps=2):
        least = point.work.seconds(roof.peak_flops, roof.bandwidth)
        bound = predict.work(experiments.WIDE, point.batch, point.new, point.kept, roof.dtype.itemsize)
        what = f"{point.kind}, {point.work.tokens} tokens in a pass, {name}, one core"
        yield row(f"{what}: bound by", None, bound.bound(roof.peak_flops, roof.bandwidth))
        yield row("    at least", None, least, "s")
        yield row("    measured", None, point.seconds, "s")


CLAIMS = (rows,)
