"""Spoilers of lab 07, heads for sequence: numbers in wrong places or too many of them, and right exchanges that look
different."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("07_long_context")


ulysses_exchange = KnownAnswers("ulysses-exchange")

ulysses_exchange.mistake(
    "reshapes without a transposition",
    {
        "received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)": (
            "received.reshape(x.shape[0] // n, -1, x.shape[2])"
        )
    },
    says="What arrives counts ranks first, then heads, then positions. A reshape to [heads / N, seq, d] reads it in "
    "that order: bring the ranks' dimension behind the heads first.",
)
ulysses_exchange.mistake(
    "the way back without a transposition",
    {
        "parts = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()": (
            "parts = x.reshape(n * x.shape[0], -1, x.shape[2])"
        ),
        "group.all_to_all(parts).flatten(0, 1)": "group.all_to_all(parts).reshape(n * x.shape[0], -1, x.shape[2])",
    },
    says="On the way back all_to_all cut dimension 0, which counts heads here. What goes to each rank is its part of "
    "the sequence.",
)
ulysses_exchange.mistake(
    "every N-th head",
    {
        "x.contiguous()": "x.unflatten(0, (-1, n)).transpose(0, 1).contiguous()",
        "received.unflatten(0, (n, -1)).transpose(0, 1)": "received.transpose(0, 1)",
    },
    says="This rank got every N-th head. The exercise asks for heads / N that follow each other, so that query heads "
    "stay with the kv heads they share.",
)
ulysses_exchange.mistake(
    "gathers all and keeps its own",
    {
        "received = group.all_to_all(x.contiguous())": (
            "whole = group.all_gather(x[None]).transpose(0, 1).flatten(1, 2)"
        ),
        "received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)": "whole.chunk(n, 0)[group.rank].clone()",
    },
    expect="are enough",
)
ulysses_exchange.mistake(
    "in half precision",
    {"group.all_to_all(x.contiguous())": "group.all_to_all(x.contiguous().half()).to(x.dtype)"},
    expect="rounded on their way",
)
ulysses_exchange.mistake("the way there twice", expect="to_sequence hands .* to all_to_all, which cuts dimension 0")(
    (right.to_heads, right.to_heads)
)
ulysses_exchange.mistake(
    "nothing is exchanged",
    {
        "received = group.all_to_all(x.contiguous())": "",
        "received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)": "x.chunk(n, 0)[group.rank]",
    },
    expect="the exercise asks for a tensor",
)


def _list_of_parts(x, group):
    parts = torch.stack(x.chunk(group.world_size, 0))  # [N, heads / N, seq / N, d]
    return torch.cat(list(group.all_to_all(parts)), 1)


def _by_permutation(x, group):
    heads, seq, dim = x.shape
    n = group.world_size
    parts = x.view(heads, n, seq // n, dim).permute(1, 0, 2, 3).reshape(n * heads, seq // n, dim)
    return group.all_to_all(parts)


ulysses_exchange.alternative("a list of parts, joined")((_list_of_parts, _by_permutation))
