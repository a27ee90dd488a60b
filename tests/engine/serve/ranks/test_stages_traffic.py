"""Stages: what travels between them, to the byte, what each reads and keeps, and how many steps are under way."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from minillm.comm import Mesh, launch
from minillm.measure import ledger
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.model.generate import folder_of, generate
from minillm.parallel.tensor_parallel.load import load_part
from minillm.parallel.tensor_parallel.quantized import cut_quantized
from minillm.predict.serving.ranks import NUMBER, hidden_bytes, message_bytes, sent_bytes, step_calls
from minillm.quantize.folder import save_quantized
from minillm.quantize.formats import Int
from minillm.quantize.in_place import Settings, nbytes, quantize, quantized_layers
from minillm.serve import SamplingParams, over_ranks
from minillm.serve.ranks.message import to_numbers
from minillm.serve.ranks.runner import whole_rows
from minillm.serve.ranks.stage import Stage
from tests.engine.serve.ranks.programs import VARIANTS, model_of
from tests.engine.serve.ranks.test_ranks_load import Counted, counting

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], list(range(20)), [10]]
GREEDY = SamplingParams(8, ignore_eos=True)


def traffic(group, variant, params, options):
    """((group, op) -> calls and bytes of this rank; on rank 0 each step's inputs)."""
    steps = []

    def use(llm):
        execute = llm.runner.execute
        llm.runner.execute = lambda step: (steps.append(step), execute(step))[1]
        llm.generate(PROMPTS, params)
        return steps

    with ledger() as book:
        steps = over_ranks(group, model_of(variant), use, num_blocks=64, block_size=4, **options)
    calls = Counter((event.group, event.op) for event in book.events)
    return {key: (count, book.bytes(op=key[1], group=key[0])) for key, count in calls.items()}, steps


def replied(step, vocab_size):
    """Bytes from the last stage to rank 0: whether sampling raised, then the id of each token that is sampled; where
    draft tokens are checked, all logits of a row, or its likeliest token and that one's logit."""
    if step.sampling is not None:
        wanted = step.sampling.logprobs
        likeliest = -1 if wanted is None else int(wanted.max())  # that are told of each token, the most asked for
        return NUMBER * (1 + step.sampling.count * (1 if likeliest < 0 else 3 + 2 * likeliest))
    whole = int(whole_rows(step).sum())
    return NUMBER * (1 + 2 * (len(step.wanted) - whole)) + 4 * whole * vocab_size


@pytest.mark.parametrize(
    ("ranks", "pp", "variant", "params", "options"),
    [
        (2, 2, "plain", [GREEDY, SamplingParams(8, temperature=0.9, seed=1, n=3, logprobs=4)] * 2, {"chunk": 7}),
        (4, 2, "plain", SamplingParams(6, temperature=0.9, seed=1), {"proposer": "ngram", "k": 2}),
        pytest.param(3, 3, "deep", GREEDY, {}, marks=pytest.mark.full),
        pytest.param(4, 2, "plain", GREEDY, {"proposer": "ngram", "k": 2}, marks=pytest.mark.full),
    ],
)
def test_bytes_and_calls_are_as_predicted(ranks, pp, variant, params, options):
    config, tp = VARIANTS[variant], ranks // pp
    found = launch(traffic, ranks, variant, params, {"pp": pp, **options})
    steps = found[0][1]
    for rank, (mine, _) in enumerate(found):
        stage, last = rank // tp, rank // tp == pp - 1
        between = sum(hidden_bytes(config, len(step.tokens)) for step in steps)
        assert mine.get(("pp", "send"), (0, 0)) == ((0, 0) if last else (len(steps), between))
        assert mine.get(("pp", "recv"), (0, 0)) == (len(steps) if stage else 0, 0)
        told = [message_bytes(len(to_numbers(step))) for step in steps] + [message_bytes(0)]  # and the end
        if rank == 0:
            assert mine["world", "send"] == (len(told), sum(told) * (ranks - 1))
        elif rank == ranks - tp:
            assert mine["world", "send"][1] == sum(replied(step, config.vocab_size) for step in steps)
        else:
            assert ("world", "send") not in mine
        if tp > 1:
            reduces, gathers = of_stage(config, tp, rank % tp, first=stage == 0, last=last, steps=steps)
            assert mine["tp", "all_reduce"] == reduces and mine.get(("tp", "all_gather"), (0, 0)) == gathers


def of_stage(config, tp, rank, *, first, last, steps):
    """(calls, bytes) of the all-reduces and of the all-gathers of one stage of two, which has half of the layers."""
    layers, sums = replace(config, num_layers=config.num_layers // 2), {"all_reduce": [0, 0], "all_gather": [0, 0]}
    for step in steps:
        whole = int(whole_rows(step).sum())
        calls = step_calls(layers, tp, len(step.tokens), whole=whole, likeliest=len(step.wanted) - whole)
        for call in calls:
            if {"embedding": first, "layers": True, "head": last}[call.part]:
                sums[call.op][0] += call.count
                sums[call.op][1] += sent_bytes([call], tp, rank)
    return tuple(sums["all_reduce"]), tuple(sums["all_gather"])


def under_way(group, prompts, n=1):
    def use(llm):
        llm.generate(prompts, replace(GREEDY, n=n))
        return list(llm.records), llm.runner.waited()

    return over_ranks(group, model_of("plain"), use, pp=2, chunk=8)


def test_as_many_steps_are_under_way_as_there_are_stages():
    records, waited = launch(under_way, 2, [[number] for number in range(8)])[0]
    decoding = [record for record in records if record.sampled == record.tokens]
    assert [record.in_flight for record in records[:2]] == [1, 2] and len(waited) == 2
    assert sum(record.in_flight == 2 for record in records) == len(records) - 1 and min(waited) > 0
    assert {record.tokens for record in decoding} == {4} and len(decoding) == 16
    one, another = ({name for name, _, _ in record.batch} for record in decoding[:2])
    assert not one & another


def test_samples_of_one_prompt_are_shared_among_the_steps():
    records, _ = launch(under_way, 2, [[1, 2, 3]], 4)[0]
    assert [record.tokens for record in records] == [3, *[2] * 14]
    assert [record.in_flight for record in records[2:]] == [2] * 13


def test_pieces_of_one_prompt_follow_each_other():
    records, _ = launch(under_way, 2, [list(range(40))])[0]
    pieces = [record for record in records if record.tokens > 1]
    assert [(record.tokens, record.in_flight) for record in pieces] == [(8, 1), (8, 2), (8, 2), (8, 2), (8, 2)]
    assert {record.in_flight for record in records[5:]} == {1}  # the next token needs the one before it


SIZES = ModelConfig(500, 64, 128, 6, 8, 2, max_seq_len=64, init_std=0.2)
FOLDERS = {"plain": SIZES, "tied": replace(SIZES, tie_embeddings=True, qkv_bias=True, num_layers=3), "codes": SIZES}


def read_stage(group, folder, pp):
    with Mesh(group, pp=pp, tp=group.world_size // pp) as mesh:
        with counting():
            model, said = load_part(folder, mesh.tp, take=lambda model: Stage(model, group, mesh))
        whole = Stage(load_hf(folder), group, mesh)
        cut = cut_quantized(whole, mesh.tp)
        names = dict(cut.state_dict())
        assert all(torch.equal(value, names.pop(name)) for name, value in model.state_dict().items()) and not names
        x = cut.nothing(5) if cut.first else torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            assert torch.equal(model(x), cut(x))
        return Counted.taken, said, nbytes(model), bool(quantized_layers(model)), list(cut.layers)


@pytest.mark.parametrize(
    ("name", "ranks", "pp"), [("plain", 4, 2), ("tied", 3, 3), pytest.param("codes", 4, 2, marks=pytest.mark.full)]
)
def test_a_rank_reads_the_bytes_of_its_layers(name, ranks, pp, tmp_path):
    model = Transformer(FOLDERS[name], seed=1)
    if name == "codes":
        quantize(model, Settings(Int(bits=4, group=16)))
        save_quantized(model, tmp_path / "model")
    else:
        save_hf(model, tmp_path / "model", max_shard_bytes=100_000)
    found = launch(read_stage, ranks, tmp_path / "model", pp)
    for taken, said, held, has_codes, _ in found:
        assert said <= held and taken <= 1.05 * held and has_codes == (name == "codes")
    assert sorted(layer for *_, layers in found[:: ranks // pp] for layer in layers) == list(
        range(model.config.num_layers)
    )
    twice = model.embedding.weight.nbytes if model.head is None else 0  # on the first and on the last stage
    held = sum(held for _, _, held, *_ in found)
    assert nbytes(model) + twice <= held <= 1.05 * (nbytes(model) + twice)


def answered(group, source, pp):
    def use(llm):
        [output] = llm.generate([[1, 2, 3]], SamplingParams(12))
        return output.answers[0].ids, tuple(llm.cache.pool.shape)

    return over_ranks(group, source, use, pp=pp)


def test_an_engine_of_a_folder_answers_as_one_process_and_keeps_its_own_layers_keys():
    source = folder_of("draft")
    model = load_hf(source, dtype=torch.float32)
    config, expected = model.config, list(generate(model, [1, 2, 3], 12))
    (ids, shape), *_ = launch(answered, 4, source, 2)
    assert ids == expected
    assert (shape[1], shape[4]) == (config.num_layers // 2, config.num_kv_heads // 2)
