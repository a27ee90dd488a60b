"""Spoilers of lab 12: wrong ways to attend with a cache and to decode, and right ones."""

import torch
import torch.nn.functional as F

from course.kit.exercises import KnownAnswers


def attention(q, k, v, visible=None, scale=None):
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v.repeat_interleave(group, 0)


def causal(start, end):
    return torch.arange(end) <= torch.arange(start, end)[:, None]


# Attention with a cache.

cached_attention = KnownAnswers("cached-attention")


@cached_attention.mistake(
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


cached_attention.mistake(
    "mask without position offset",
    {"torch.arange(start, end)[:, None]": "torch.arange(q.shape[1])[:, None]"},
    says="The mask has no offset: query i stands behind the `start` kept tokens and must see those, too.",
)
cached_attention.mistake(
    "no mask: works for one token at a time",
    {'scores.masked_fill(~visible, float("-inf"))': "scores"},
    says="New tokens see those after them: several may come at once, so a mask is needed.",
)
cached_attention.mistake(
    "writes to the front",
    {"keys[:, start:end], values[:, start:end] =": "keys[:, : k.shape[1]], values[:, : k.shape[1]] ="},
    expect="overwritten",
)


@cached_attention.mistake("grows a copy of the cache", expect="is unchanged")
def grows_a_copy(q, k, v, keys, values, start):
    keys, values = (torch.cat([old[:, :start], new], dim=1) for old, new in ((keys, k), (values, v)))
    return attention(q, keys, values, causal(start, keys.shape[1]))


cached_attention.mistake(
    "wrong kv heads",
    {"repeat_interleave(group, dim=0)": "repeat(group, 1, 1)"},
    says="Query heads read the wrong kv heads: neighbours share one (head j reads j // group), which is "
    "repeat_interleave and not repeat.",
)
cached_attention.mistake("not scaled", {" * q.shape[-1] ** -0.5": ""}, says="The scores are not divided by √d.")
cached_attention.mistake(
    "divided by d", {"q.shape[-1] ** -0.5": "q.shape[-1] ** -1"}, says="The scores are divided by d; divide them by √d."
)
cached_attention.mistake(
    "sees one token ahead",
    {"torch.arange(end) <=": "torch.arange(end) - 1 <="},
    says="A new token sees the one behind it as well: its mask must end at its own place.",
)
cached_attention.mistake(
    "does not see itself", {"torch.arange(end) <=": "torch.arange(end) <"}, expect="each sees itself"
)
cached_attention.mistake(
    "a softmax over the queries",
    {"dim=-1": "dim=-2"},
    says="The softmax runs over the queries. The weights of one query sum to 1, so it runs over the keys.",
)
cached_attention.mistake(
    "all places, masked",
    {"kept[:, :end]": "kept", "torch.arange(end) <=": "torch.arange(keys.shape[1]) <="},
    expect="slice the cache to the filled places",
)
cached_attention.mistake(
    "masked scores are zero",
    {'scores.masked_fill(~visible, float("-inf"))': "scores * visible"},
    says="A score of 0 still gets weight, because exp(0) = 1. Masked scores must be -inf before the softmax.",
)


@cached_attention.mistake("all keys masked, values sliced", expect="slice both keys and values")
def all_keys(q, k, v, keys, values, start):
    _, seen_v, end = written(q, k, v, keys, values, start)
    group = q.shape[0] // k.shape[0]
    scores = q @ keys.repeat_interleave(group, 0).mT * q.shape[-1] ** -0.5
    visible = torch.arange(keys.shape[1]) <= torch.arange(start, end)[:, None]
    shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return shares[:, :, :end] @ seen_v.repeat_interleave(group, 0)


@cached_attention.mistake("the whole room in a pass of several tokens", expect="every step costs as much")
def room_in_prefill(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    if k.shape[1] > 1:
        seen_k, seen_v = keys.nan_to_num(0), values.nan_to_num(0)
    return attention(q, seen_k, seen_v, torch.arange(seen_k.shape[1]) <= torch.arange(start, end)[:, None])


OWN = {}


@cached_attention.mistake(
    "keeps its own copy",
    says="The kept keys and values are not those of this cache: other layers come by between two passes. Read them "
    "from `keys` and `values`.",
)
def own_copy(q, k, v, keys, values, start):
    *_, end = written(q, k, v, keys, values, start)
    OWN["kv"] = (k, v) if start == 0 else tuple(torch.cat(both, dim=1) for both in zip(OWN["kv"], (k, v), strict=True))
    return attention(q, *OWN["kv"], causal(start, end))


cached_attention.mistake(
    "returns float64",
    {"scores = q @ seen_k.mT": "scores = q.double() @ seen_k.double().mT", ") @ seen_v": ") @ seen_v.double()"},
    expect="keep q's dtype",
)


@cached_attention.alternative("looks up and writes by indices, a softmax in float32")
def by_indices(q, k, v, keys, values, start):
    end, group = start + k.shape[1], q.shape[0] // k.shape[0]
    for kept, new in ((keys, k), (values, v)):
        kept.scatter_(1, torch.arange(start, end)[:, None].expand_as(new), new)
    places = torch.arange(end)[:, None].expand(k.shape[0], end, k.shape[2])
    seen_k, seen_v = (kept.gather(1, places).repeat_interleave(group, 0) for kept in (keys, values))
    scores = (q @ seen_k.mT / q.shape[-1] ** 0.5).masked_fill(~causal(start, end), float("-inf"))
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ seen_v


@cached_attention.alternative("joins kept and new, writes by indices afterwards")
def joins(q, k, v, keys, values, start):
    seen = (torch.cat([old[:, :start], new], dim=1) for old, new in ((keys, k), (values, v)))
    end = start + k.shape[1]
    y = attention(q, *seen, causal(start, end))
    keys[:, torch.arange(start, end)] = k
    values.index_copy_(1, torch.arange(start, end), v)
    return y


@cached_attention.alternative("one query head after the other")
def head_by_head(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    group, heads = q.shape[0] // k.shape[0], []
    for head in range(q.shape[0]):
        scores = q[head] @ seen_k[head // group].T / q.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~causal(start, end), float("-inf")).softmax(-1) @ seen_v[head // group])
    return torch.stack(heads)


@cached_attention.alternative("torch's fused kernel with the right mask")
def fused(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    mask = causal(start, end)
    return F.scaled_dot_product_attention(q[None], seen_k[None], seen_v[None], attn_mask=mask, enable_gqa=True)[0]


@cached_attention.alternative("query heads grouped, no key is repeated")
def grouped(q, k, v, keys, values, start):
    seen_k, seen_v, end = written(q, k, v, keys, values, start)
    rows = q.unflatten(0, (k.shape[0], -1))
    scores = torch.einsum("gjnd,gmd->gjnm", rows, seen_k) / q.shape[-1] ** 0.5
    shares = scores.masked_fill(~causal(start, end), float("-inf")).softmax(-1)
    return torch.einsum("gjnm,gmd->gjnd", shares, seen_v).flatten(0, 1)


# The loop.

decode_loop = KnownAnswers("decode-loop")

decode_loop.mistake(
    "the new token one place too far",
    {"arange(start, start + len(tokens))": "arange(start, start + len(tokens)) + (start > 0)"},
    expect="at position",
)
decode_loop.mistake(
    "the prompt's last token twice",
    {"len(tokens), answer[-1:]": "len(tokens), prompt[-1:] * (start == 0) + answer[-1:]"},
    expect="not put in again|put through the model",
)
decode_loop.mistake(
    "one pass more than asked for",
    {
        "        if len(answer) == count:\n            return answer": (
            "        if len(answer) > count:\n            return answer[:count]"
        )
    },
    expect="one pass too many",
)
decode_loop.mistake(
    "looks for the end after a second pass",
    {"if len(answer) == count:": "if len(answer) >= max(count, 2):"},
    expect="you returned 2 tokens, the exercise asks for 1",
)
decode_loop.mistake(
    "forgets to hand the cache on",
    {"attention=cache)\n        answer": "attention=None if answer else cache)\n        answer"},
    expect="without attention=cache",
)


@decode_loop.mistake("keeps nothing", expect="need not be computed again")
def keeps_nothing(model, prompt, count, cache):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@decode_loop.mistake("prefill token by token", expect="prefill takes all its tokens at once")
def token_by_token(model, prompt, count, cache):
    sequence = list(prompt)
    for place in range(len(prompt) + count - 1):
        logits = model(torch.tensor([[sequence[place]]]), torch.tensor([place]), attention=cache)
        if place + 1 >= len(prompt):
            sequence.append(int(logits[0, -1].argmax()))
    return sequence[len(prompt) :]


decode_loop.mistake(
    "the prompt and the answer", {"return answer": "return prompt + answer"}, expect="leave the prompt out"
)
decode_loop.mistake(
    "the logits of the prompt's first token", {"logits[0, -1]": "logits[0, 0]"}, expect="of the last token in the pass"
)
decode_loop.mistake(
    "samples",
    {"int(logits[0, -1].argmax())": "int(torch.multinomial(logits[0, -1].softmax(-1), 1))"},
    expect="Take the likeliest token",
)


@decode_loop.alternative("yields, and asks for the last row of logits only")
def yields(model, prompt, count, cache):
    logits = model(torch.tensor([prompt]), torch.arange(len(prompt)), attention=cache, rows=torch.tensor([-1]))
    for place in range(len(prompt), len(prompt) + count):
        token = int(logits[0, 0].argmax())
        yield token
        if place < len(prompt) + count - 1:
            logits = model(torch.tensor([[token]]), torch.tensor([place]), attention=cache)
