"""Lab 12's measurements and figures: what they count and return, never how fast the machine is."""

import itertools
import random

import pytest
import torch
from matplotlib.figure import Figure

from course.kit.answers import answers_of
from course.lab12_decoding import checks_sampling as sampling
from course.lab12_decoding import experiments
from course.lab12_decoding import experiments_breaks as breaks
from course.lab12_decoding import experiments_peers as peers
from course.lab12_decoding import figures as pictures
from course.lab12_decoding import formulas as predict
from course.lab12_decoding.decoders import Cache, WatchedModel, recompute
from course.lab12_decoding.experiments import GPUS, MODELS, Point, Roof
from course.lab12_decoding.traffic import MemoryTraffic
from minillm.model import ModelConfig, Transformer
from minillm.serve import SamplingParams
from minillm.serve.sample.reference import filtered

ANSWERS = answers_of("12_decoding")


TINY = ModelConfig(61, 32, 48, 2, 4, 2, max_seq_len=64, init_std=0.3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_courses_decoder_is_the_loop_that_keeps_nothing():
    model = Transformer(TINY, dtype=torch.float64)
    cache, watched = Cache(TINY, 20, ANSWERS.attend, torch.float64), WatchedModel(model)
    with torch.no_grad():
        found = ANSWERS.generate(watched, [1, 2, 3, 4], 7, cache)
    assert found == recompute(model, [1, 2, 3, 4], 7)
    assert (watched.computed, len(watched.passes), cache.entries) == (10, 7, 10)
    assert cache.bytes == predict.kv_bytes(TINY, 10, 8)
    cache.room = 10
    with pytest.raises(ValueError, match="10 places and holds 10"):
        cache(*torch.zeros(3, 1, 2, 1, 8, dtype=torch.float64), layer=0, positions=None, window=None)


def test_traffic_counts_views_once_and_nothing_for_free():
    weight, other = torch.zeros(6, 4), torch.zeros(4, 3)
    with MemoryTraffic(weights=[weight]) as traffic:
        weight.t().view(4, 6)[:, :2]
        assert not traffic.read
        weight[:2] @ other
        weight[:1].expand(5, 4) @ other
        torch.nn.functional.embedding(torch.tensor([1, 1, 2]), weight)
        weight.gather(0, torch.zeros(2, 4, dtype=torch.long))
        weight[3:] = 1.0
        weight.scatter_(0, torch.zeros(1, 4, dtype=torch.long), other.T.mean(0, keepdim=True))
        other @ other.T
    assert traffic.read["weights"] == (8 + 4 + 12 + 8) * 4 and traffic.written["weights"] == (12 + 4) * 4


def test_sampling_is_that_of_the_engine_and_of_transformers():
    transformers = pytest.importorskip("transformers")
    draw = torch.Generator().manual_seed(0)
    for temperature, top_k, top_p in itertools.product((0.6, 1.0, 1.7), (None, 4), (0.5, 0.9, 1.0)):
        logits = torch.randn(12, generator=draw, dtype=torch.float64) * 2
        found = ANSWERS.distribution(logits, temperature, top_k, top_p)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        assert torch.allclose(found, filtered(logits, params, []).softmax(-1))
        warpers = [transformers.TemperatureLogitsWarper(temperature), transformers.TopPLogitsWarper(top_p)]
        if top_k:
            warpers.insert(1, transformers.TopKLogitsWarper(top_k))
        scores = logits[None]
        for warper in warpers:
            scores = warper(None, scores)
        assert torch.allclose(found, scores[0].softmax(-1))
        assert found.tolist() == pytest.approx(sampling.by_hand(logits.tolist(), temperature, top_k, top_p))


def test_nucleus_is_the_smallest_set():
    for _ in range(20):
        shares = sampling._random_shares(random.randint(2, 7))
        top_p = random.uniform(0.05, 0.95)
        kept = set(ANSWERS.nucleus(torch.tensor(shares, dtype=torch.float64), top_p).nonzero().flatten().tolist())
        assert kept == sampling.fewest(shares, top_p)
        assert sum(shares[i] for i in kept) >= top_p > sum(shares[i] for i in kept) - min(shares[i] for i in kept)


def test_the_next_token_costs_what_was_predicted():
    for ways in experiments.one_more_token((5, 9)).values():
        assert all(found["flops"] == found["predicted"] for found in ways.values())
        assert ways["cached"]["apart"] < 1e-3


def test_bytes_of_a_step_are_counted():
    for batch, context in ((1, 8), (3, 40)):
        found = experiments.bytes_of_a_step(batch, context)
        assert all(predicted == counted for predicted, counted in found.values())


def test_symptoms_tell_the_decoders_apart(monkeypatch):
    monkeypatch.setattr(breaks, "LENGTH", 48)
    monkeypatch.setattr(breaks, "_right", breaks._right.__wrapped__)
    found = {name: breaks.symptoms.__wrapped__(decoder, 48) for name, decoder in breaks.DECODERS.items()}
    assert found["right"].apart == 0 and found["right"].agree == 1
    assert found["every position + 100"].apart < 1e-3
    wrong = ("position + 1 in decode", "appended after attention", "mask without offset")
    assert all(found[name].apart > 0.05 for name in wrong)
    near, far = (breaks.symptoms.__wrapped__(breaks.PATIENTS["A"], room) for room in (48, 96))
    assert sum(far.kl) > sum(near.kl) > 0
    assert breaks.read(breaks.Decoder(), breaks.windows(1, 48)[0], 96).shape == (16, 4096)


def test_other_passes_round_and_no_more():
    exact = breaks.in_other_passes(torch.float64, batch=2, length=24)
    assert exact.changed == 0 and exact.apart < 1e-9
    coarse = breaks.in_other_passes(torch.bfloat16, batch=2, length=24)
    assert coarse.apart < 1 and coarse.gap < 0.5


def test_transformers_writes_the_same():
    pytest.importorskip("transformers")
    theirs, yours = peers.beside_transformers(prompt=12, answer=8).values()
    assert all(theirs[what] == yours[what] for what in ("tokens", "entries", "bytes", "passes"))


def test_figures():
    shapes = [("decode", batch, 1, 63) for batch in (1, 16, 64)] + [("prefill", 1, 64, 0)]
    points = [Point(*each, predict.work(experiments.WIDE, *each[1:]), 0.01 * (i + 1)) for i, each in enumerate(shapes)]
    roof = Roof(torch.bfloat16, 200e9, 10e9)
    ways = {way: {"flops": 1e9, "predicted": 1e9, "seconds": 0.1} for way in ("cached", "recomputed")}
    seen = {room: breaks.Symptoms(0.1, 3.0, 0.9, [0.1] * 20) for room in (104, 208)}
    drawn = [
        pictures.draw_roofline(points, roof),
        pictures.draw_batch(points, roof),
        pictures.draw_one_more({32: ways, 64: ways}),
        pictures.draw_patients({"A": seen, "B": seen}),
        pictures.a_sequence(3, 2),
        pictures.caches(512, 4),
        *(pictures.on_a_roof(gpu, model) for gpu in GPUS for model in MODELS),
        *(pictures.decode_by_batch("H100 SXM", model, 512, 1, 4) for model in MODELS),
    ]
    assert all(isinstance(figure, Figure) for figure in drawn)
    assert "do not fit" in pictures.decode_by_batch(model="Llama 3 70B").axes[0].texts[0].get_text()
