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
from minillm.serve.speculate import Counts, DraftModel, NGram, Proposer
from minillm.serve.speculate.registry import PROPOSERS, proposer_named

K = {"draft": 3, "ngram": 6, "medusa": 3, "eagle": 3, "lookahead": 4, "early-exit": 2}
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
    """{kind of text: share accepted at each temperature}: of a guess that is drawn, Σ min(p, q); of the draft's
    likeliest token, p of it."""
    found = {}
    for kind in kinds:
        logits = logits_of(kind)
        likeliest = logits[1].argmax(-1, keepdim=True)
        both = [distributions(logits, t) for t in temperatures]
        found[f"{kind}, drawn"] = [float(overlap(p, q).mean()) for p, q in both]
        found[f"{kind}, likeliest"] = [float(p.gather(-1, likeliest).mean()) for p, q in both]
    return found


# Runs: the engine with a proposer and without.


@dataclass(frozen=True)
class Run:
    """passes: of each sequence, added up. step_s, sampled: CPU seconds and new tokens of a decoding step with a full
    batch, the proposer's part (draft_s, for `places` guesses of each sequence) included; means. whole_s: of it all."""

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


class Watched:
    """A proposer whose calls are timed: (sequences, guesses of the longest draft, CPU seconds) of each."""

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
    k: int,
    asked: Sequence[Sequence[int]],
    *,
    batch: int = 1,
    temperature: float = 0.0,
    new: int = NEW,
    model: Transformer | None = None,
) -> Run:
    """Answers of `new` tokens, at most `batch` sequences at a time. model: None = the target."""
    watched = None if proposer is None else Watched(proposer)
    options = {"ignore_eos": True, "temperature": temperature, "max_tokens": new}
    params = [SamplingParams(seed=i, **options) for i in range(len(asked))]
    with one_thread():
        llm = LLM(
            model or pair().target,
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
    full = [r for r in llm.records if len(r.batch) == batch and all(tokens <= k + 1 for _, _, tokens in r.batch)]
    calls = [call for call in (watched.calls if watched else ()) if call[0] == batch]

    def mean(numbers) -> float:
        numbers = list(numbers)
        return sum(numbers) / len(numbers) if numbers else 0.0

    return Run(
        [output.answers[0].ids for output in outputs],
        sum(output.passes for output in outputs),
        mean(record.seconds for record in full),
        mean(record.sampled for record in full),
        mean(seconds for _, _, seconds in calls),
        mean(longest for _, longest, _ in calls),
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


def formula(run: Run) -> float:
    """Tokens per pass from the acceptance at each place; a pass without a guess yields one token."""
    asked = run.counts.tried[0] / run.passes if run.counts.tried else 0.0
    return 1 + asked * (predict.tokens_per_pass(run.counts.alpha) - 1)


def draft_model() -> DraftModel:
    return DraftModel(pair().draft)


@dataclass(frozen=True)
class Sweep:
    """runs: by K. c: seconds of a pass of the draft model, decoding alone / of the target; verify: by K, of a pass
    over K + 1 tokens / over one; alpha: of each place, from the run with the largest K."""

    runs: dict[int, Compared]
    c: float
    verify: dict[int, float]
    alpha: list[float]

    def predicted(self, k: int, *, textbook: bool = False) -> float:
        """The speedup; textbook: as if checking K + 1 tokens took no longer than one."""
        return predict.speedup(self.alpha[:k], self.c, verify=1.0 if textbook else self.verify[k])


def sweep(ks: Sequence[int], kind: str = "code", count: int = 3) -> Sweep:
    """The draft model at each K, greedy, one sequence at a time; what it costs is measured apart from it."""
    asked = prompts(kind, count)
    generate(draft_model(), 2, asked[:1], new=4)  # the first run of a process is slow
    plain, small = generate(None, 1, asked), generate(None, 1, asked[:2], model=pair().draft)
    once, *more = pass_seconds([1, *(k + 1 for k in ks)])
    runs = {k: compare(draft_model(), k, plain, asked) for k in ks}
    verify = {k: seconds / once for k, seconds in zip(ks, more, strict=True)}
    alpha = runs[max(ks)].run.counts.alpha
    return Sweep(runs, small.step_s / plain.step_s, verify, alpha + [0.0] * (max(ks) - len(alpha)))


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


def by_batch(batches: Sequence[int], k: int = 3, count: int = 8) -> dict[int, Compared]:
    """The draft model, greedy, with more and more sequences in a pass."""
    found = {}
    for batch in batches:
        asked = prompts("code", max(2, min(count, 2 * batch)))
        found[batch] = compare(draft_model(), k, generate(None, k, asked, batch=batch), asked, batch=batch)
    return found


def by_temperature(temperatures: Sequence[float], k: int = 3, count: int = 2) -> dict[float, dict[str, Compared]]:
    """Drafts that are drawn (the draft model) and drafts that are not (prompt lookup), sampled at each temperature."""
    asked, found = prompts("code", count), {}
    for t in temperatures:
        plain = generate(None, 1, asked, temperature=t)
        found[t] = {
            "draft model": compare(draft_model(), k, plain, asked, temperature=t),
            "prompt lookup": compare(NGram(), k, plain, asked, temperature=t),
        }
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


class Uncached:
    """A model as exercise 3 wants it, all computed anew each time. passes: how often `rows` was called."""

    def __init__(self, model: Transformer, temperature: float = 0.0):
        self.model, self.temperature, self.vocab, self.passes = model, temperature, model.config.vocab_size, 0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """[vocab], the distribution after tokens."""
        return self._rows(list(tokens), 1)[0]

    def rows(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Tensor:
        """[len(guesses) + 1, vocab], in one pass."""
        self.passes += 1
        return self._rows([*tokens, *guesses], len(guesses) + 1)

    @torch.no_grad()
    def _rows(self, tokens: list[int], count: int) -> Tensor:
        logits = self.model(torch.tensor([tokens]))[0, -count:]
        return distributions((logits,), self.temperature)[0]


def preempted(num_blocks: int = 20, k: int = 3) -> dict[str, object]:
    """Four sequences of 8 blocks each in a pool that holds fewer: who loses its blocks also loses the guesses' keys."""
    asked, params = prompts("code", 4), SamplingParams(max_tokens=NEW, ignore_eos=True)
    with one_thread():
        llm = LLM(pair().target, num_blocks=num_blocks, prefix_cache=False, proposer=draft_model(), k=k)
        outputs = llm.generate(asked, params)
    return {
        "answers": [output.answers[0].ids for output in outputs],
        "preemptions": sum(output.preemptions for output in outputs),
        "passes": sum(output.passes for output in outputs),
        "used": llm.pool.used,
    }
