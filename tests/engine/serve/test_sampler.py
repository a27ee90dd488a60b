"""The batched sampler against the one-by-one reference: by enumeration, draw by draw, and by chi-square."""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.data import Tokenizer
from minillm.model import load_hf
from minillm.model.draw import Draw, sample_seed
from minillm.model.generate import folder_of
from minillm.serve import SamplingParams
from minillm.serve.run.step_inputs import sampling_inputs
from minillm.serve.sample import batch, selection
from minillm.serve.sample.batch import sample_on_device
from minillm.serve.sample.reference import filtered, sample

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.4, "top_k": 1},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 2.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 4, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.5},
    {"repetition_penalty": 3.0},
    {"temperature": 1e-30},
    {"temperature": 1.0, "logprobs": 2},
]


def take_samples(patch, size=6, margin=0, piece=1):
    """Selection by sampling where vocabularies are small; by default it often has to say that it is not certain."""
    patch.setattr(batch, "CANDIDATES", size)
    for name, value in (("SAMPLE", size), ("MARGIN", margin), ("PIECE", piece)):
        patch.setattr(selection, name, value)


def sample_batch(logits, rows):
    """A token for each row, None where its logits are not finite."""
    return sample_on_device(logits, sampling_inputs(rows)).read()


class Fixed:
    """Draws the number it is given."""

    def __init__(self, number):
        self.number = number

    def uniform(self):
        return self.number


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("candidates", [1, 3, 6, 2048])
def test_every_token_has_its_probability(options, candidates, monkeypatch):
    """By enumeration: as the random number runs through [0, 1), each token comes up for as long as it is likely."""
    if candidates == 6:  # a sample brackets the last token kept, without any margin: rows that are sorted after all
        take_samples(monkeypatch)
    else:
        monkeypatch.setattr(batch, "CANDIDATES", candidates)
    steps, params = 500, SamplingParams(**options)
    for seed, vocab_size in enumerate((1, 2, 5, 7, 12, 24)):
        logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
        if vocab_size == 7:
            logits[[1, 4, 5]] = logits.max()  # equals
        seen = [0, vocab_size - 1]
        rows = [(params, seen, Fixed((i + 0.5) / steps)) for i in range(steps)]
        ids = torch.tensor([token.id for token in sample_batch(logits.expand(steps, -1), rows)])
        found = torch.bincount(ids, minlength=vocab_size) / steps
        scores = filtered(logits, params, seen)
        if params.temperature == 0:
            expected = torch.nn.functional.one_hot(scores.argmax(), vocab_size).float()
        else:
            expected = scores.softmax(-1)
        assert ((found - expected).abs() <= 1.01 / steps).all() and (found[expected == 0] == 0).all()


@pytest.mark.parametrize("vocab_size", [61, 5000])
def test_tokens_are_the_references_draw_by_draw(vocab_size):
    rng, logits = random.Random(vocab_size), torch.randn(96, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    rows = []
    for number in range(96):
        options = {
            "temperature": rng.choice([0.0, 0.5, 1.0, 2.0]),
            "top_k": rng.choice([None, None, 1, 7, 50, vocab_size + 1]),
            "top_p": rng.choice([1.0, 1.0, 0.3, 0.9, 0.999]),
            "min_p": rng.choice([0.0, 0.0, 0.01]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
            "logprobs": rng.choice([None, 2]),
        }
        rows.append((SamplingParams(**options), [rng.randrange(vocab_size) for _ in range(9)], number))
    batch = sample_batch(logits, [(params, seen, Draw(seed)) for params, seen, seed in rows])
    alone = [sample_batch(logits[i : i + 1], [(p, s, Draw(seed))])[0] for i, (p, s, seed) in enumerate(rows)]
    reference = [sample(logits[i], p, s, Draw(seed)) for i, (p, s, seed) in enumerate(rows)]
    assert batch == alone == reference


def trained_logits():
    """Of the committed model, after some code: its own vocabulary, and as peaked as a trained model's are."""
    folder = folder_of("target")
    tokens = Tokenizer.load(folder).encode("import os\n\n\ndef read(path):\n    with open(path) as")
    with torch.no_grad():
        return load_hf(folder, dtype=torch.float32)(torch.tensor([tokens]))[0, -1]


def llamas_number_of_tokens():
    return torch.randn(128_256, generator=torch.Generator().manual_seed(4)) * 4


a_minute = pytest.mark.skipif(os.environ.get("MINILLM_PROOF") != "all", reason="a minute; MINILLM_PROOF=all runs it")


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (trained_logits, {"temperature": 1.0}),
        (trained_logits, {"temperature": 1.5, "top_p": 0.9}),
        (trained_logits, {"temperature": 1.5, "top_p": 0.9, "top_k": 2000}),
        pytest.param(llamas_number_of_tokens, {"temperature": 1.5, "top_p": 0.9}, marks=a_minute),
    ],
)
def test_a_real_vocabulary_by_chi_square(make, options):
    """4,000 draws in 64 groups of like probability; 63 degrees of freedom at most, p = 0.0001 at 117."""
    logits = make()
    size, params = len(logits), SamplingParams(**options)
    expected = filtered(logits, params, []).softmax(-1).double()
    counts = torch.zeros_like(expected)
    for start in range(0, 4_000, 100):
        rows = [(params, [], Draw(sample_seed(7, start + i))) for i in range(100)]
        ids = [token.id for token in sample_batch(logits.expand(100, -1), rows)]
        counts += torch.bincount(torch.tensor(ids), minlength=size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(5))
    group = (expected[order].cumsum(0) * 64).long().clamp(max=63)
    share = torch.zeros(64, dtype=torch.float64).index_add(0, group, expected[order])
    found = torch.zeros(64, dtype=torch.float64).index_add(0, group, counts[order])
    busy = share > 1e-3
    assert ((found - 4_000 * share).square() / (4_000 * share))[busy].sum() < 117
    assert counts[expected == 0].sum() == 0


def test_numbers_by_counter():
    """Uniform, not correlated between neighbouring seeds or counts, the same whatever was drawn elsewhere."""
    table = torch.tensor([[draw.uniform() for _ in range(100)] for draw in map(Draw, range(400))], dtype=torch.float64)
    assert table.min() >= 0 and table.max() < 1 and len(table.unique()) == 40_000
    assert abs(table.mean() - 0.5) < 0.01 and abs(table.var() - 1 / 12) < 0.002
    for neighbour in (table[:, 1:] - table[:, :-1], table[1:] - table[:-1]):
        assert abs(neighbour.var() - 1 / 6) < 0.004
    seeds = [sample_seed(seed, index) for seed in range(100) for index in range(8)]
    assert len(set(seeds)) == 800 and all(0 <= seed < 2**63 for seed in seeds) and sample_seed(5, 0) == 5


def test_nothing_is_changed_in_place():
    logits = torch.randn(3, 20)
    before = logits.clone()
    params = SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=2.0)
    sample_batch(
        logits, [(params, [1], Draw(0)), (replace(params, top_k=2), [1], Draw(1)), (SamplingParams(), [], Draw(2))]
    )
    assert torch.equal(logits, before)


def test_what_is_sampled_again_does_not_need_its_logits(monkeypatch):
    """The pass that follows may have overwritten them: those of a CUDA graph always lie in the same place."""
    take_samples(monkeypatch)
    logits = torch.randn(8, 61, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=1.0, top_p=0.9)
    right = [sample(logits[row], params, [], Draw(row)) for row in range(8)]
    found = sample_on_device(logits, sampling_inputs([(params, [], Draw(row)) for row in range(8)]))
    logits.zero_()
    assert found.read() == right and found.resampled


@pytest.mark.parametrize("vocab_size", [3000, 20_000])
def test_flat_distributions_and_equals_draw_by_draw(vocab_size):
    """Most of the vocabulary is kept, and many tokens are equally likely (as logits in bfloat16 are)."""
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(2)) * 0.5
    logits[::2] = logits[::2].bfloat16().float()
    rng, rows = random.Random(1), []
    for number in range(40):
        options = {
            "temperature": rng.choice([0.7, 1.0, 3.0]),
            "top_k": rng.choice([None, 40, 2047, 2048, 2500]),
            "top_p": rng.choice([1.0, 0.5, 0.9, 0.99]),
            "min_p": rng.choice([0.0, 0.05]),
        }
        rows.append((SamplingParams(**options), [], number))
    batch = sample_batch(logits, [(params, seen, Draw(seed)) for params, seen, seed in rows])
    assert batch == [sample(logits[i], p, s, Draw(seed)) for i, (p, s, seed) in enumerate(rows)]


def flat(rng, size):
    return rng.normal(size=size) * rng.choice([0.01, 0.5])


def peaked(rng, size):
    return rng.normal(size=size) * rng.choice([4.0, 20.0])


def tied(rng, size):
    return rng.integers(rng.choice([1, 2, 5, 300]), size=size) * rng.choice([0.1, 1.0])


def holes(rng, size):
    """Most tokens are ruled out."""
    logits = rng.normal(size=size)
    logits[rng.random(size) < 0.9] = -np.inf
    logits[rng.integers(size)] = 0
    return logits


def beside_the_sample(rng, size):
    """What is likely lies where a sample taken at even steps has it all, or nothing of it."""
    step = max(1, size // rng.choice([64, 256]))
    logits = rng.normal(size=size) * 0.1
    logits[rng.integers(step) :: step] += rng.choice([-9.0, 9.0])
    return logits


def steps_of_bfloat16(rng, size):
    return torch.from_numpy(rng.normal(size=size) * 2 - 9).bfloat16().double().numpy()


def tokens_that_are_right(logits, params, seen, number, slack=1e-6):
    """In float64, by a whole sort: more than one where top-p or the random number is within `slack` of a boundary."""
    scores = torch.from_numpy(logits.astype(np.float32))
    if params.repetition_penalty != 1:
        for token in set(seen):
            by = params.repetition_penalty
            scores[token] = scores[token] / by if scores[token] > 0 else scores[token] * by
    weights = ((scores - scores.max()) / params.temperature).exp().double().numpy()
    order = np.argsort(-weights, kind="stable")[: params.top_k]
    shares = weights[order] / weights[order].sum()
    before, found = shares.cumsum() - shares, set()
    least, most = (int((before < params.top_p + near).sum()) for near in (-slack, slack))
    for count in range(least, most + 1) if params.top_p < 1 else (len(order),):
        kept = np.zeros_like(weights)
        kept[order[:count]] = weights[order[:count]]
        kept[kept < np.float32(params.min_p)] = 0
        running = kept.cumsum()
        for also in (-slack, 0, slack):
            target = min(max(number + also, 0), 1) * running[-1]
            place = np.searchsorted(running, target, side="right")
            found.add(int(min(place, np.searchsorted(running, running[-1]))))
    return found


@settings(max_examples=60)
@given(st.data())
def test_whatever_the_logits_are(data):
    """Batches of unlike rows, each row's token the same alone; with a small sample that often misses, too."""
    seed = data.draw(st.integers(0, 2**32))
    rng, size = np.random.default_rng(seed), data.draw(st.sampled_from([1, 2, 17, 300, 1500, 5120]))
    kinds = st.sampled_from([flat, peaked, tied, holes, beside_the_sample, steps_of_bfloat16])
    logits, rows, right = [], [], []
    for _ in range(data.draw(st.integers(1, 5))):
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0.3, 1.0, 5.0])),
            top_p=data.draw(st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-7])),
            top_k=data.draw(st.sampled_from([None, None, 1, 20, 700, 2000])),
            min_p=data.draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.0, 1.3])),
        )
        seen, number = [int(rng.integers(size)) for _ in range(5)], data.draw(st.floats(0, 1, exclude_max=True))
        logits.append(data.draw(kinds)(rng, size).astype(np.float32))
        rows.append((params, seen, Fixed(number)))
        right.append(tokens_that_are_right(logits[-1], params, seen, number))
    logits = torch.from_numpy(np.stack(logits))
    for size, margin, piece in ((2048, 2, 256), (256, 2, 256), (64, 1, 16), (64, 0, 16)):
        with pytest.MonkeyPatch.context() as patch:
            take_samples(patch, size, margin, piece)
            found = sample_batch(logits, rows)
            alone = [sample_batch(logits[row : row + 1], rows[row : row + 1])[0] for row in range(len(rows))]
        assert found == alone
        assert all(token.id in each for token, each in zip(found, right, strict=True))


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.5, 8.0])
@pytest.mark.parametrize("options", [{"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 5000, "top_p": 0.9}])
def test_no_row_of_a_real_vocabulary_is_sorted(spread, options):
    """However flat it is: what a sample brackets is enough. In bfloat16, too, unless thousands of tokens are equals."""
    logits = torch.randn(4, 128_256, generator=torch.Generator().manual_seed(7)) * spread
    if spread > 1:
        logits[2:] = (logits[2:] - 6).bfloat16().float()
    params = SamplingParams(temperature=1.0, **options)
    found = sample_on_device(logits, sampling_inputs([(params, [], Draw(seed)) for seed in range(4)]))
    tokens = [token.id for token in found.read()]
    assert found.resampled == []
    for row, token in enumerate(tokens):
        assert token in tokens_that_are_right(logits[row].numpy(), params, [], Draw(row).uniform())
