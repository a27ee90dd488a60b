"""How much of a proposer's drafts the target accepts on text nobody trained on: one sequence at a time, no engine."""

from collections.abc import Iterator

import torch

from minillm.data import Tokens
from minillm.model import Transformer
from minillm.model.draw import Draw
from minillm.model.generate import KVCache
from minillm.serve.requests.params import SamplingParams
from minillm.serve.speculate.heads import hidden_states
from minillm.serve.speculate.proposal import DraftRequest, Proposer
from minillm.serve.speculate.proposers.eagle import Eagle
from minillm.serve.speculate.proposers.early_exit import EarlyExit
from minillm.serve.speculate.proposers.medusa import Medusa
from minillm.serve.speculate.verify import distribution, verify


def proposer_of(kind: str, target: Transformer, head=None) -> Proposer:
    """The proposer of a trained kind; head: None = its committed weights."""
    return {"medusa": Medusa, "eagle": Eagle, "early_exit": EarlyExit}[kind](target, head)


def acceptance_by_place(
    target: Transformer,
    proposer: Proposer,
    tokens: Tokens,
    temperature: float,
    *,
    k: int = 4,
    prompts: int = 16,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
) -> list[float]:
    """[k]: of the drafts that were right before place i, the share that was accepted at i.

    Prompts are cut from tokens at even distances.
    """
    right, tried = [0] * k, [0] * k
    stride = (len(tokens) - prompt_tokens) // prompts
    params = SamplingParams(temperature=temperature, max_tokens=new_tokens)
    for index in range(prompts):
        prompt = [int(token) for token in tokens.array[index * stride : index * stride + prompt_tokens]]
        for drafted, accepted in rounds(target, proposer, prompt, params, k=k, key=index, seed=index):
            for place in range(min(accepted + 1, drafted)):
                tried[place] += 1
                right[place] += place < accepted
    return [round(a / b, 4) if b else 0.0 for a, b in zip(right, tried, strict=True)]


@torch.no_grad()
def rounds(
    target: Transformer, proposer: Proposer, prompt: list[int], params: SamplingParams, *, k: int, key=0, seed: int = 0
) -> Iterator[tuple[int, int]]:
    """Drafts and verifies one sequence to its end; yields (drafted, accepted) of each of the target's passes."""
    draw, tokens, start = Draw(seed), list(prompt), 0
    end = min(len(prompt) + params.max_tokens, target.config.max_seq_len)
    weight = target.embedding.weight
    cache = KVCache(target.config, end + k, device=weight.device, dtype=weight.dtype)
    while len(tokens) < end:
        ask = DraftRequest(key, tokens, params, min(k, end - len(tokens) - 1), draw)
        draft = proposer.propose([ask])[0] if start and ask.k else None
        guessed = draft.tokens if draft else []
        row = torch.tensor([[*tokens[start:], *guessed]], device=weight.device)
        where = torch.arange(start, start + row.shape[1], device=weight.device)
        cache.begin(where, start)
        hidden = hidden_states(target, row, where, cache)[-1]
        logits = target.logits(hidden[:, -len(guessed) - 1 :])[0].float().cpu()
        p = [distribution(x, params, [*tokens, *guessed[:i]]) for i, x in enumerate(logits)]
        new = verify(torch.stack(p), draft, draw) if draft else [draw.choose(p[0])]
        if on_verified := getattr(proposer, "on_verified", None):
            on_verified(key, tokens, guessed, logits.argmax(-1).tolist())
        verified = len(tokens) - start + len(new) - 1
        if proposer.wants_hidden:
            proposer.observe(key, start, hidden[0, :verified])
        start, tokens = start + verified, tokens + new
        if draft:
            yield len(guessed), len(new) - 1
    proposer.forget(key)
