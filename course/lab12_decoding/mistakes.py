"""Spoilers of lab 12: wrong ways to attend with a cache and to decode, and right ones."""

import torch
import torch.nn.functional as F

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("12_decoding")


def attention(q, k, v, visible=None, scale=None):
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v.repeat_interleave(group, 0)


def causal(start, end):
    return torch.arange(end) <= torch.arange(start, end)[:, None]


# Attention with a cache.


@mistake(
    "cached-attention",
    "appends after attention",
    says="The new tokens do not see themselves: write them into the cache first, then attend.",
)
def appends_after(q, k, v, keys, values, start):
    end = start + k.shape[1]
    y = attention(q, keys[:, :start], values[:, :start])
    keys[:, start:end], values[:, start:end] = k, v
    return y


def written(q, k, v, keys, values, start):
    end = start + k.shape[1]
    keys[:, start:end], values[:, start:end] = k, v
    return keys[:, :end], values[:, :end], end


@mistake(
    "cached-attention",
    "mask without position offset",
    says="The mask has no offset: query i stands behind the `start` kept tokens and must see those, too.",
)
def no_offset(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    return attention(q, seen_k, seen_v, torch.arange(end) <= torch.arange(q.shape[1])[:, None])


@mistake(
    "cached-attention",
    "no mask: works for one token at a time",
    says="New tokens see those after them: several may come at once, so a mask is needed.",
)
def no_mask(q, k, v, keys, values, start):
    return attention(q, *written(q, k, v, keys, values, start)[:2])


@mistake("cached-attention", "writes to the front", expect="overwritten")
def to_the_front(q, k, v, keys, values, start):
    keys[:, : k.shape[1]], values[:, : k.shape[1]] = k, v
    return attention(
        q, keys[:, : start + k.shape[1]], values[:, : start + k.shape[1]], causal(start, start + len(k[0]))
    )


@mistake("cached-attention", "grows a copy of the cache", expect="is unchanged")
def grows_a_copy(q, k, v, keys, values, start):
    keys, values = (torch.cat([old[:, :start], new], dim=1) for old, new in ((keys, k), (values, v)))
    return attention(q, keys, values, causal(start, keys.shape[1]))


@mistake(
    "cached-attention",
    "wrong kv heads",
    says="Query heads read the wrong kv heads: neighbours share one (head j reads j // group), which is "
    "repeat_interleave and not repeat.",
)
def wrong_heads(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    group = q.shape[0] // k.shape[0]
    return attention(q, seen_k.repeat(group, 1, 1), seen_v.repeat(group, 1, 1), causal(start, end))


@mistake("cached-attention", "not scaled", says="The scores are not divided by √d.")
def not_scaled(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    return attention(q, seen_k, seen_v, causal(start, end), scale=1.0)


@mistake("cached-attention", "all places, masked", expect="slice the cache to the filled places")
def whole_room(q, k, v, keys, values, start):
    end = written(q, k, v, keys, values, start)[2]
    visible = torch.arange(keys.shape[1]) <= torch.arange(start, end)[:, None]
    return attention(q, keys, values, visible)


@mistake(
    "cached-attention",
    "masked scores are zero",
    says="A score of 0 still gets weight, because exp(0) = 1. Masked scores must be -inf before the softmax.",
)
def zero_scores(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    group = q.shape[0] // k.shape[0]
    scores = q @ seen_k.repeat_interleave(group, 0).mT * q.shape[-1] ** -0.5
    return (scores * causal(start, end)).softmax(-1) @ seen_v.repeat_interleave(group, 0)


@mistake("cached-attention", "all keys masked, values sliced", expect="slice both keys and values")
def all_keys(q, k, v, keys, values, start):
    _, seen_v, end = written(q, k, v, keys, values, start)
    group = q.shape[0] // k.shape[0]
    scores = q @ keys.repeat_interleave(group, 0).mT * q.shape[-1] ** -0.5
    visible = torch.arange(keys.shape[1]) <= torch.arange(start, end)[:, None]
    shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return shares[:, :, :end] @ seen_v.repeat_interleave(group, 0)


@alternative("cached-attention", "joins kept and new, writes by indices afterwards")
def joins(q, k, v, keys, values, start):
    seen = (torch.cat([old[:, :start], new], dim=1) for old, new in ((keys, k), (values, v)))
    end = start + k.shape[1]
    y = attention(q, *seen, causal(start, end))
    keys[:, torch.arange(start, end)] = k
    values.index_copy_(1, torch.arange(start, end), v)
    return y


@alternative("cached-attention", "one query head after the other")
def head_by_head(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    group, heads = q.shape[0] // k.shape[0], []
    for head in range(q.shape[0]):
        scores = q[head] @ seen_k[head // group].T / q.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~causal(start, end), float("-inf")).softmax(-1) @ seen_v[head // group])
    return torch.stack(heads)


@alternative("cached-attention", "torch's fused kernel with the right mask")
def fused(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    mask = causal(start, end)
    return F.scaled_dot_product_attention(q[None], seen_k[None], seen_v[None], attn_mask=mask, enable_gqa=True)[0]


@alternative("cached-attention", "query heads grouped, no key is repeated")
def grouped(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    rows = q.unflatten(0, (k.shape[0], -1))
    scores = torch.einsum("gjnd,gmd->gjnm", rows, seen_k) / q.shape[-1] ** 0.5
    shares = scores.masked_fill(~causal(start, end), float("-inf")).softmax(-1)
    return torch.einsum("gjnm,gmd->gjnd", shares, seen_v).flatten(0, 1)


# The loop.


def loop(positions=lambda start, n: torch.arange(start, start + n), again=0, extra=0, cached=True):
    """Variants of the right loop. again: tokens at the end of the prompt that are put in twice."""

    def generate(model, prompt, count, cache):
        answer, tokens, start = [], prompt, 0
        for step in range(count + extra):
            where = positions(start, len(tokens))
            use = cache if cached or step == 0 else None
            answer.append(int(model(torch.tensor([tokens]), where, attention=use)[0, -1].argmax()))
            start, tokens = start + len(tokens), answer[-1:]
            if step == 0 and again:
                tokens = prompt[-again:] + tokens
        return answer[:count]

    return generate


mistake("decode-loop", "the new token one place too far", expect="at position")(
    loop(lambda start, n: torch.arange(start, start + n) + (start > 0))
)
mistake("decode-loop", "the prompt's last token twice", expect="not put in again|put through the model")(loop(again=1))
mistake("decode-loop", "one pass more than asked for", expect="one pass too many")(loop(extra=1))
mistake("decode-loop", "forgets to hand the cache on", expect="without attention=cache")(loop(cached=False))


@mistake("decode-loop", "keeps nothing", expect="need not be computed again")
def keeps_nothing(model, prompt, count, cache):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@mistake("decode-loop", "prefill token by token", expect="prefill takes all its tokens at once")
def token_by_token(model, prompt, count, cache):
    sequence = list(prompt)
    for place in range(len(prompt) + count - 1):
        logits = model(torch.tensor([[sequence[place]]]), torch.tensor([place]), attention=cache)
        if place + 1 >= len(prompt):
            sequence.append(int(logits[0, -1].argmax()))
    return sequence[len(prompt) :]


@mistake("decode-loop", "the prompt and the answer", expect="leave the prompt out")
def with_the_prompt(model, prompt, count, cache):
    return prompt + ANSWERS.generate(model, prompt, count, cache)


@mistake("decode-loop", "the logits of the prompt's first token", expect="of the last token in the pass")
def first_logits(model, prompt, count, cache):
    logits = model(torch.tensor([prompt]), torch.arange(len(prompt)), attention=cache)
    answer = [int(logits[0, 0].argmax())]
    while len(answer) < count:
        place = torch.tensor([len(prompt) + len(answer) - 1])
        answer.append(int(model(torch.tensor([answer[-1:]]), place, attention=cache)[0, 0].argmax()))
    return answer


@mistake("decode-loop", "samples", expect="Take the likeliest token")
def samples(model, prompt, count, cache):
    answer, tokens, start = [], prompt, 0
    for _ in range(count):
        logits = model(torch.tensor([tokens]), torch.arange(start, start + len(tokens)), attention=cache)
        answer.append(int(torch.multinomial(logits[0, -1].softmax(-1), 1)))
        start, tokens = start + len(tokens), answer[-1:]
    return answer


@alternative("decode-loop", "yields, and asks for the last row of logits only")
def yields(model, prompt, count, cache):
    logits = model(torch.tensor([prompt]), torch.arange(len(prompt)), attention=cache, rows=torch.tensor([-1]))
    for place in range(len(prompt), len(prompt) + count):
        token = int(logits[0, 0].argmax())
        yield token
        if place < len(prompt) + count - 1:
            logits = model(torch.tensor([[token]]), torch.tensor([place]), attention=cache)
