"""What lab 15 measures on the committed pair: a target of 5.8 million parameters and a draft of 0.6 million.

Two kinds of text that no model was trained on: code (held-out files of the standard library) and prose (the docstrings
in them). Speed is CPU seconds of one thread, so that a busy machine does not count.
"""

import ast
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minillm.data import Tokenizer, corpus
from minillm.model import Transformer
from minillm.model.generate import folder_of
from minillm.model.huggingface import load_hf
from minillm.predict import speculation as predict
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate import Counts, DraftModel, Proposer
from minillm.serve.speculate.registry import PROPOSERS, proposer_named

K = {"draft": 3, "ngram": 6, "medusa": 3, "eagle": 3, "lookahead": 4, "early-exit": 2}
PROMPT, NEW = 96, 40
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
    return random.Random(0).sample([ids for ids in pieces if len(ids) == PROMPT + NEW], 12)


def prompts(kind: str, count: int) -> list[list[int]]:
    """The first tokens of the texts."""
    return [ids[:PROMPT] for ids in texts(kind)[:count]]


def _docstrings(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread, so that CPU seconds are those of one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    """{kind of text: mean Σ min(p, q) at each temperature}."""
    found = {}
    for kind in kinds:
        logits = logits_of(kind)
        found[kind] = [float(overlap(*distributions(logits, t)).mean()) for t in temperatures]
    return found


# Runs: the engine with a proposer and without.


@dataclass(frozen=True)
class Run:
    """seconds: CPU seconds of steps after the prompts'; tokens and passes in them, guesses and their CPU seconds."""

    answers: list[list[int]]
    tokens: int
    passes: int
    steps: int
    seconds: float
    drafting_s: float
    guesses: int
    counts: Counts
    whole_s: float

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def step_s(self) -> float:
        """Seconds of a pass of the target."""
        return (self.seconds - self.drafting_s) / self.steps


class Watched:
    """A proposer whose CPU seconds and guesses are counted."""

    def __init__(self, proposer: Proposer):
        self.proposer, self.seconds, self.guesses, self.calls = proposer, 0.0, 0, 0

    def __getattr__(self, name: str):
        return getattr(self.proposer, name)

    def propose(self, asked):
        started = time.thread_time()
        drafts = self.proposer.propose(asked)
        self.seconds += time.thread_time() - started
        self.guesses += max((len(draft.tokens) for draft in drafts), default=0)  # of a batch, places: drafted together
        self.calls += 1
        return drafts


def generate(
    proposer: Proposer | None,
    k: int = 1,
    asked: Sequence[Sequence[int]] = (),
    *,
    batch: int = 1,
    temperature: float = 0.0,
    new: int = NEW,
) -> Run:
    """Answers of `new` tokens, `batch` of them at a time."""
    watched = None if proposer is None else Watched(proposer)
    with one_thread():
        llm = LLM(
            pair().target, num_blocks=16 * 10, max_num_seqs=batch, proposer=watched, k=k, clock=time.thread_time
        )
        params = [
            SamplingParams(max_tokens=new, ignore_eos=True, temperature=temperature, seed=i) for i in range(len(asked))
        ]
        started = time.thread_time()
        outputs = [
            output
            for start in range(0, len(asked), batch)
            for output in llm.generate([list(x) for x in asked[start : start + batch]], params[start : start + batch])
        ]
        whole = time.thread_time() - started
    later = [record for record in llm.records if all(tokens <= k + 1 for _, _, tokens in record.batch)]
    return Run(
        [output.answers[0].ids for output in outputs],
        sum(len(output.answers[0].ids) - 1 for output in outputs),
        sum(output.passes for output in outputs),
        len(later),
        sum(record.seconds for record in later),
        watched.seconds if watched else 0.0,
        watched.guesses if watched else 0,
        llm.speculation.counts,
        whole,
    )


@dataclass(frozen=True)
class Compared:
    """A proposer beside none, on the same prompts. c: seconds of a guess / of a plain pass; verify: of a verifying pass
    / of a plain one; predicted: the formula fed with them and the acceptance at each place; same: equal tokens."""

    run: Run
    plain: Run
    c: float
    verify: float
    predicted: float
    speedup: float
    same: bool


def compare(proposer: Proposer, k: int, plain: Run, asked: Sequence[Sequence[int]], **options) -> Compared:
    """`plain` is a run without a proposer over the same prompts with the same options."""
    run = generate(proposer, k, asked, **options)
    per_token = [(each.seconds / each.tokens) for each in (plain, run)]
    c = run.drafting_s / max(1, run.guesses) / plain.step_s
    verify = run.step_s / plain.step_s
    drafted = run.guesses / run.steps  # fewer than k where a proposer has no guess, or the answer ends
    predicted = formula(run) / (c * drafted + verify)
    return Compared(run, plain, c, verify, predicted, per_token[0] / per_token[1], run.answers == plain.answers)


def formula(run: Run) -> float:
    """Tokens per pass from the acceptance at each place; a pass without a guess yields one token."""
    asked = run.counts.tried[0] / run.passes if run.counts.tried else 0.0
    return 1 + asked * (predict.tokens_per_pass(run.counts.alpha) - 1)


def draft_model() -> DraftModel:
    return DraftModel(pair().draft)


def sweep(ks: Sequence[int], kind: str = "code", count: int = 3) -> dict[int, Compared]:
    """The draft model at each K, greedy, one sequence at a time."""
    asked = prompts(kind, count)
    generate(draft_model(), 2, asked[:1], new=4)  # the first run of a process is slow
    plain = generate(None, 1, asked)
    return {k: compare(draft_model(), k, plain, asked) for k in ks}


def available() -> Iterator[tuple[str, Proposer | None]]:
    """Every proposer by name; None: its weights are not there."""
    for name in PROPOSERS:
        try:
            yield name, proposer_named(name, pair().target)
        except ValueError:
            yield name, None


def table(kind: str = "code", count: int = 3) -> dict[str, Compared | None]:
    """Every proposer that has its weights, greedy, one sequence at a time."""
    asked = prompts(kind, count)
    plain = generate(None, 1, asked)
    return {name: one and compare(one, K[name], plain, asked) for name, one in available()}


def memory(name: str, proposer: Proposer, tokens: int = PROMPT + NEW) -> dict[str, int]:
    """Bytes that a proposer adds: its own weights (what it shares with the target is not counted), and its keys and
    values for one sequence of so many tokens."""
    target = pair().target
    known = {parameter.data_ptr() for parameter in target.parameters()}
    modules = [x for x in vars(proposer).values() if isinstance(x, torch.nn.Module) and x is not target]
    own = {p.data_ptr(): p.nbytes for module in modules for p in module.parameters() if p.data_ptr() not in known}
    config = getattr(getattr(proposer, "model", None), "config", None)
    layers = config.num_layers if config else 1 if name == "eagle" else 0
    config = config or target.config
    per_token = 2 * layers * config.num_kv_heads * config.head_dim * 4
    return {"weights": sum(own.values()), "keys and values": per_token * tokens}


def losing(count: int = 8) -> dict[str, Compared]:
    """Where guesses cost more than they bring: a batch, a hot request, an answer of a few tokens. Draft model, K = 4."""
    asked, found = prompts("code", count), {}
    for name, options in {
        "1 sequence at a time": {},
        "8 at a time": {"batch": 8},
        "temperature 1.5": {"temperature": 1.5},
    }.items():
        some = asked if "batch" in options else asked[:2]
        found[name] = compare(draft_model(), 4, generate(None, 1, some, **options), some, **options)
    return found


def short_answers(lengths: Sequence[int], count: int = 2) -> dict[int, float]:
    """{tokens of the answer: whole time without guesses / with}: the draft has to read the prompt, too."""
    asked, found = prompts("code", count), {}
    for new in lengths:
        plain, guessed = (generate(one, 3, asked, new=new).whole_s for one in (None, draft_model()))
        found[new] = plain / guessed
    return found


@torch.no_grad()
def pass_seconds(rows: Sequence[int], repeats: int = 7) -> list[float]:
    """CPU seconds of a pass of the target over so many tokens: least of some repeats."""
    target, found = pair().target, []
    with one_thread():
        for count in rows:
            ids, times = torch.arange(count)[None], []
            for _ in range(repeats):
                started = time.thread_time()
                target(ids)
                times.append(time.thread_time() - started)
            found.append(min(times))
    return found




def replay(tokens: Sequence[int], propose, k: int, start: int = 16) -> int:
    """Passes that write a known text behind its first `start` tokens: each keeps the guesses that are right."""
    place, passes = start, 0
    while place < len(tokens):
        guesses = list(propose(list(tokens[:place]), k, 3))[:k]
        right = next((i for i, each in enumerate(guesses) if tokens[place + i : place + i + 1] != [each]), len(guesses))
        place, passes = place + right + 1, passes + 1
    return passes
