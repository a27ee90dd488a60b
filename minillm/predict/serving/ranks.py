"""An engine over t tensor-parallel ranks: what a rank holds and reads, what a step sends, and what it is told.

    weights    P / t, norms whole and kv heads repeated where t is larger: `predict.training.tensor.parameters`
    a pass     2 L + 1 all-reduces of [tokens, H]: after every attention and MLP, and after the embedding
    a row      all its logits, (t - 1) / t · V · b bytes of each rank; or the likeliest token, 16 (t - 1)
    a step     one message of at least 8,192 bytes from rank 0 to every other rank
    stages     [tokens, H] from every rank of a stage to its counterpart of the next one, 8 bytes and 8 a row back

L layers, H hidden size, V vocabulary, b bytes of an activation. A decoding sequence is one token and one row a step, so
its bytes do not grow with the context. Seconds on a card and a link: `predict.planner.serving.decode_seconds`. Shapes
are objects with `ModelConfig`'s attributes.
"""

from collections.abc import Iterable

from minillm.predict.model import Shape
from minillm.predict.training.tensor import Call, microbatch, parameters

NUMBER = 8  # bytes of what a message is made of
HEAD, FIRST = 31, 1024  # numbers before a step's arrays; numbers of the message that every step has


def weight_bytes(shape: Shape, world_size: int, itemsize: int) -> int:
    """Of one rank, padding included: what it keeps, and at most what it reads."""
    return parameters(shape, world_size) * itemsize


def step_calls(
    shape: Shape, world_size: int, tokens: int, *, whole: int = 0, likeliest: int = 0, itemsize: int = 4
) -> list[Call]:
    """Every collective of a step of so many tokens. whole: rows whose logits are all read, as where a token is sampled;
    likeliest: rows of which only the likeliest token is. itemsize: of activations and logits."""
    calls = [call for call in microbatch(shape, 1, tokens, itemsize) if not call.backward and call.part != "loss"]
    words = -(-shape.vocab_size // world_size)
    if whole:
        calls.append(Call("head", False, "all_gather", world_size * words * whole, itemsize))
    if likeliest:
        calls.append(Call("head", False, "all_gather", world_size * 2 * likeliest, NUMBER))
    return calls


def sent_bytes(calls: Iterable[Call], world_size: int, rank: int = 0) -> int:
    """What one rank sends for them by rings."""
    return sum(call.cost(world_size).sent_per_rank[rank] for call in calls)


def step_numbers(
    sequences: int,
    tokens: int,
    rows: int,
    *,
    changed: int = 0,
    sampled: int = 0,
    forked: int = 0,
    adapted: bool = False,
) -> int:
    """Numbers that say what a step is. rows: of logits. changed: entries of block tables. sampled: tokens to sample if
    one of them is not greedy, else 0. forked: tokens to sample if a row gives several, else 0. adapted:
    whether a sequence has an adapter."""
    return HEAD + tokens + (4 if adapted else 3) * sequences + rows + 2 * changed + 6 * sampled + forked


def message_bytes(numbers: int) -> int:
    """Bytes from rank 0 to each other rank for a step of so many numbers."""
    return NUMBER * max(FIRST, 1 + numbers)


def hidden_bytes(shape: Shape, tokens: int, itemsize: int = 4) -> int:
    """What a rank of one stage sends to the next one for a step of so many tokens."""
    return tokens * shape.hidden_size * itemsize
