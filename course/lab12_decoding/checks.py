"""Lab 12, decoding: attention with a cache, and the loop around it.

    checks.py             attention that keeps keys and values, prefill and decode
    checks_sampling.py    a nucleus, and the distribution that the next token is sampled from
    checks_speed.py       the size of the cache, what a decode step reads and computes; TTFT and TPOT from a log

Values are compared with a loop that keeps nothing, in float64. A loop that recomputes everything has right tokens and
fails: the check counts passes, tokens put through the model and cache entries; attention that looks at places that hold
nothing yet fails by the bytes it reads.
"""

import random
from typing import Any

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, receipt, row
from course.lab12_decoding import formulas as predict
from course.lab12_decoding.decoders import GARBAGE, Cache, WatchedModel, recompute
from course.lab12_decoding.traffic import MemoryTraffic
from course.shared.diagnose import expect_list, expect_tensor
from course.shared.measuring import one_thread
from minillm.model import ModelConfig, Transformer, dense

ANSWERS = answers_of("12_decoding")


# Attention that keeps keys and values.


@exercise(
    "cached-attention",
    changes=("keys", "values"),
    minutes=20,
    difficulty=3,
    hints=(
        "A token attends to itself. So what must be in the cache before the scores are computed? And how many of its "
        "places hold anything?",
        "end = start + n. Write k and v to places start .. end - 1, then use places 0 .. end - 1 only. New token i "
        "stands at place start + i and sees the places up to its own. Query head j reads kv head j // group.",
    ),
)
@one_thread()
def check_attend(learner: Any) -> Receipt:
    rows: list[Row] = []
    for shape in ((4, 2, 8), (6, 1, 4), (4, 4, 6)):
        rows += _decode_two_layers(learner, *shape, first=random.randint(3, 6))
    rows += _decode_two_layers(learner, 10, 5, 4, first=random.randint(20, 30), dtype=torch.float32, scale=40.0)
    return receipt("what a step does to the cache", rows, open_rows=2)


def _decode_two_layers(
    learner: Any, heads: int, kv_heads: int, d: int, first: int, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> list[Row]:
    """Steps of two layers in turn, as in a model: what is kept outside the caches meets the other layer's."""
    new = [first, 1, 1, random.randint(2, 4), 1]
    draw = torch.Generator().manual_seed(random.getrandbits(32))
    room, layers, start = sum(new) + random.randint(20, 30), [], 0
    for _ in range(2):
        qkv = [torch.randn(h, sum(new), d, generator=draw, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
        qkv[0] *= scale
        whole = dense(*(x[None].double() for x in qkv))[0]
        layers.append((qkv, whole, [torch.full((kv_heads, room, d), float("nan"), dtype=dtype) for _ in range(2)]))
    entry = 2 * kv_heads * d * dtype.itemsize
    for n in new:
        end, part = start + n, slice(start, start + n)
        who = f"{heads} query heads on {kv_heads} kv heads, {dtype}, {n} new after {start} kept"
        for (q, k, v), whole, kept in layers:
            before = [each.clone() for each in kept]
            with MemoryTraffic(cache=kept) as traffic:
                found = learner(q[:, part].clone(), k[:, part].clone(), v[:, part].clone(), *kept, start)
            _judge_cache(who, kept, before, (k, v), start, end)
            _judge_output(who, found, whole[:, part], start, dtype)
            read = traffic.read["cache"]
            if read > heads // kv_heads * sum(range(start + 1, end + 1)) * entry:  # each head and token for itself
                raise CheckFailed(
                    f"{who}: right values, but it read {read:,} bytes of a cache whose {end} filled places hold "
                    f"{end * entry:,}: slice both keys and values to what is filled before you use them, or every "
                    "step costs as much as the longest"
                )
        start = end
    name = f"{heads} heads on {kv_heads}: bytes written by the last step, one token"
    return [
        row(name, entry, traffic.written["cache"], "B"),
        row(f"    read (the {end} filled of {room} places hold {end * entry:,} B)", None, read, "B"),
    ]


def _judge_cache(who: str, after: list, before: list, new: tuple, start: int, end: int) -> None:
    for name, now, old, wanted in zip(("keys", "values"), after, before, new, strict=True):
        if torch.equal(now[:, start:end], wanted[:, start:end]) and torch.equal(now[:, :start], old[:, :start]):
            if now[:, end:].isnan().all():
                continue
            raise CheckFailed(f"{who}: places from {end} on of `{name}` were written, but only {end} tokens are known")
        if torch.equal(now.nan_to_num(GARBAGE), old.nan_to_num(GARBAGE)):
            raise CheckFailed(
                f"{who}: `{name}` is unchanged: write the new ones into it in place ({name}[:, start:end] = ...), "
                "the next step looks there"
            )
        if not torch.equal(now[:, :start], old[:, :start]):
            raise CheckFailed(
                f"{who}: `{name}` of earlier tokens were overwritten: the new ones go to places {start} .. {end - 1}"
            )
        raise CheckFailed(f"{who}: places {start} .. {end - 1} of `{name}` do not hold what was handed in for them")


def _judge_output(who: str, found: Any, wanted: Tensor, start: int, dtype: torch.dtype) -> None:
    expect_tensor(f"{who}: what you returned", found, wanted.shape)
    if found.dtype != dtype:
        raise CheckFailed(f"{who}: you returned {found.dtype}, which the model's next product refuses: keep q's dtype")
    if not torch.isfinite(found).all():
        raise CheckFailed(
            f"{who}: the output is not finite. Places that nothing was written to hold NaN here: write k and v before "
            "you compute scores, and slice the cache to the filled places. A token that sees no key at all gives NaN, "
            "too: each sees itself. And exp of a large score overflows: torch.softmax subtracts the largest first"
        )
    if not torch.allclose(found.double(), wanted, rtol=0, atol=1e-5 if dtype is torch.float64 else 1e-3):
        off = float((found.double() - wanted).abs().max())
        raise CheckFailed(
            f"{who}: the output is off by up to {off:.1e} from causal attention over the {start} kept and the new "
            "tokens.",
            evidence=found,
        )


# Prefill and decode.


@exercise(
    "decode-loop",
    minutes=15,
    difficulty=2,
    hints=(
        "Which tokens has the model not seen yet? At first the whole prompt; afterwards how many?",
        "One pass over the prompt at positions 0 .. len(prompt) - 1; its last logits give the first token. Then each "
        "new token goes in alone, at the place where it stands in the whole sequence. The last one never goes in.",
    ),
)
@one_thread()
def check_generate(learner: Any) -> Receipt:
    rows: list[Row] = []
    for count in (*random.sample(range(5, 11), 2), 1):
        config = ModelConfig(61, 32, 48, 2, 4, 2, max_seq_len=64, init_std=0.3)
        model = Transformer(config, seed=random.getrandbits(30), dtype=torch.float64)
        prompt = [random.randrange(61) for _ in range(random.randint(4, 9))]
        cache, watched = Cache(config, 40, ANSWERS.attend, torch.float64), WatchedModel(model)
        with torch.no_grad():
            found = learner(watched, list(prompt), count, cache)
        answer = list(found) if hasattr(found, "__next__") else found
        right = recompute(model, prompt, count)
        answer = expect_list(answer, f"the list of the {count} new token ids", of=int)
        rows += _judge_passes(watched, cache, prompt, right)
        if answer != right:
            raise CheckFailed(_say_answer(answer, right, watched, prompt), rows)
        if off := [each for each in rows if each.verdict == "off"]:
            raise CheckFailed(_say_waste(off[0], watched, prompt, count), rows)
        stood = [position for _, positions, _ in watched.passes for position in positions]
        if stood != list(range(len(stood))):  # a rotation sees differences alone: shifted tokens find the same answer
            raise CheckFailed(
                f"right tokens, but they went in at positions {stood}: the prompt begins at position 0, and each new "
                "token stands at the place behind all before it",
                rows,
            )
    return receipt("what generating took", rows)


def _judge_passes(watched: WatchedModel, cache: Cache, prompt: list[int], right: list[int]) -> list[Row]:
    count = len(right)
    entries = predict.kv_entries(len(prompt), count)
    return [
        row(f"prompt {len(prompt)}, answer {count}: forward passes", count, len(watched.passes)),
        row("    tokens put through the model: prompt + answer - 1", entries, watched.computed),
        row("    entries in the cache", entries, cache.entries),
    ]


def _say_answer(answer: list[int], right: list[int], watched: WatchedModel, prompt: list[int]) -> str:
    if len(answer) != len(right):
        if answer[: len(prompt)] == prompt:
            return (
                f"you returned {len(answer)} tokens: leave the prompt out, only the {len(right)} new ones are asked for"
            )
        return f"you returned {len(answer)} tokens, the exercise asks for {len(right)}"
    first = next(i for i, (mine, due) in enumerate(zip(answer, right, strict=True)) if mine != due)
    said = f"token {first + 1} of the answer is {answer[first]}, a loop that keeps nothing finds {right[first]}"
    sequence, place = prompt + answer, 0
    for number, (tokens, positions, cached) in enumerate(watched.passes, 1):
        if not cached:
            return f"{said}: pass {number} was made without attention=cache, so it saw only its own tokens"
        for token, position in zip(tokens, positions, strict=True):
            if place < len(sequence) and token != sequence[place]:
                return (
                    f"{said}: pass {number} put token {token} into the model, but of the prompt and your answer token "
                    f"{sequence[place]} is next. What is in the cache already is not put in again"
                )
            if position != place:
                return (
                    f"{said}: pass {number} put a token at position {position} that stands at position {place} of the "
                    "sequence, counted from 0, whatever comes along with it in a pass"
                )
            place += 1
    return (
        f"{said}, though the right tokens went in at the right positions. Take the likeliest token (argmax) of the "
        "logits of the last token in the pass"
    )


def _say_waste(off: Row, watched: WatchedModel, prompt: list[int], count: int) -> str:
    extra = watched.computed - (len(prompt) + count - 1)
    if len(watched.passes) > count and extra <= 1:
        if extra == 1:
            return (
                "right tokens, but one pass too many: the last token never goes in, as what follows it is not asked for"
            )
        return "right tokens, but the prompt did not go in as one pass: prefill takes all its tokens at once"
    if extra > 1:
        return (
            f"right tokens, but {watched.computed} tokens were put through the model where {watched.computed - extra} "
            "are enough: what is in the cache need not be computed again"
        )
    return f"right tokens, but {off.name.strip()}: {off.measured} instead of {off.predicted}"
