"""Lab 22: what a repaired function owes its other callers, looked at in this process, without the run that it broke."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course.kit.exercises import CheckFailed
from course.lab22_bug_museum.training_runs import SMALL, text
from course.shared.diagnose import expect, expect_list, expect_number
from minillm.adapters.attach import adapted_kinds
from minillm.data.sampler import ShardedSampler, permutation
from minillm.model.loss import IGNORE
from minillm.parallel.pipeline_parallel.held_parts import HeldParts
from minillm.parallel.pipeline_parallel.stages import build_parts
from minillm.predict.model import training_flops
from minillm.predict.training.adapters import Adapters
from minillm.serve.schedule.blocks import BlockPool, Prefix
from minillm.serve.schedule.sequence import Sequence
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig

ROWS, SEQ, SHARDS = 7, 6, 2
MODEL = replace(SMALL, hidden_size=24)


def judge_pieces(run: Callable) -> None:
    """CheckFailed unless the function cuts a batch with and without weights, and counts where it is asked to."""
    tokens = torch.arange(ROWS * SEQ).view(ROWS, SEQ)
    targets = torch.where(tokens % 4 == 2, IGNORE, tokens + 1)
    batches = (tokens, targets, torch.randint(1, 4, tokens.shape).float()), (tokens, targets, None)
    for microbatches, stage, batch in product((5, random.choice((2, 3))), (1, 0), batches):
        nll, counts = map(float, _sums(*batch[1:])) if stage else (0.0, 0.0)
        held, counted = _held_parts(microbatches, stage), []
        total = run(held, _stepper(microbatches, stage), batch, lambda nll: nll, counted)
        who = f"{microbatches} microbatches {'without' if batch[2] is None else 'with'} weights"
        if abs(float(total) - nll) > 1e-4 * max(1.0, nll):
            raise CheckFailed(f"{who}: the sum of the losses is {float(total):g}; it must be {nll:g}")
        if not all(isinstance(each, Tensor) for each in counted):
            raise CheckFailed(f"{who}: `counted` got {counted}; it must get tensors, which validation stacks")
        if float(sum(counted)) != counts:
            where = "" if stage else " on the rank that lacks the last part"
            raise CheckFailed(
                f"{who}: `counted` got {[float(each) for each in counted]}{where}, and it must add up to {counts:g}: "
                "append what each microbatch counts, where the last part is"
            )
        run(held, _stepper(microbatches, stage), batch, lambda nll: nll)


def _held_parts(microbatches: int, stage: int) -> HeldParts:
    """Of one of two stages, in bfloat16, whose ranks of sequence parallelism share the tokens."""
    schedule = ParallelConfig(pp=2, accumulate=microbatches).order
    held = HeldParts(build_parts(MODEL, schedule, stage, dtype=torch.bfloat16, device="meta"))
    for part in held.parts:
        part.sequence_shards = SHARDS
    held.pipeline = SimpleNamespace(schedule=schedule)
    return held


def _sums(targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sum of weight * nll, sum of weights), if the number of a target is its nll."""
    weights = (targets != IGNORE) * (1.0 if weights is None else weights)
    return (targets * weights).sum(), weights.sum()


def _stepper(microbatches: int, stage: int) -> Callable:
    """A pipeline of two stages, of which the last one has a loss."""

    def step(pieces: Any, shape: Callable, loss_of: Callable) -> Tensor:
        if len(pieces) != microbatches:
            raise CheckFailed(
                f"{ROWS} rows are cut into {len(pieces)} pieces; the schedule has {microbatches} microbatches, one each"
            )
        for m, piece in enumerate(pieces):
            right, (size, dtype) = [len(piece), SEQ // SHARDS, MODEL.hidden_size], shape(m)
            if list(size) != right or dtype != torch.bfloat16:
                raise CheckFailed(
                    f"microbatch {m} has {len(piece)} rows, and each rank of sequence parallelism holds {right[1]} of "
                    f"their tokens: `shape` gives {list(size)} in {dtype}, it must be {right} in the parameters' dtype"
                )
        last = SimpleNamespace(loss=lambda y, targets, weights: _sums(targets, weights))
        losses = [loss_of(last, piece, m) for m, piece in enumerate(pieces)] if stage else []
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return step


def judge_kind(indices: Callable) -> None:
    """CheckFailed unless it returns an array of integers, which the loader takes windows by."""
    found = indices(ShardedSampler(5, 2), 0)
    fits = isinstance(found, np.ndarray) and found.dtype.kind in "iu"
    expect(fits, found, "a NumPy array of integers", "`indices`")


def judge_windows(indices: Callable) -> None:
    """CheckFailed unless the windows are those of the stream, dealt out like cards, shuffled or not."""
    tiny, small, large = random.randint(3, 6), random.randint(11, 19), random.randint(300, 400)
    for shuffle, (world_size, count) in product((True, False), ((1, small), (5, small), (5, tiny), (2, large))):
        batch_size = random.randint(3, 4)
        position = count * random.randint(2, 4) - random.randint(1, world_size)  # a step of two epochs, or of more
        for rank in range(world_size):
            sampler = ShardedSampler(count, batch_size, rank, world_size, seed=random.randrange(99), shuffle=shuffle)
            places = [position + rank + world_size * i for i in range(batch_size)]
            orders = {e: permutation(count, sampler.seed, e) if shuffle else np.arange(count) for e in range(20)}
            due = [int(orders[place // count][place % count]) for place in places]
            found = [int(window) for window in indices(sampler, position)]
            if found != due:
                raise CheckFailed(
                    f"rank {rank} of {world_size}, position {position} of {count} windows, shuffle={shuffle}: you read "
                    f"{found}, it must be {due}"
                )


def judge_contexts(accumulating: Callable) -> None:
    """CheckFailed unless exactly the microbatches before the last are kept from communicating, by who communicates,
    from their beginning to their end."""
    for zero, is_wrapped, is_last in product(range(4), (False, True), (False, True)):
        if zero == 3 and not is_wrapped:
            continue
        held_back: list[str] = []
        reduces = zero > 0 or is_wrapped
        layout, model = ParallelConfig(cp=2 if reduces else 1, zero=zero), SimpleNamespace()
        module = SimpleNamespace(no_sync=_noted("self.module", held_back)) if is_wrapped else model
        strategy = SimpleNamespace(layout=layout, model=model, module=module, world_size=1, averaged_over=layout.cp)
        strategy.stepped = SimpleNamespace(no_sync=_noted("self.stepped", held_back))
        due = ["self.stepped" if zero in (1, 2) else "self.module"] if reduces and not is_last else []
        what = (
            f"ZeRO {zero}, {'a wrapped' if is_wrapped else 'a bare'} model, {'the last' if is_last else 'not the last'}"
        )
        try:
            with accumulating(strategy, is_last):
                inside = list(held_back)
        except AttributeError as error:
            raise CheckFailed(f"{what} microbatch: {error}. Whose no_sync is there, and is one needed?") from error
        if inside != due:
            raise CheckFailed(
                f"{what} microbatch: {' and '.join(inside) or 'nobody'} was kept from communicating while it ran; it "
                f"must be {' and '.join(due) or 'nobody'}"
            )
        if held_back:
            raise CheckFailed(f"{what} microbatch: {held_back[0]} is still kept from communicating after it")


def judge_utilisation(mfu: Callable) -> None:
    """CheckFailed unless the share follows what it is of: length, window, adapters, tokens, seconds and peak."""
    found, right, names = [], [], []
    for window, lora in product((None, random.randint(3, 9)), (None, random.randint(3, 5))):
        model, seq_len = replace(SMALL, sliding_window=window, max_seq_len=64), random.randint(17, 29)
        adapters = {"lora": lora, "target": "q,up"} if lora else {}
        trainer = Trainer(TrainConfig(model, seq_len, 1, 1, **adapters), text(1), peak_flops=random.uniform(1e11, 1e12))
        trainer.loader.close()
        tokens, seconds = random.randint(100, 999), random.uniform(0.1, 2.0)
        context = sum(min(position + 1, window or seq_len) for position in range(seq_len)) / seq_len
        if lora:
            work = Adapters(model, lora, adapted_kinds(model, trainer.config.adapter)).training_flops(context)
        else:
            work = training_flops(model, context)
        right.append(tokens * work.total / seconds / trainer.peak_flops)
        found.append(float(expect_number(mfu(trainer, tokens, seconds), "one number, a share of the peak")))
        names.append(f"{seq_len} tokens, window {window}, adapters of rank {lora}")
    for name, mine, due in zip(names, found, right, strict=True):
        if abs(mine / due - 1) > 1e-9:
            raise CheckFailed(f"{name}: you return {mine:.6g}, and it is {due:.6g}", evidence=found)


def judge_prefixes(prefixes: Callable) -> None:
    """CheckFailed unless a pool without a prefix cache is asked for nothing, and another for all blocks but the last
    token's, the first ones first."""
    lengths = (1, 24, 25, 28, 29, 28 * random.randint(2, 4))  # 28: full blocks of either size
    for has_cache, size, num_tokens in product((False, True), (4, 7), lengths):
        tokens = [random.randrange(512) for _ in range(num_tokens)]
        sequence, pool = Sequence(list(tokens), limit=200), BlockPool(64, size, prefix_cache=has_cache)
        found = expect_list(prefixes(SimpleNamespace(pool=pool), sequence), "a list of keys")
        due = [sequence.origin]
        for start in range(0, (num_tokens - 1) // size * size if has_cache else 0, size):
            due.append(Prefix(due[-1], tuple(tokens[start : start + size])))
        who = f"{num_tokens} tokens in blocks of {size}, {'with' if has_cache else 'without'} a prefix cache"
        if len(found) != len(due) - 1:
            raise CheckFailed(f"{who}: you give {len(found)} keys, it must be {len(due) - 1}")
        if found != due[1:]:
            place = next(place for place, (mine, right) in enumerate(zip(found, due[1:], strict=True)) if mine != right)
            raise CheckFailed(f"{who}: key {place} is not that of the prompt's first {(place + 1) * size} tokens")


def _noted(who: str, held_back: list[str]) -> Callable:
    @contextmanager
    def no_sync() -> Iterator[None]:
        held_back.append(who)
        try:
            yield
        finally:
            held_back.remove(who)

    return no_sync
