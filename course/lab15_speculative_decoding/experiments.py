"""What lab 15 measures on the committed pair: a target of 5.8 million parameters and a draft of 0.6 million.

Two kinds of text that no model was trained on: code (held-out files of the standard library) and prose (the docstrings
in them). Speed is CPU seconds of one thread, so that a busy machine does not count.
"""

import ast
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from course.shared.measuring import one_thread
from minillm.data import Tokenizer, corpus
from minillm.model import Transformer, load_hf
from minillm.model.generate import folder_of
from minillm.predict.serving import speculation as predict
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate import AdaptiveK, Counts, Proposer

PROMPT, NEW = 96, 32
KINDS = ("code", "prose")


@dataclass(frozen=True)
class Pair:
    """Both in float32 on the CPU."""

    target: Transformer
    draft: Transformer
    tokenizer: Tokenizer


@lru_cache(maxsize=1)
def pair() -> Pair:
    """The committed models."""
    models = (load_hf(folder_of(name), dtype=torch.float32) for name in ("target", "draft"))
    return Pair(*models, Tokenizer.load(folder_of("target")))


@lru_cache(maxsize=2)
def texts(kind: str) -> list[list[int]]:
    """Token ids of 12 held-out pieces of code or prose, PROMPT + NEW each."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} of text: use one of {', '.join(KINDS)}.")
    documents = sorted(corpus().documents("validation"), key=lambda document: document.name)
    plain = [d.text for d in documents] if kind == "code" else [t for d in documents for t in _docstrings(d.text)]
    start = PROMPT if kind == "code" else 0  # behind a file's licence
    pieces = (pair().tokenizer.encode(text[:2000])[start : start + PROMPT + NEW] for text in plain)
    return random.Random(4).sample([ids for ids in pieces if len(ids) == PROMPT + NEW], 12)


def prompts(kind: str, count: int) -> list[list[int]]:
    """The first tokens of the texts."""
    return [ids[:PROMPT] for ids in texts(kind)[:count]]


def _docstrings(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


# Probabilities: what the two models say after the same tokens, no sampling.


@torch.no_grad()
def logits_of(kind: str, count: int = 6) -> tuple[Tensor, Tensor]:
    """(target's, draft's): [positions, vocab_size], after each of the last NEW tokens of `count` texts."""
    ids = torch.tensor(texts(kind)[:count])
    with one_thread():
        both = (model(ids)[:, PROMPT - 1 : -1] for model in (pair().target, pair().draft))
        target, draft = (each.flatten(0, 1) for each in both)
    return target, draft


def distributions(logits: tuple[Tensor, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """(p, q) at a temperature; 0: all of the probability at the likeliest token."""
    if temperature == 0:
        return tuple(torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0) for x in logits)
    return tuple(torch.softmax(x / temperature, dim=-1) for x in logits)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Σ min(p, q) of each row."""
    return torch.minimum(p, q).sum(-1)


def alpha_by_temperature(temperatures: Sequence[float], kinds: Sequence[str] = KINDS) -> dict[str, list[float]]:
    """{kind of text: share accepted at each temperature}: of a sampled draft token, Σ min(p, q); of the draft's
    likeliest token, p of it."""
    found = {}
    for kind in kinds:
        logits = logits_of(kind)
        likeliest = logits[1].argmax(-1, keepdim=True)
        both = [distributions(logits, t) for t in temperatures]
        found[f"{kind}, sampled"] = [float(overlap(p, q).mean()) for p, q in both]
        found[f"{kind}, likeliest"] = [float(p.gather(-1, likeliest).mean()) for p, q in both]
    return found


# Runs: the engine with a proposer and without.


@dataclass(frozen=True)
class GenerationRun:
    """passes: of each sequence, added up. step_s, sampled: CPU seconds and new tokens of a decoding step with a full
    batch, the proposer's part (draft_s, for `places` draft tokens of each sequence) included; means. whole_s: of it
    all."""

    answers: list[list[int]]
    passes: int
    step_s: float
    sampled: float
    draft_s: float
    places: float
    counts: Counts
    whole_s: float

    @property
    def tokens_per_pass(self) -> float:
        return sum(len(answer) - 1 for answer in self.answers) / self.passes


class TimedProposer:
    """A proposer whose calls are timed: (sequences, draft tokens of the longest draft, CPU seconds) of each."""

    def __init__(self, proposer: Proposer):
        self.proposer, self.calls = proposer, []

    def __getattr__(self, name: str):
        return getattr(self.proposer, name)

    def propose(self, asked):
        started = time.thread_time()
        drafts = self.proposer.propose(asked)
        longest = max((len(draft.tokens) for draft in drafts), default=0)
        self.calls.append((len(asked), longest, time.thread_time() - started))
        return drafts


def generate(
    proposer: Proposer | None,
    k: int | AdaptiveK,
    asked: Sequence[Sequence[int]],
    *,
    batch: int = 1,
    temperature: float = 0.0,
    new: int = NEW,
) -> GenerationRun:
    """Answers of `new` tokens, at most `batch` sequences at a time."""
    watched = None if proposer is None else TimedProposer(proposer)
    options = {"ignore_eos": True, "temperature": temperature, "max_tokens": new}
    params = [SamplingParams(seed=i, **options) for i in range(len(asked))]
    with one_thread():
        llm = LLM(
            pair().target,
            num_blocks=160,
            max_num_seqs=batch,
            prefix_cache=False,
            proposer=watched,
            k=k,
            clock=time.thread_time,
        )
        started = time.thread_time()
        outputs = llm.generate([list(prompt) for prompt in asked], params)
        whole = time.thread_time() - started
    most = k if isinstance(k, int) else k.most
    full = [r for r in llm.records if len(r.batch) == batch and all(tokens <= most + 1 for _, _, tokens in r.batch)]
    calls = [call for call in (watched.calls if watched else ()) if call[0] == batch]

    def mean(numbers) -> float:
        numbers = list(numbers)
        return sum(numbers) / len(numbers) if numbers else 0.0

    return GenerationRun(
        [output.answers[0].ids for output in outputs],
        sum(output.passes for output in outputs),
        mean(record.seconds for record in full),
        mean(record.sampled for record in full),
        mean(seconds for _, _, seconds in calls),
        mean(longest for _, longest, _ in calls),
        llm.speculation.counts if llm.speculation else Counts(),
        whole,
    )


@dataclass(frozen=True)
class Compared:
    """A proposer beside none, on the same prompts. c: seconds of a draft token / of a plain pass; verify: of a
    verifying pass
    / of a plain one; predicted: the formula fed with them and the acceptance at each place; same: equal tokens."""

    run: GenerationRun
    plain: GenerationRun
    c: float
    verify: float
    predicted: float
    speedup: float
    same: bool


def compare(
    proposer: Proposer, k: int | AdaptiveK, plain: GenerationRun, asked: Sequence[Sequence[int]], **options
) -> Compared:
    """`plain` is a run without a proposer over the same prompts with the same options."""
    run = generate(proposer, k, asked, **options)
    drafting, verify = run.draft_s / plain.step_s, (run.step_s - run.draft_s) / plain.step_s
    speedup = (plain.step_s / plain.sampled) / (run.step_s / run.sampled)
    return Compared(
        run,
        plain,
        c=drafting / max(1.0, run.places),
        verify=verify,
        predicted=formula(run) / (drafting + verify),
        speedup=speedup,
        same=run.answers == plain.answers,
    )


def formula(run: GenerationRun) -> float:
    """Tokens per pass from the acceptance at each place; a pass without a draft token yields one token."""
    asked = run.counts.tried[0] / run.passes if run.counts.tried else 0.0
    return 1 + asked * (predict.tokens_per_pass(run.counts.alpha) - 1)
