"""Spoilers of lab 12: wrong nuclei and wrong distributions, and right ones that look different."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("12_decoding")


def ordered(probabilities):
    return probabilities.sort(descending=True, stable=True)


def back(probabilities, order, kept):
    return torch.zeros_like(probabilities, dtype=torch.bool).index_fill(0, order[kept], True)


nucleus = KnownAnswers("nucleus")

nucleus.mistake("no case for top_p 1", {"if top_p >= 1:": "if top_p > 1:"}, expect="top_p 1 keeps all")
nucleus.mistake(
    "without the token that reaches top_p",
    {"ordered.cumsum(-1) - ordered": "ordered.cumsum(-1)"},
    says="You stop one token early: the one that lifts the sum to top_p stays, so the likeliest always does.",
)
nucleus.mistake(
    "and one more",
    {"likelier < top_p": "likelier <= top_p"},
    says="One token too many where the sum is exactly top_p: compare the sum before a token with <, not with <=.",
)


@nucleus.mistake(
    "tokens more likely than 1 - top_p",
    says="A threshold on single probabilities is another rule. Add up, from the likeliest token on.",
)
def threshold(probabilities, top_p):
    return probabilities > 1 - top_p


nucleus.mistake(
    "not sorted",
    {"probabilities.sort(descending=True, stable=True)": "probabilities, torch.arange(len(probabilities))"},
    says="You add up in the order of the vocabulary: sort first.",
)


@nucleus.mistake(
    "every token as likely as the last one",
    says="Comparing with the last probability keeps all its equals: of equally likely tokens only as many stay as are "
    "needed.",
)
def as_likely(probabilities, top_p):
    values, _ = ordered(probabilities)
    last = int((values.cumsum(-1) - values < top_p).sum()) - 1
    return probabilities >= values[last]


nucleus.mistake(
    "places in the sorted order",
    {"order[likelier < top_p]": "(likelier < top_p).nonzero()[:, 0]"},
    says="The number is right, but these are places in the sorted order: bring them back to the vocabulary's order.",
)
nucleus.mistake(
    "ascending order",
    {"descending=True, ": ""},
    says="You add up from the unlikeliest token on: sort in descending order.",
)


@nucleus.mistake("a share of the tokens", says="top_p is a sum of probabilities, not a share of the vocabulary.")
def share_of_tokens(probabilities, top_p):
    count = max(1, round(top_p * len(probabilities)))
    return back(probabilities, ordered(probabilities)[1], torch.arange(len(probabilities)) < count)


nucleus.mistake(
    "no more than 64 tokens",
    {"order[likelier < top_p]": "order[:64][likelier[:64] < top_p]"},
    says="A flat distribution needs more tokens than you allow: the nucleus has no largest size.",
)
nucleus.mistake(
    "all tokens from top_p 0.99 on",
    {"top_p >= 1:": "top_p >= 0.99:"},
    says="You keep all although top_p is below 1: only 1 itself keeps all.",
)


@nucleus.alternative("takes one after the other")
def one_by_one(probabilities, top_p):
    kept, total = torch.zeros_like(probabilities, dtype=torch.bool), 0.0
    for token in ordered(probabilities)[1].tolist():
        if total >= top_p < 1:
            break
        kept[token], total = True, total + float(probabilities[token])
    return kept


sampling_distribution = KnownAnswers("sampling-distribution")

sampling_distribution.mistake(
    "multiplies by the temperature",
    {"logits / temperature": "logits * temperature"},
    says="Divide the logits by the temperature; you multiply.",
)
sampling_distribution.mistake(
    "temperature forgotten",
    {"    logits = logits / temperature\n": ""},
    says="The temperature has no effect: divide the logits by it, before the softmax.",
)
sampling_distribution.mistake(
    "nucleus before temperature",
    {"    logits = logits / temperature\n": "", "kept = probabilities.": "kept = (logits / temperature).softmax(-1)."},
    says="The nucleus is cut from the distribution at temperature 1: the temperature comes first.",
)
sampling_distribution.mistake(
    "not divided by its sum", {"kept / kept.sum()": "kept"}, says="What stays has to be divided by its sum."
)
sampling_distribution.mistake(
    "k + 1 tokens",
    {"min(top_k, len(logits))": "min(top_k + 1, len(logits))"},
    says="One token too many: top_k keeps k.",
)
sampling_distribution.mistake(
    "all equals at the border of top-k",
    {
        'torch.full_like(logits, float("-inf"))\n        logits[best.indices] = best.values': (
            'logits.masked_fill(logits < best.values[-1], float("-inf"))'
        )
    },
    says="Comparing with the k-th logit keeps all its equals, so more than k tokens stay possible.",
)
sampling_distribution.mistake(
    "more tokens asked for than there are", {"min(top_k, len(logits))": "top_k"}, expect="out of range"
)


@sampling_distribution.mistake("a nucleus of its own, with no case for top_p 1", expect="top_p 1 keeps all")
def own_nucleus(logits, temperature, top_k, top_p):
    shares = ANSWERS.distribution(logits, temperature, top_k, 1.0)
    values, order = ordered(shares)
    kept = shares.masked_fill(~back(shares, order, values.cumsum(-1) - values < top_p), 0.0)
    return kept / kept.sum()


sampling_distribution.mistake(
    "top_p forgotten", {"probabilities, top_p)": "probabilities, 1.0)"}, says="top_p has no effect in your function."
)
sampling_distribution.mistake(
    "a softmax that overflows",
    {"probabilities = logits.softmax(-1)": "probabilities = logits.exp() / logits.exp().sum()"},
    expect="subtract the largest",
)
sampling_distribution.mistake(
    "equals share at temperature 0",
    {"torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)": "torch.softmax(logits * 1e9, -1)"},
    says="At temperature 0 equally likely tokens share the probability: one token is certain, whichever of them.",
)
sampling_distribution.mistake(
    "divides by a temperature of zero",
    {"if temperature == 0:": "if False:"},
    says="Temperature 0 cannot divide: give the likeliest token a probability of 1.",
)


@sampling_distribution.alternative("minus infinity and a second softmax")
def by_logits(logits, temperature, top_k, top_p):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    logits = (logits - logits.max()) / temperature
    out = torch.full_like(logits, float("-inf"))
    best = logits.topk(min(top_k or len(logits), len(logits))).indices
    out[best] = logits[best]
    return out.masked_fill(~ANSWERS.nucleus(out.softmax(-1), top_p), float("-inf")).softmax(-1)


@sampling_distribution.mistake(
    "the nucleus of all tokens, then the k likeliest",
    says="Keep the k likeliest first and renormalize; the nucleus is one of what these leave.",
)
def nucleus_of_all(logits, temperature, top_k, top_p):
    if temperature == 0 or top_k is None:
        return ANSWERS.distribution(logits, temperature, top_k, top_p)
    probabilities = (logits / temperature).softmax(-1)
    kept = ANSWERS.nucleus(probabilities, top_p) & (logits >= logits.topk(min(top_k, len(logits))).values[-1])
    kept = kept.double() * probabilities
    return kept / kept.sum()


sampling_distribution.mistake(
    "excluded logits are zero",
    {'float("-inf")': "0.0"},
    says="A logit of 0 still has a probability. Excluded logits must be -inf before the softmax.",
)


@sampling_distribution.alternative("in float32")
def in_float32(logits, temperature, top_k, top_p):
    return ANSWERS.distribution(logits.float(), temperature, top_k, top_p)
