"""Spoilers of lab 15: drafts that do not say what they drew from, look-ups that find the wrong place."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake
from minillm.serve.speculate.verify import choose

right = answers_of("15_speculative_decoding")

# The draft.


def warped(logits, temperature, top_k):
    lowest = logits.topk(top_k).values[-1]
    return torch.softmax((logits / temperature).masked_fill(logits < lowest, float("-inf")), dim=-1)


def drafting(*, pick=choose, said=None, drawn=warped, context=lambda tokens, guesses: [*tokens, *guesses]):
    def draft(scores, tokens, k, temperature, top_k, draw):
        if temperature == 0:
            return right.honest_draft(scores, tokens, k, temperature, top_k, draw)
        guesses, rows = [], []
        for _ in range(k):
            logits = scores(context(tokens, guesses))
            row = drawn(logits, temperature, top_k)
            rows.append(row if said is None else said(logits, temperature, top_k))
            guesses.append(pick(row, draw))
        return guesses, torch.stack(rows)

    return draft


mistake("honest-draft", "takes the likeliest, declares probabilities", expect="as if it had been sampled")(
    drafting(pick=lambda row, draw: int(row.argmax()))
)
mistake("honest-draft", "rows from before top-k", expect="before top-k")(
    drafting(said=lambda logits, temperature, top_k: torch.softmax(logits / temperature, dim=-1))
)
mistake("honest-draft", "rows from before the temperature", expect="before the temperature")(
    drafting(said=lambda logits, temperature, top_k: warped(logits, 1.0, top_k))
)
mistake("honest-draft", "ignores the request: honest, but rarely accepted", expect="honest, so the answer stays exact")(
    drafting(drawn=lambda logits, temperature, top_k: torch.softmax(logits, dim=-1))
)
mistake("honest-draft", "every draft token after the verified tokens", expect="after all tokens so far")(
    drafting(context=lambda tokens, guesses: tokens)
)


@mistake("honest-draft", "temperature 0 with probabilities", expect="was not sampled from them")
def greedy_with_rows(scores, tokens, k, temperature, top_k, draw):
    guesses, rows = right.honest_draft(scores, tokens, k, temperature, top_k, draw)
    if rows is None:
        known = [*tokens, *guesses]
        rows = torch.stack([torch.softmax(scores(known[: len(tokens) + i]), dim=-1) for i in range(k)])
    return guesses, rows


@alternative("honest-draft", "top-k by sorting, one recursive draft token")
def by_sorting(scores, tokens, k, temperature, top_k, draw):
    if k == 0:
        return [], None
    logits = scores(list(tokens))
    if temperature == 0:
        guess, q = int(torch.argmax(logits)), None
    else:
        keep = logits.argsort(descending=True)[:top_k]
        q = torch.zeros_like(logits)
        q[keep] = torch.softmax(logits[keep] / temperature, dim=-1)
        guess = choose(q, draw)
    later, rows = by_sorting(scores, [*tokens, guess], k - 1, temperature, top_k, draw)
    return [guess, *later], None if q is None else torch.stack([q, *([] if rows is None else rows)])


# Prompt lookup.


@mistake("prompt-lookup", "finds the ending itself", says="It finds the ending itself, with nothing behind it.")
def finds_itself(tokens, k, longest=3):
    for size in range(min(longest, len(tokens)), 0, -1):
        for start in range(len(tokens) - size, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + k]
    return []


@mistake("prompt-lookup", "oldest occurrence", says="Of several occurrences the most recent one counts.")
def oldest(tokens, k, longest=3):
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + k]
    return []


@mistake("prompt-lookup", "shortest ending first", says="Try the longest ending first.")
def shortest_first(tokens, k, longest=3):
    for size in range(1, min(longest, len(tokens) - 1) + 1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + k]
    return []


@mistake(
    "prompt-lookup", "no limit to the ending", says="The ending is `longest` tokens at most; you match longer ones."
)
def no_limit(tokens, k, longest=3):
    return right.look_up(tokens, k, len(tokens))


@mistake(
    "prompt-lookup",
    "never looks at the first place",
    says="Place 0 counts, too: your range of places stops before it.",
)
def not_the_first(tokens, k, longest=3):
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size - 1, 0, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + k]
    return []


@mistake("prompt-lookup", "begins with the last token", says="Off by one: the answer begins behind the occurrence.")
def one_early(tokens, k, longest=3):
    found = right.look_up(tokens, k, longest)
    return [tokens[-1], *found][:k] if found else []


@mistake("prompt-lookup", "all that followed", says="At most k tokens are asked for.")
def all_of_it(tokens, k, longest=3):
    return right.look_up(tokens, len(tokens), longest)


@mistake("prompt-lookup", "repeats the ending where nothing is found", says="Without an earlier occurrence return [].")
def always_something(tokens, k, longest=3):
    return right.look_up(tokens, k, longest) or tokens[-1:]


@mistake(
    "prompt-lookup",
    "skips occurrences that overlap the ending",
    says="An earlier occurrence may overlap the ending: in 3 3 3 the ending 3 3 occurred one place before.",
)
def no_overlap(tokens, k, longest=3):
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - 2 * size, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + k]
    return []


@mistake(
    "prompt-lookup",
    "fills up to k by repetition",
    says="It is filled up to k tokens. If fewer follow the occurrence, return fewer.",
)
def padded(tokens, k, longest=3):
    found = right.look_up(tokens, k, longest)
    return (found * k)[:k]


@mistake(
    "prompt-lookup", "the longest ending only", says="If the longest ending did not occur before, try shorter ones."
)
def longest_only(tokens, k, longest=3):
    size = min(longest, len(tokens) - 1)
    for start in range(len(tokens) - size - 1, -1, -1):
        if size and tokens[start : start + size] == tokens[-size:]:
            return tokens[start + size : start + size + k]
    return []


@alternative("prompt-lookup", "an index from endings to what follows")
def indexed(tokens, k, longest=3):
    after = {}
    for end in range(1, len(tokens)):
        for size in range(1, min(longest, end) + 1):
            after[tuple(tokens[end - size : end])] = end
    for size in range(longest, 0, -1):
        place = after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
        if place is not None:
            return tokens[place : place + k]
    return []
