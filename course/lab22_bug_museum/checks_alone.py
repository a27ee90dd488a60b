"""Lab 22: what a repaired function owes its other callers, looked at in this process, without the run that it broke."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course.kit.exercises import CheckFailed
from minillm.data.sampler import ShardedSampler, permutation

HIDDEN = 8


def judge_pieces(run: Callable) -> None:
    """CheckFailed unless the function cuts a batch with and without weights, and counts where it is asked to."""
    microbatches, shards, seq = random.choice((2, 3, 5)), 2, 6
    tokens = torch.arange(7 * seq).view(7, seq)
    held = _held_parts(microbatches, shards)
    for weights in (torch.randint(1, 4, tokens.shape).float(), None):
        due = tokens.numel() if weights is None else int(weights.sum())
        step, counted = _stepper(seq // shards), []
        total = run(held, step, (tokens, tokens + 1, weights), lambda nll: nll, counted)
        who = f"{microbatches} microbatches {'with' if weights is not None else 'without'} weights"
        if float(total) != due:
            raise CheckFailed(f"{who}: the sum of the losses is {float(total):g}; it must be {due}")
        if float(sum(counted)) != due:
            raise CheckFailed(
                f"{who}: `counted` got {[float(each) for each in counted]}, and the weights add up to {due}: append "
                "what each microbatch counts"
            )
        run(held, step, (tokens, tokens + 1, weights), lambda nll: nll)


def _held_parts(microbatches: int, shards: int) -> SimpleNamespace:
    part = SimpleNamespace(
        sequence_shards=shards,
        config=SimpleNamespace(hidden_size=HIDDEN),
        parameters=lambda: iter([torch.zeros(1, dtype=torch.bfloat16)]),
    )
    return SimpleNamespace(parts=[part], pipeline=SimpleNamespace(schedule=SimpleNamespace(microbatches=microbatches)))


def _stepper(seq: int) -> Callable:
    """A pipeline of one stage, whose loss is what counts."""

    def loss(y: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        counts = torch.ones(targets.shape) if weights is None else weights
        return counts.sum(), counts.sum()

    def step(pieces: Any, shape: Callable, loss_of: Callable) -> Tensor:
        for m, piece in enumerate(pieces):
            size, dtype = shape(m)
            if tuple(size) != (len(piece), seq, HIDDEN) or dtype != torch.bfloat16:
                raise CheckFailed(
                    f"microbatch {m} has {len(piece)} rows, and each rank of sequence parallelism holds {seq} of their "
                    f"tokens: `shape` gives {list(size)} in {dtype}, it must be {[len(piece), seq, HIDDEN]} in the "
                    "parameters' dtype"
                )
        last = SimpleNamespace(loss=loss)
        return torch.stack([loss_of(last, piece, m) for m, piece in enumerate(pieces)]).sum()

    return step


def judge_windows(indices: Callable) -> None:
    """CheckFailed unless the windows are those of the stream, dealt out like cards, shuffled or not."""
    for shuffle, world_size in product((True, False), (1, 5)):
        count, batch_size, position = random.randint(11, 19), random.randint(2, 4), random.randint(0, 60)
        for rank in range(world_size):
            sampler = ShardedSampler(count, batch_size, rank, world_size, seed=random.randrange(99), shuffle=shuffle)
            places = [position + rank + world_size * i for i in range(batch_size)]
            orders = {e: permutation(count, sampler.seed, e) if shuffle else np.arange(count) for e in range(9)}
            due = [int(orders[place // count][place % count]) for place in places]
            found = [int(window) for window in indices(sampler, position)]
            if found != due:
                raise CheckFailed(
                    f"rank {rank} of {world_size}, position {position} of {count} windows, shuffle={shuffle}: you read "
                    f"{found}, it must be {due}"
                )


def judge_contexts(accumulating: Callable) -> None:
    """CheckFailed unless exactly the microbatches before the last are kept from communicating, by who communicates."""
    for zero, is_wrapped, is_last in product(range(4), (False, True), (False, True)):
        if zero == 3 and not is_wrapped:
            continue
        entered: list[str] = []
        model = SimpleNamespace()
        module = SimpleNamespace(no_sync=_noted("self.module", entered)) if is_wrapped else model
        stepped = SimpleNamespace(no_sync=_noted("self.stepped", entered))
        strategy = SimpleNamespace(layout=SimpleNamespace(zero=zero), model=model, module=module, stepped=stepped)
        reduces = zero > 0 or is_wrapped
        due = ["self.stepped" if zero in (1, 2) else "self.module"] if reduces and not is_last else []
        what = (
            f"ZeRO {zero}, {'a wrapped' if is_wrapped else 'a bare'} model, {'the last' if is_last else 'not the last'}"
        )
        try:
            with accumulating(strategy, is_last):
                pass
        except AttributeError as error:
            raise CheckFailed(f"{what} microbatch: {error}. Whose no_sync is there, and is one needed?") from error
        if entered != due:
            raise CheckFailed(
                f"{what} microbatch: {' and '.join(entered) or 'nobody'} was kept from communicating; it must be "
                f"{' and '.join(due) or 'nobody'}"
            )


def judge_prefixes(prefixes: Callable) -> None:
    """CheckFailed unless a pool without a prefix cache is asked for nothing, and another for all blocks but the last
    token's."""
    for has_cache, size, num_tokens in product((False, True), (4, 7), (1, 24, 25, 28, 29)):
        sequence = SimpleNamespace(num_tokens=num_tokens, prefixes=lambda count, _: list(range(20))[:count])
        pool = SimpleNamespace(prefix_cache=has_cache, block_size=size)
        found = list(prefixes(SimpleNamespace(pool=pool), sequence))
        due = (num_tokens - 1) // size if has_cache else 0
        if len(found) != due:
            cache = "with" if has_cache else "without"
            raise CheckFailed(
                f"{num_tokens} tokens in blocks of {size}, {cache} a prefix cache: you give {len(found)} "
                f"keys, it must be {due}"
            )


def _noted(who: str, entered: list[str]) -> Callable:
    @contextmanager
    def no_sync() -> Iterator[None]:
        entered.append(who)
        yield

    return no_sync
