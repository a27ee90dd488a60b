"""Spoilers of lab 12: wrong nuclei and wrong distributions, and right ones that look different."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("12_decoding")


def ordered(probabilities):
    return probabilities.sort(descending=True, stable=True)


def back(probabilities, order, kept):
    return torch.zeros_like(probabilities, dtype=torch.bool).index_fill(0, order[kept], True)


@mistake(
    "nucleus",
    "without the token that reaches top_p",
    says="You stop one token early: the one that lifts the sum to top_p stays, so the likeliest always does.",
)
def without_the_last(probabilities, top_p):
    values, order = ordered(probabilities)
    return back(probabilities, order, values.cumsum(-1) < top_p)


@mistake(
    "nucleus",
    "and one more",
    says="One token too many where the sum is exactly top_p: compare the sum before a token with <, not with <=.",
)
def and_one_more(probabilities, top_p):
    values, order = ordered(probabilities)
    return back(probabilities, order, values.cumsum(-1) - values <= top_p)


@mistake(
    "nucleus",
    "tokens more likely than 1 - top_p",
    says="A threshold on single probabilities is another rule. Add up, from the likeliest token on.",
)
def threshold(probabilities, top_p):
    return probabilities > 1 - top_p


@mistake("nucleus", "not sorted", says="You add up in the order of the vocabulary: sort first.")
def not_sorted(probabilities, top_p):
    return probabilities.cumsum(-1) - probabilities < top_p


@mistake(
    "nucleus",
    "every token as likely as the last one",
    says="Comparing with the last probability keeps all its equals: of equally likely tokens only as many stay as are "
    "needed.",
)
def as_likely(probabilities, top_p):
    values, _ = ordered(probabilities)
    last = int((values.cumsum(-1) - values < top_p).sum()) - 1
    return probabilities >= values[last]


@mistake(
    "nucleus",
    "places in the sorted order",
    says="The number is right, but these are places in the sorted order: bring them back to the vocabulary's order.",
)
def sorted_places(probabilities, top_p):
    values, _ = ordered(probabilities)
    return values.cumsum(-1) - values < top_p


@mistake("nucleus", "ascending order", says="You add up from the unlikeliest token on: sort in descending order.")
def ascending(probabilities, top_p):
    values, order = probabilities.sort()
    return back(probabilities, order, values.cumsum(-1) - values < top_p)


@mistake("nucleus", "a share of the tokens", says="top_p is a sum of probabilities, not a share of the vocabulary.")
def share_of_tokens(probabilities, top_p):
    count = max(1, round(top_p * len(probabilities)))
    return back(probabilities, ordered(probabilities)[1], torch.arange(len(probabilities)) < count)


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


mistake(
    "sampling-distribution", "multiplies by the temperature", says="Divide the logits by the temperature; you multiply."
)(steps(scale=lambda logits, t: logits * t))
mistake(
    "sampling-distribution",
    "temperature forgotten",
    says="The temperature has no effect: divide the logits by it, before the softmax.",
)(steps(scale=lambda logits, t: logits))
mistake(
    "sampling-distribution",
    "nucleus before temperature",
    says="The nucleus is cut from the distribution at temperature 1: the temperature comes first.",
)(steps(early=True))
mistake("sampling-distribution", "not divided by its sum", says="What stays has to be divided by its sum.")(
    steps(normalise=False)
)
mistake("sampling-distribution", "k + 1 tokens", says="One token too many: top_k keeps k.")(steps(k=lambda k: k + 1))
mistake("sampling-distribution", "top_p forgotten", says="top_p has no effect in your function.")(
    steps(top_p=lambda p: 1.0)
)


@mistake(
    "sampling-distribution",
    "divides by a temperature of zero",
    says="Temperature 0 cannot divide: give the likeliest token a probability of 1.",
)
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
    says="Keep the k likeliest first and renormalize; the nucleus is one of what these leave.",
)
def nucleus_of_all(logits, temperature, top_k, top_p):
    if temperature == 0 or top_k is None:
        return ANSWERS.distribution(logits, temperature, top_k, top_p)
    probabilities = (logits / temperature).softmax(-1)
    kept = ANSWERS.nucleus(probabilities, top_p) & (logits >= logits.topk(top_k).values[-1])
    kept = kept.double() * probabilities
    return kept / kept.sum()


@mistake(
    "sampling-distribution",
    "excluded logits are zero",
    says="A logit of 0 still has a probability. Excluded logits must be -inf before the softmax.",
)
def zero_logits(logits, temperature, top_k, top_p):
    if temperature == 0 or top_k is None:
        return ANSWERS.distribution(logits, temperature, top_k, top_p)
    logits = logits / temperature
    return ANSWERS.distribution(logits.masked_fill(logits < logits.topk(top_k).values[-1], 0.0), 1.0, None, top_p)


@alternative("sampling-distribution", "in float32")
def in_float32(logits, temperature, top_k, top_p):
    return ANSWERS.distribution(logits.float(), temperature, top_k, top_p)
