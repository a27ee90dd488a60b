"""Spoilers of lab 15: drafts that do not say what they drew from, look-ups that find the wrong place."""

import torch

from course.kit.exercises import KnownAnswers
from minillm.serve.speculate.verify import choose

# The draft.

honest_draft = KnownAnswers("honest-draft")

honest_draft.mistake(
    "takes the likeliest, declares probabilities",
    {"choose(rows[-1], draw)": "int(rows[-1].argmax())"},
    expect="as if it had been sampled",
)
honest_draft.mistake(
    "rows from before top-k",
    {"draw))\n": "draw))\n        rows[-1] = torch.softmax(logits / temperature, dim=-1)\n"},
    expect="before top-k",
)
honest_draft.mistake(
    "rows from before the temperature",
    {"draw))\n": "draw))\n        rows[-1] = torch.softmax(kept * temperature, dim=-1)\n"},
    expect="before the temperature",
)
honest_draft.mistake(
    "ignores the request: honest, but rarely accepted",
    {'(logits / temperature).masked_fill(logits < lowest, float("-inf"))': "logits"},
    expect="honest, so the answer stays exact",
)
honest_draft.mistake(
    "every draft token after the verified tokens", {"[*tokens, *drafted]": "tokens"}, expect="after all tokens so far"
)
honest_draft.mistake(
    "temperature 0 with probabilities",
    {"continue": "rows.append(torch.softmax(logits, dim=-1))\n            continue"},
    expect="was not sampled from them",
)


honest_draft.mistake(
    "temperature 0 with rows of a single 1",
    {"continue": "rows.append(torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0))\n            continue"},
    expect="exact, but the exercise asks for None",
)


honest_draft.mistake(
    "the top_k-th smallest",
    {"logits.topk(top_k).values[-1]": "logits.sort().values[top_k - 1 if top_k < len(logits) else 0]"},
    expect="not the request's own distribution",
)
honest_draft.mistake("top-2 whatever top_k", {"topk(top_k)": "topk(min(top_k, 2))"}, expect="own distribution")
honest_draft.mistake(
    "one token too many ruled out",
    {"logits < lowest": "logits <= (lowest if top_k < len(logits) else lowest - 1)"},
    expect="own distribution|nan",
)
honest_draft.alternative(
    "divides the logits in place",
    {"lowest = logits": "logits /= temperature\n        lowest = logits", "(logits / temperature)": "logits"},
)
honest_draft.alternative("tokens of argmax as they are", {"int(logits.argmax())": "logits.argmax()"})


@honest_draft.alternative("top-k by sorting, one recursive draft token")
def by_sorting(scores, tokens, k, temperature, top_k, draw):
    if k == 0:
        return [], None
    logits = scores(list(tokens))
    if temperature == 0:
        token, q = int(torch.argmax(logits)), None
    else:
        keep = logits.argsort(descending=True)[:top_k]
        q = torch.zeros_like(logits)
        q[keep] = torch.softmax(logits[keep] / temperature, dim=-1)
        token = choose(q, draw)
    later, rows = by_sorting(scores, [*tokens, token], k - 1, temperature, top_k, draw)
    return [token, *later], None if q is None else torch.stack([q, *([] if rows is None else rows)])


# Prompt lookup.

prompt_lookup = KnownAnswers("prompt-lookup")

prompt_lookup.mistake(
    "finds the ending itself",
    {"len(tokens) - 1), 0": "len(tokens)), 0", "len(tokens) - size - 1, -1": "len(tokens) - size, -1"},
    says="It finds the ending itself, with nothing behind it.",
)
prompt_lookup.mistake(
    "oldest occurrence",
    {"range(len(tokens) - size - 1, -1, -1)": "range(len(tokens) - size)"},
    says="Of several occurrences the most recent one counts.",
)
prompt_lookup.mistake(
    "shortest ending first",
    {"range(min(longest, len(tokens) - 1), 0, -1)": "range(1, min(longest, len(tokens) - 1) + 1)"},
    says="Try the longest ending first.",
)
prompt_lookup.mistake(
    "no limit to the ending",
    {"min(longest, len(tokens) - 1)": "len(tokens) - 1"},
    says="The ending is `longest` tokens at most; you match longer ones.",
)
prompt_lookup.mistake(
    "endings of three tokens, whatever `longest`",
    {"min(longest, len(tokens) - 1)": "min(3, len(tokens) - 1)"},
    says="`longest` says how many tokens of the ending count; yours are three whatever it is.",
)
prompt_lookup.mistake(
    "never looks at the first place",
    {"size - 1, -1, -1)": "size - 1, 0, -1)"},
    says="Place 0 counts, too: your range of places stops before it.",
)
prompt_lookup.mistake(
    "begins with the last token",
    {"tokens[start + size : start + size + k]": "tokens[start + size - 1 : start + size - 1 + k]"},
    says="Off by one: the answer begins behind the occurrence.",
)
prompt_lookup.mistake(
    "all that followed", {"start + size : start + size + k": "start + size :"}, says="At most k tokens are asked for."
)
prompt_lookup.mistake(
    "repeats the ending where nothing is found",
    {"return []": "return tokens[-1:]"},
    says="Without an earlier occurrence return [].",
)
prompt_lookup.mistake(
    "skips occurrences that overlap the ending",
    {"len(tokens) - size - 1, -1, -1": "len(tokens) - 2 * size, -1, -1"},
    says="An earlier occurrence may overlap the ending: in 3 3 3 the ending 3 3 occurred one place before.",
)
prompt_lookup.mistake(
    "fills up to k by repetition",
    {"tokens[start + size : start + size + k]": "(tokens[start + size : start + size + k] * k)[:k]"},
    says="It is filled up to k tokens. If fewer follow the occurrence, return fewer.",
)
prompt_lookup.mistake(
    "the longest ending only",
    {"range(min(longest, len(tokens) - 1), 0, -1)": "[min(longest, len(tokens) - 1)]"},
    says="If the longest ending did not occur before, try shorter ones.",
)


prompt_lookup.mistake(
    "no default for longest", {"longest=3": "longest"}, expect="missing 1 required positional argument"
)


@prompt_lookup.mistake("searches in the digits", expect="ends in the digit of another")
def in_digits(tokens, k, longest=3):
    text = " ".join(map(str, tokens))
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        ending = " ".join(map(str, tokens[-size:]))
        if (place := text.rfind(ending, 0, len(text) - 1)) >= 0:
            return [int(token) for token in text[place + len(ending) :].split()[:k]]
    return []


@prompt_lookup.alternative("an index from endings to what follows")
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
