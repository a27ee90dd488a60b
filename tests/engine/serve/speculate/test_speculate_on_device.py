"""Drafts drawn and verified for all sequences at once: what one by one gives, and one read of the host a step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.model import ModelConfig, Transformer
from minillm.model.draw import Draw
from minillm.model.paged import default_backend
from minillm.serve import LLM, SamplingParams
from minillm.serve.run.penalties import SeenOnHost
from minillm.serve.sample.seen import SeenTokens
from minillm.serve.speculate import DraftModel, NGram
from minillm.serve.speculate.on_device import RowToVerify, accepted_tokens, distributions, verdicts
from minillm.serve.speculate.proposal import Draft, DraftRequest
from minillm.serve.speculate.verify import distribution, verify, verify_greedy

CONFIG = ModelConfig(300, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
KINDS = [
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 7, "repetition_penalty": 1.4},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.2},
    {},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.6},
]


def case(number, drawn):
    """(params, tokens, draft, logits) of a sequence whose draft is right here and there."""
    generator = torch.Generator().manual_seed(number)
    params, k = SamplingParams(**KINDS[number % len(KINDS)]), number % 4
    logits = 3 * torch.randn(k + 1, 300, generator=generator)
    tokens = torch.randint(300, (5 + number,), generator=generator).tolist()
    if params.temperature == 0:
        return params, tokens, Draft([int(row.argmax()) for row in logits[:k]]), logits
    near = (logits[:k] + 0.3 * torch.randn(k, 300, generator=generator)).div(params.temperature).softmax(-1)
    guesses = [int(torch.multinomial(row, 1, generator=generator)) for row in near]
    return params, tokens, Draft(guesses, near if drawn and k else None), logits


def rows_of(params, tokens, draft, count, draw, seen_row):
    numbers = [draw.uniform() for _ in range(count + 1)]
    for place in range(count):
        guess = draft.tokens[place] if place < len(draft.tokens) else None
        q = None if draft.probabilities is None or guess is None else draft.probabilities[place]
        yield RowToVerify(
            params, draft.tokens[:place], guess, q, (numbers[place], numbers[place + 1]), seen_row, tokens, tokens
        )


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["part of each draft", "whole drafts"])
def test_verdicts_are_those_of_one_row_after_the_other(drawn, whole):
    cases, logits, rows, sizes = [case(number, drawn) for number in range(24)], [], [], []
    for number, (params, tokens, draft, mine) in enumerate(cases):
        count = len(mine) if whole else max(1, len(mine) - 1)
        logits.append(mine[:count])
        sizes.append(count)
        rows += rows_of(params, tokens, draft, count, Draw(number), number)
    found, accepted = verdicts(torch.cat(logits), rows, SeenOnHost(), SeenTokens()), 0
    for number, ((params, tokens, draft, _), mine, count) in enumerate(zip(cases, logits, sizes, strict=True)):
        draw, wanted = Draw(number), [tokens + draft.tokens[:place] for place in range(count)]
        target = torch.stack([distribution(row, params, seen) for row, seen in zip(mine, wanted, strict=True)])
        if params.temperature == 0:
            right = verify_greedy(target.argmax(-1).tolist(), draft)
        else:
            right = verify(target, draft, draw)
        assert accepted_tokens(draft, found[:count], params) == (right, draw.count), number
        accepted += len(right) - 1
        del found[:count]
    assert accepted > 5


def test_distributions_are_those_of_one_row_after_the_other():
    logits = 3 * torch.randn(len(KINDS), 300, generator=torch.Generator().manual_seed(0))
    params, seen = [SamplingParams(**kind) for kind in KINDS], [[1, 2, row] for row in range(len(KINDS))]
    drafted = torch.tensor([[5 + row, 9] for row in range(len(KINDS))])
    wanted = [[*tokens, *ids] for tokens, ids in zip(seen, drafted.tolist(), strict=True)]
    right = [distribution(row, each, ids) for row, each, ids in zip(logits, params, wanted, strict=True)]
    torch.testing.assert_close(distributions(logits, params, seen, drafted), torch.stack(right))


class Reads(TorchDispatchMode):
    """Counts single numbers that the host reads of tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in ("aten::_local_scalar_dense", "aten::nonzero")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("minillm.model.transformer.check_tokens", lambda *_: None)  # there it reads no values


@pytest.mark.parametrize("proposer", ["ngram", "draft"])
def test_no_sequence_of_a_step_is_asked_for_alone(proposer, as_on_a_gpu):
    model, draft = (Transformer(CONFIG, seed=3) for _ in range(2))
    llm = LLM(model, proposer=NGram(shortest=1) if proposer == "ngram" else DraftModel(draft), k=3)
    params = [SamplingParams(max_tokens=20, seed=number, **kind) for number, kind in enumerate(KINDS)]
    with Reads() as reads:
        outputs = llm.generate([[number, 2, 3, 2, 3, 2] for number in range(len(KINDS))], params)
    assert sum(output.drafted for output in outputs) > 20 and reads.count == 0


def test_a_draft_is_read_once_and_stays_on_the_device(as_on_a_gpu, monkeypatch):
    proposer = DraftModel(Transformer(CONFIG, seed=3))
    asked = [
        DraftRequest(number, [number, 1, 2, 3], SamplingParams(**kind), 2 + number % 3, Draw(number))
        for number, kind in enumerate(KINDS)
    ]
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.append(self.shape) or tolist(self))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: pytest.fail("logits go to the host"))
    drafts = proposer.propose(asked)
    assert lists == [(len(asked), 4)] and proposer.passes == 4
    assert [len(draft.tokens) for draft in drafts] == [each.k for each in asked]
    assert proposer.backend is default_backend(torch.device("cpu"))


def test_what_raises_once_costs_no_sequence_its_penalty(monkeypatch):
    """The second try has to write the tokens seen anew: the first one may have ended before it wrote any."""
    model, prompts = Transformer(CONFIG, seed=2), [list(range(start, 300, 6)) for start in range(6)]
    params, grow, raised = SamplingParams(max_tokens=12, repetition_penalty=3), SeenTokens._table_of, []

    def once(self, *given):
        if not raised:
            raised.append(True)
            raise torch.OutOfMemoryError("no room")
        return grow(self, *given)

    wanted = LLM(model).generate(prompts, params)
    monkeypatch.setattr(SeenTokens, "_table_of", once)
    found = LLM(model, proposer=NGram(3, 1)).generate(prompts, params)
    assert raised and [each.answers[0].ids for each in found] == [each.answers[0].ids for each in wanted]
