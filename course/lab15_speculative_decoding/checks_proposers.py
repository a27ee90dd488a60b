"""Lab 15, where draft tokens come from: a draft that says what it drew from, and what followed the last time."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab15_speculative_decoding import experiments, tiny_models
from course.lab15_speculative_decoding import experiments_runs as runs
from course.lab15_speculative_decoding.checks import PROMPT
from course.lab15_speculative_decoding.tiny_models import NOTHING, Tiny
from course.shared.diagnose import expect
from minillm.serve import SamplingParams
from minillm.serve.speculate.verify import distribution

VOCAB = 3


ANSWERS = answers_of("15_speculative_decoding")


@exercise(
    "honest-draft",
    minutes=15,
    difficulty=3,
    hints=(
        "The verifier divides by the probability with which a draft token was really sampled. So the row that you "
        "return and the row that you sample from are one object.",
        "Divide by the temperature, rule out all but the top_k largest logits (-inf), softmax, draw, keep the row. A "
        "draft token of temperature 0 was not sampled from anything: there is no row to return.",
    ),
)
def check_draft(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for temperature, top_k, k in ((1.0, VOCAB, 2), (0.6, VOCAB, 1), (1.4, 2, 3), (1.0, 2, 2)):
        draft, target = Tiny(generator, VOCAB), Tiny(generator, VOCAB)
        rows += _hold_draft(learner, draft, target, temperature, top_k, k)
    for vocab, top_k in ((5, 2), (5, 1), (9, random.randint(3, 4)), (9, random.randint(6, 8))):
        draft, target = Tiny(generator, vocab), Tiny(generator, vocab)
        rows += _hold_draft(learner, draft, target, round(random.uniform(0.5, 1.5), 2), top_k, 1)
    draft = Tiny(generator, VOCAB)
    k = random.randint(4, 12)
    found = tiny_models.enumerated(lambda draw: _drafted(learner, draft, k, 0.0, VOCAB, draw)[0])
    if found != {tuple(ANSWERS.honest_draft(draft.scores, PROMPT, k, 0.0, VOCAB, None)[0]): 1.0}:
        raise CheckFailed(f"temperature 0 drafts {found}: it is always the likeliest token after those before it", rows)
    said = learner(draft.scores, list(PROMPT), k, 0.0, VOCAB, tiny_models.seeded())[1]
    if isinstance(said, Tensor) and said.shape == (k, VOCAB) and bool((said.amax(-1) == 1).all()):
        raise CheckFailed("temperature 0 returns rows of a single 1: exact, but the exercise asks for None", rows)
    if said is not None:
        raise CheckFailed(
            "temperature 0 returns probabilities, but the likeliest token was not sampled from them: verified as if it "
            "had been, it would be accepted with p/q, too often. Return None",
            rows,
        )
    rows.append(row("temperature 0: nothing sampled, nothing declared", True, True))
    return receipt("drafts: what was sampled, and what is said about it", rows)


def _drafted(learner: Callable, draft: Tiny, k: int, temperature: float, top_k: int, draw: Any) -> tuple[tuple, Any]:
    found = learner(draft.scores, list(PROMPT), k, temperature, top_k, draw)
    expect(isinstance(found, tuple | list) and len(found) == 2, found, "two things: (draft tokens, rows)")
    tokens, q = found
    if isinstance(tokens, list | tuple):  # argmax gives a tensor
        tokens = [token.item() if isinstance(token, Tensor) and token.ndim == 0 else token for token in tokens]
    expect(tiny_models.is_tokens(tokens, draft.vocab), tokens, "a list of draft tokens", "as draft tokens you")
    if len(tokens) != k:
        raise CheckFailed(f"{len(tokens)} draft tokens where k = {k} were asked for")
    return tuple(tokens), q


def _hold_draft(learner: Callable, draft: Tiny, target: Tiny, temperature: float, top_k: int, k: int) -> list:
    name, said = f"temperature {temperature}, top-k {top_k}", {}
    params = SamplingParams(temperature=temperature, top_k=top_k if top_k < draft.vocab else None)

    def warped(model: Tiny) -> Callable:
        return lambda tokens: distribution(model.scores(tokens), params, tokens).double()

    def run(draw):
        drafted, q = _drafted(learner, draft, k, temperature, top_k, draw)
        if not isinstance(q, Tensor) or q.shape != (k, draft.vocab):
            raise CheckFailed(
                f"{name}: rows of shape {getattr(q, 'shape', q)}; the exercise asks for [{k}, {draft.vocab}]"
            )
        for place in range(k):
            said[drafted[:place]] = q[place].double()
        return drafted

    drawn = tiny_models.enumerated(run)
    p, own, off = warped(target), warped(draft), 0.0
    for place in range(k):
        total = tiny_models.first(drawn, place)
        for before, chance in total.items():
            shares = torch.tensor(
                [tiny_models.first(drawn, place + 1).get((*before, x), 0.0) for x in range(draft.vocab)]
            )
            shares = shares.double() / chance
            if float((shares - said[before]).abs().sum()) / 2 > 1e-6:
                raise CheckFailed(_say_dishonest(shares, said[before], draft, name, place, before))
            off = max(off, float((own([*PROMPT, *before]) - said[before]).abs().max()))
    kept = sum(
        float(torch.minimum(p([*PROMPT, *before]), said[before]).sum()) * chance
        for before, chance in tiny_models.first(drawn, 0).items()
    )
    best = float(torch.minimum(p(PROMPT), own(PROMPT)).sum())
    rows = [
        row(f"{name}: sampled as declared", True, True),
        row("    first draft token accepted: Σ min(p, q), both warped", best, kept, "", 1e-6),
    ]
    if off > 1e-6:
        raise CheckFailed(
            f"{name}: honest, so the answer stays exact, but not the request's own distribution: rows differ by "
            f"{off:.3f} from softmax(logits / temperature) over the top-k after all tokens so far. A draft token is "
            f"accepted {kept:.3f} of the time; with the request's own distribution it would be {best:.3f}",
            rows,
        )
    return rows


def _say_dishonest(drawn: Tensor, said: Tensor, draft: Tiny, name: str, place: int, before: tuple) -> str:
    head = f"{name}: draft token {place + 1} is sampled from {_show(drawn)}, but its row says {_show(said)}: "
    raw = torch.softmax(draft.scores([*PROMPT, *before]), dim=-1)
    if float(drawn.max()) > 1 - NOTHING:
        return head + "the likeliest token, declared as if it had been sampled. The verifier would accept it too often"
    if int((said > 0).sum()) > int((drawn > 0).sum()):
        return head + "the row is from before top-k, so q is too small where draft tokens are, and they pass too often"
    if torch.allclose(said, raw, atol=1e-6):
        return head + "the row is from before the temperature"
    return head + "keep the very row that you drew from"


def _show(row_of: Tensor) -> str:
    return "(" + ", ".join(f"{x:.2f}" for x in row_of.tolist()) + ")"


@exercise(
    "prompt-lookup",
    minutes=15,
    difficulty=2,
    hints=(
        "The ending itself is an occurrence of the ending, with nothing behind it. Where else does it occur?",
        "For size = longest down to 1: compare tokens[-size:] with every earlier place, from the back. The first hit "
        "has the longest ending and is the most recent. What followed it is the answer.",
    ),
)
def check_look_up(learner: Callable) -> Receipt:
    small = [
        ([1, 2, 3, 9, 1, 2, 3], 2, "an ending that occurred once"),
        ([1, 2, 3, 9, 1, 2, 3], 1, "more follows than k"),
        ([4, 7, 5, 4, 8, 6, 4], 2, "an ending that occurred twice: the most recent counts"),
        ([7, 8, 7], 2, "an occurrence at the very beginning"),
        ([1, 2, 5, 0, 2, 6, 3, 1, 2], 2, "a long ending long ago, a short one just now: the longest counts"),
        ([1, 2, 3, 4, 9, 0, 2, 3, 4, 8, 1, 2, 3, 4], 2, "at most `longest` tokens of the ending count"),
        ([3, 3, 3], 3, "an occurrence that overlaps the ending"),
        ([5, 6, 7], 4, "nothing repeated"),
        ([5], 4, "one token"),
        ([8, 1, 8], 4, "little behind it"),
        ([2, 7, 12, 5, 2], 2, "a token of two digits that ends in the digit of another is not that token"),
    ]
    drawn = random.Random(random.random())
    small += [
        ([drawn.randrange(4) for _ in range(drawn.randint(1, 14))], drawn.randint(1, 4), "at random")
        for _ in range(300)
    ]
    for tokens, k, lesson in small:
        _hold_look_up(learner, tokens, k, lesson, None)
    for _ in range(100):
        tokens, longest = [drawn.randrange(3) for _ in range(drawn.randint(1, 40))], drawn.choice((1, 2, 4, 5))
        _hold_look_up(learner, tokens, drawn.randint(1, 6), f"longest = {longest}", longest)
    rows = [row("small texts answered right", len(small) + 100, len(small) + 100)]
    for kind in experiments.KINDS:
        ids = experiments.texts(kind)[0]
        expected, found = (runs.replay(ids, one, 6) for one in (_what_followed, learner))
        rows.append(row(f"passes to write {len(ids)} tokens of {kind}, K = 6", expected, found))
    return receipt("prompt lookup", rows)


def _what_followed(tokens: Sequence[int], k: int, longest: int = 3) -> list[int]:
    """The right answer: of all earlier places, the last of those that share the most tokens with the ending."""

    def shared(place: int) -> int:
        pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], itertools.islice(pairs, longest))
        return len(list(same))

    best = max(range(1, len(tokens)), key=lambda place: (shared(place), place), default=0)
    return list(tokens[best : best + k]) if best and shared(best) else []


def _hold_look_up(learner: Callable, tokens: list[int], k: int, lesson: str, longest: int | None) -> None:
    """longest: None leaves it to the default."""
    given = (list(tokens), k) if longest is None else (list(tokens), k, longest)
    found, right = learner(*given), _what_followed(*given)
    expect(tiny_models.is_tokens(found, 1 << 30), found, "a list of tokens, empty if nothing is found")
    found = list(found)
    if found == right:
        return
    raise CheckFailed(f"{lesson}: after {tokens}, k = {k}, you return {found}; it should be {right}.", evidence=found)
