"""Spoilers of lab 12: wrong nuclei and wrong distributions, and right ones that look different."""

import torch

from minillm.labkit.answers import answers_of
from minillm.labkit.exercises import alternative, mistake

ANSWERS = answers_of("12_decoding")


def ordered(probabilities):
    return probabilities.sort(descending=True, stable=True)


def back(probabilities, order, kept):
    return torch.zeros_like(probabilities, dtype=torch.bool).index_fill(0, order[kept], True)


@mistake(
    "nucleus", "without the token that reaches top_p", expect="the token with which the sum reaches|nothing is kept"
)
def without_the_last(probabilities, top_p):
    values, order = ordered(probabilities)
    return back(probabilities, order, values.cumsum(-1) < top_p)


@mistake("nucleus", "and one more", expect="sum to .* already")
def and_one_more(probabilities, top_p):
    values, order = ordered(probabilities)
    return back(probabilities, order, values.cumsum(-1) - values <= top_p)


@mistake("nucleus", "tokens more likely than 1 - top_p", expect="nothing is kept|already|reaches top_p")
def threshold(probabilities, top_p):
    return probabilities > 1 - top_p


@mistake("nucleus", "not sorted", expect="sorted|already|reaches top_p")
def not_sorted(probabilities, top_p):
    return probabilities.cumsum(-1) - probabilities < top_p


@mistake("nucleus", "every token as likely as the last one", expect="sum to .* already")
def as_likely(probabilities, top_p):
    values, _ = ordered(probabilities)
    last = int((values.cumsum(-1) - values < top_p).sum()) - 1
    return probabilities >= values[last]


@mistake("nucleus", "places in the sorted order", expect="back to the vocabulary's order")
def sorted_places(probabilities, top_p):
    values, _ = ordered(probabilities)
    return values.cumsum(-1) - values < top_p


@alternative("nucleus", "takes one after the other")
def one_by_one(probabilities, top_p):
    kept, total = torch.zeros_like(probabilities, dtype=torch.bool), 0.0
    for token in ordered(probabilities)[1].tolist():
        if total >= top_p:
            break
        kept[token], total = True, total + float(probabilities[token])
    return kept


def steps(scale=lambda logits, t: logits / t, k=lambda k: k, early=False, normalise=True, top_p=lambda p: p):
    """Variants of the right distribution. early: the nucleus of temperature 1."""

    def distribution(logits, temperature, top_k, p):
        if temperature == 0:
            return ANSWERS.distribution(logits, 0, top_k, p)
        cold = scale(logits, temperature)
        if top_k is not None:
            cold = cold.masked_fill(cold < cold.topk(k(top_k)).values[-1], float("-inf"))
        shares = cold.softmax(-1)
        seen = logits.masked_fill(cold.isinf(), float("-inf")).softmax(-1) if early else shares
        kept = shares.masked_fill(~ANSWERS.nucleus(seen, top_p(p)), 0.0)
        return kept / kept.sum() if normalise else kept

    return distribution


mistake("sampling-distribution", "multiplies by the temperature", expect="divided by the temperature, not multiplied")(
    steps(scale=lambda logits, t: logits * t)
)
mistake("sampling-distribution", "temperature forgotten", expect="the temperature has no effect")(
    steps(scale=lambda logits, t: logits)
)
mistake("sampling-distribution", "nucleus before temperature", expect="temperature comes first")(steps(early=True))
mistake("sampling-distribution", "not divided by its sum", expect="divided by its sum")(steps(normalise=False))
mistake("sampling-distribution", "k + 1 tokens", expect="one token too many")(steps(k=lambda k: k + 1))
mistake("sampling-distribution", "top_p forgotten", expect="top_p has no effect")(steps(top_p=lambda p: 1.0))


@mistake("sampling-distribution", "divides by a temperature of zero", expect="Temperature 0 is no division")
def divides_by_zero(logits, temperature, top_k, top_p):
    scores = logits / temperature
    if top_k is not None:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], float("-inf"))
    shares = scores.softmax(-1)
    kept = shares.masked_fill(~ANSWERS.nucleus(shares, top_p), 0.0)
    return kept / kept.sum()


@alternative("sampling-distribution", "minus infinity and a second softmax")
def by_logits(logits, temperature, top_k, top_p):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    logits = (logits - logits.max()) / temperature
    out = torch.full_like(logits, float("-inf"))
    best = logits.topk(top_k or len(logits)).indices
    out[best] = logits[best]
    return out.masked_fill(~ANSWERS.nucleus(out.softmax(-1), top_p), float("-inf")).softmax(-1)


@mistake(
    "sampling-distribution",
    "the nucleus of all tokens, then the k likeliest",
    expect="cut to the k likeliest first",
)
def nucleus_of_all(logits, temperature, top_k, top_p):
    if temperature == 0 or top_k is None:
        return ANSWERS.distribution(logits, temperature, top_k, top_p)
    probabilities = (logits / temperature).softmax(-1)
    kept = ANSWERS.nucleus(probabilities, top_p) & (logits >= logits.topk(top_k).values[-1])
    kept = kept.double() * probabilities
    return kept / kept.sum()
