"""Speculative decoding as it goes wrong: six programs, enumerated; a criterion that is not exact, in closed form.

The programs differ from `verify` in one thing each, found in published code; one of them is exact all the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course.lab15_speculative_decoding import tiny_models
from course.lab15_speculative_decoding.tiny_models import Tiny
from course.shared.faults.verification import first_unverified, reseeded
from minillm.serve.speculate import Draft, verify
from minillm.serve.speculate.verify import choose

K, VOCAB, TOP_K, PROMPT = 2, 4, 3, (0, 1)


def cut(p: Tensor) -> Tensor:
    """p: [..., vocab], all but the TOP_K likeliest ruled out."""
    lowest = p.topk(TOP_K, dim=-1).values[..., -1:]
    kept = p.masked_fill(p < lowest, 0)
    return kept / kept.sum(-1, keepdim=True)


def _drawn(draft: Tiny, draw: Any) -> tuple[list[int], Tensor]:
    return tiny_models.drawn_draft(lambda tokens: cut(draft(tokens)), choose, PROMPT, K, draw)


def likeliest_as_drawn(target: Callable, draft: Tiny, draw: Any) -> list[int]:
    """The draft takes the likeliest token; the verifier divides by q as if it had sampled it (transformers#32867)."""
    drafted, rows = [], []
    for _ in range(K):
        rows.append(cut(draft([*PROMPT, *drafted])))
        drafted.append(int(rows[-1].argmax()))
    return verify(target(drafted), Draft(drafted, torch.stack(rows)), draw)


def before_top_k(target: Callable, draft: Tiny, draw: Any) -> list[int]:
    """q from before top-k, the draft tokens sampled after it (transformers#47932)."""
    drafted, _ = _drawn(draft, draw)
    q = torch.stack([draft([*PROMPT, *drafted[:i]]) for i in range(K)])
    return verify(target(drafted), Draft(drafted, q), draw)


def checked_by(check: Callable) -> Callable:
    """Draft tokens as they should be, verified in another way."""

    def program(target: Callable, draft: Tiny, draw: Any) -> list[int]:
        drafted, q = _drawn(draft, draw)
        return check(target(drafted), Draft(drafted, q), draw)

    return program


def as_if_certain(target: Callable, draft: Tiny, draw: Any) -> list[int]:
    """A sampled draft token, verified with q = 1: accepted with p, else sampled from p without it (EAGLE#329)."""
    drafted, _ = _drawn(draft, draw)
    return verify(target(drafted), Draft(drafted), draw)


PROGRAMS = {
    "A": checked_by(first_unverified),
    "B": as_if_certain,
    "C": before_top_k,
    "D": checked_by(verify),
    "E": checked_by(reseeded),
    "F": likeliest_as_drawn,
}


def evidence(program: Callable, target: Tiny, draft: Tiny) -> tuple[dict, dict, float, float]:
    """(distribution of K + 1 tokens, the target's, draft tokens accepted in a pass, the most that can be)."""

    def p(tokens):
        return cut(target(tokens))

    def run(draw):
        found = program(lambda drafted: cut(target.rows(PROMPT, drafted)), draft, draw)
        whole = list(found)
        while len(whole) < K + 1:
            whole.append(choose(p([*PROMPT, *whole]), draw))
        return tuple(whole), len(found) - 1

    everything, tokens = tiny_models.enumerated(run), {}
    for (whole, _), chance in everything.items():
        tokens[whole] = tokens.get(whole, 0.0) + chance
    kept = sum(count * chance for (_, count), chance in everything.items())
    most = tiny_models.accepted(p, lambda context: cut(draft(context)), PROMPT, K)
    return tokens, tiny_models.written(p, PROMPT, K + 1), kept, most


def all_evidence(seed: int = 0) -> dict[str, tuple]:
    """Every program on one pair of tiny models."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = Tiny(generator, VOCAB), Tiny(generator, VOCAB)
    return {name: evidence(program, target, draft) for name, program in PROGRAMS.items()}


# One draft token on real distributions, in closed form: p, q of [positions, vocab].


def one_draft_token(p: Tensor, q: Tensor) -> dict[str, Tensor]:
    """{rule: [positions, vocab] what one draft token and its verification give}, right and wrong."""
    kept = torch.minimum(p, q)
    rejected = 1 - kept.sum(-1, keepdim=True)
    left = (p - q).clamp(min=0)
    left = left / left.sum(-1, keepdim=True).clamp(min=1e-300)
    inverted = q * (q / p.clamp(min=1e-300)).clamp(max=1)
    return {
        "accept with min(1, p/q), else from the residual": kept + rejected * left,
        "    else from q": kept + rejected * q,
        "    else from p": kept + rejected * p,
        "accept with min(1, q/p), else from the residual": inverted + (1 - inverted.sum(-1, keepdim=True)) * left,
    }


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """[positions]."""
    return (a - b).abs().sum(-1) / 2


def typical(p: Tensor, q: Tensor, epsilon: float, delta: float | None = None) -> tuple[float, float]:
    """(share of draft tokens accepted, mean total variation) of typical acceptance (Cai et al. 2024, §2.3.1): a
    draft token passes
    if p(x) > min(epsilon, delta · exp(-entropy of p)), however it was sampled; else a token is sampled from p.
    delta: None = √epsilon, as there."""
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1, keepdim=True)
    bound = (delta or epsilon**0.5) * torch.exp(-entropy)
    passes = p > bound.clamp(max=epsilon)
    kept = q * passes
    share = kept.sum(-1, keepdim=True)
    return float(share.mean()), float(total_variation(kept + (1 - share) * p, p).mean())
