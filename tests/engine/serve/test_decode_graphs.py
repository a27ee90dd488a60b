"""Decoding by replay: the tokens of the naive loop, whatever comes and goes between two replays."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from recorded import READS_BACK, record
from test_proof import CONFIG, mixed_requests, nothing_left
from test_sampler import take_samples
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.model import ModelConfig, Transformer
from minillm.model.draw import sample_seed
from minillm.model.generate import generate
from minillm.model.paged import block_by_block
from minillm.serve import LLM, BlockPool, Plan, SamplingParams, Sequence
from minillm.serve.run.decode_graphs import DecodeGraphs
from minillm.serve.run.model_runner import Runner, StepOutputs
from minillm.serve.run.step import InputBuilder
from minillm.serve.run.warm_up import passes
from minillm.serve.speculate import NGram


@pytest.fixture
def recording(monkeypatch):
    """Passes are recorded as a GPU records them: operations and addresses, nothing of the host's."""
    monkeypatch.setattr(DecodeGraphs, "_record", lambda self, compute: record(compute))
    monkeypatch.setattr("minillm.model.transformer.check_tokens", lambda *_: None)  # on a GPU it reads no values


def served(llm, requests):
    """Three arrive before each step. Outputs by request."""
    arrivals, outputs = iter(enumerate(requests)), {}
    for _ in range(2000):
        for number, (prompt, params, priority, _) in islice(arrivals, 3):
            llm.add(prompt, params, request_id=str(number), priority=priority)
        outputs |= {output.request_id: output for output in llm.step()}
        if len(outputs) == len(requests):
            break
    return [outputs[str(number)] for number in range(len(requests))]


def alone(model, prompt, params):
    answers = []
    for index in range(params.n):
        seed = sample_seed(params.seed or 0, index)
        ids = []
        for token in generate(model, prompt, params.max_tokens, temperature=params.temperature, seed=seed):
            if token in params.stop_tokens:
                break
            ids.append(token)
        answers.append(ids)
    return answers


@pytest.mark.parametrize(
    "variant, options",
    [
        ({}, {"block_size": 4, "num_blocks": 20, "preemption": "swap"}),
        ({"sliding_window": 5, "qk_norm": True}, {"block_size": 1, "num_blocks": 79, "chunk": 3}),
        ({"attention_soft_cap": 5.0, "tie_embeddings": True}, {"block_size": 16, "prefix_cache": False}),
    ],
    ids=["swap", "window", "soft cap"],
)
def test_tokens_are_the_naive_loops(variant, options, recording):
    model, requests = Transformer(replace(CONFIG, **variant), seed=2), mixed_requests(20)
    llm = LLM(model, graphs=True, max_num_seqs=12, token_budget=64, reserve=0, **options)
    outputs = served(llm, requests)
    for output, (prompt, params, _, _) in zip(outputs, requests, strict=True):
        assert [answer.ids for answer in output.answers] == alone(model, prompt, params)
    graphs = llm.runner.graphs
    assert set(graphs.graphs) <= {1, 2, 4, 8, 12} and len(graphs.graphs) >= 4
    assert "preemption" not in options or sum(output.preemptions for output in outputs) > 0
    nothing_left(llm)


def test_without_recording_the_function_itself_is_called():
    model, prompts = Transformer(CONFIG, seed=2), [prompt for prompt, _, _, _ in mixed_requests(10)]
    llm = LLM(model, graphs=True, block_size=4)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8))
    assert [output.answers[0].ids for output in outputs] == [list(generate(model, prompt, 8)) for prompt in prompts]
    assert llm.runner.graphs.graphs


def test_a_warm_up_records_all_graphs_the_largest_first(monkeypatch):
    recorded = []
    monkeypatch.setattr(DecodeGraphs, "_record", lambda self, compute: recorded.append(len(compute())) or compute)
    model, requests = Transformer(CONFIG, seed=2), mixed_requests(20)
    llm = LLM(model, graphs=True, warm_up=True, max_num_seqs=12, token_budget=64, block_size=4)
    assert recorded == [12, 8, 4, 2, 1]
    outputs = served(llm, requests)
    for output, (prompt, params, _, _) in zip(outputs, requests, strict=True):
        assert [answer.ids for answer in output.answers] == alone(model, prompt, params)
    assert recorded == [12, 8, 4, 2, 1], "nothing is recorded while requests wait"
    nothing_left(llm)


def test_a_warm_up_compiles_for_all_heights_of_tiles_and_splits():
    sizes = passes(8192, 1 << 15)
    assert sizes[:4] == [(8192, 8192), (128, 128), (16, 16), (2, 2)]
    assert sizes[4:] == [(1, 1), *((1, 256 << power) for power in range(8))]
    assert passes(64, 40)[0] == (40, 40)
    llm = LLM(Transformer(CONFIG, seed=2), graphs=False, warm_up=True, token_budget=64, block_size=4)
    nothing_left(llm)


def test_a_warm_up_stays_within_a_context_that_is_no_whole_number_of_blocks():
    model = Transformer(ModelConfig(50, 32, 64, 1, 4, 2, max_seq_len=30), seed=2)
    llm = LLM(model, graphs=True, warm_up=True, block_size=8)
    assert llm.generate([[1, 2]])[0].answers[0].ids == list(generate(model, [1, 2], 16))


@torch.no_grad()
def test_a_poisoned_pool_and_what_fills_a_step_up(recording):
    """Three sequences in a graph of four: no slot is read or written that is not theirs."""
    model = Transformer(CONFIG, seed=2)
    llm = LLM(model, graphs=True, block_size=4, num_blocks=40, max_num_seqs=4)
    llm.cache.pool.fill_(float("nan"))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9))
    assert [output.answers[0].ids for output in outputs] == [list(generate(model, prompt, 9)) for prompt in prompts]
    written = llm.cache.pool[0, 0].isfinite().all(-1).all(-1).sum()
    assert list(llm.runner.graphs.graphs) == [4]
    assert int(written) == sum(len(prompt) + 8 for prompt in prompts) - 4  # the two share a block of 4


def test_with_draft_tokens_only_steps_without_any_are_replayed():
    model = Transformer(CONFIG, seed=2)
    llm = LLM(model, graphs=True, proposer=NGram(), k=3)
    prompts = [[1, 2, 3] * 5, [10]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
    assert [output.answers[0].ids for output in outputs] == [list(generate(model, prompt, 20)) for prompt in prompts]
    assert llm.runner.graphs.graphs and sum(output.drafted for output in outputs) > 0


def test_a_pass_that_reads_back_is_told_once_and_runs_as_it_comes(recording):
    model = Transformer(CONFIG, seed=2)
    model.norm.register_forward_hook(lambda module, inputs, output: output * (1 if output.sum() < 1e9 else 2))
    llm = LLM(model, graphs=True)
    with pytest.warns(UserWarning, match="decoding without CUDA graphs: RuntimeError: aten.is_nonzero") as told:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6))
    assert output.answers[0].ids == list(generate(model, [1, 2, 3], 6)) and len(told) == 1


def test_who_can_be_replayed():
    model = Transformer(ModelConfig(50, 32, 64, 1, 4, 2, max_seq_len=16))
    assert LLM(model).runner.graphs is None  # on the CPU only if asked for
    assert LLM(model, graphs=True, max_num_seqs=40).runner.graphs.sizes == [1, 2, 4, 8, 16, 32, 40]
    with pytest.raises(ValueError, match="cannot be replayed, it takes lengths from the host: use graphs=False"):
        LLM(model, graphs=True, backend=block_by_block)
    with pytest.raises(ValueError, match="graphs 'yes' must be True, False or None"):
        LLM(model, graphs="yes")


class Reads(TorchFunctionMode):
    """Counts what makes a host wait for a GPU: values of tensors that Python asks for, or that an operation needs."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self._operations = ReadsBack(self.found)
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *failure):
        super().__exit__(*failure)
        self._operations.__exit__(*failure)


class ReadsBack(TorchDispatchMode):
    """The same of operations: indexing with a mask calls `nonzero`, which no function of Python's shows."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        masked = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if name in READS_BACK or masked:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


WARM = {"temperature": 0.8}
SAMPLED = {
    "greedy": [{}],
    "temperature": [WARM, WARM | {"min_p": 0.1}],
    "top-k and top-p": [WARM | {"top_p": 0.9}, WARM | {"top_k": 5, "min_p": 0.01}, {}],
    "penalty": [{"repetition_penalty": 1.3}, WARM | {"repetition_penalty": 1.3, "top_k": 7}, {}],
    "logprobs": [{"logprobs": 3}, WARM | {"logprobs": 0}, WARM | {"logprobs": 2, "top_p": 0.9, "n": 2}, WARM],
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_step_reads_back_once(kind, recording):
    """Tokens, log-probabilities and whether logits were finite in one transfer, whatever a step does besides."""
    model, tokens = Transformer(CONFIG, seed=2), []
    llm = LLM(model, graphs=True, block_size=4, max_num_seqs=6)
    for number, options in enumerate(SAMPLED[kind]):
        llm.add([1 + number, 2, 3], SamplingParams(max_tokens=40, seed=number, **options))
    llm.step()
    for _ in range(6):
        with Reads() as reads:
            llm.step()
        assert reads.found == ["tolist"]
        tokens.append(llm.records[-1].sampled)
    assert set(tokens) == {sum(options.get("n", 1) for options in SAMPLED[kind])}


def test_a_step_with_a_row_to_be_sorted_reads_back_twice(recording, monkeypatch):
    take_samples(monkeypatch)
    params = [SamplingParams(max_tokens=20, temperature=2.0, top_p=0.99, logprobs=2, seed=seed) for seed in range(3)]
    llm, found = LLM(Transformer(CONFIG, seed=2), graphs=True), []
    for each in params:
        llm.add([1, 2, 3], each)
    llm.step()
    for _ in range(6):
        with Reads() as reads:
            llm.step()
        found.append(reads.found[:2])
    assert ["tolist", "tolist"] in found


@pytest.mark.parametrize("speculating", [False, True])
def test_a_greedy_step_reads_back_once(speculating, recording, monkeypatch):
    """Only the step's tokens, whatever its scheduling, inputs and bookkeeping do."""
    model = Transformer(CONFIG, seed=2)
    llm = LLM(model, graphs=True, block_size=4, max_num_seqs=4, proposer=NGram() if speculating else None)
    if speculating:  # it brings several tokens each: not replayed, and gathered attention asks for lengths

        def execute(runner, step):  # the token itself again
            return StepOutputs(torch.eye(61)[step.tokens[step.wanted].tolist()])

        monkeypatch.setattr(Runner, "execute", execute)
    for prompt in ([1, 2, 3], [4] * 9, [5, 6]):
        llm.add(prompt, SamplingParams(max_tokens=40))
    llm.step()
    for _ in range(6):
        with Reads() as reads:
            llm.step()
        assert reads.found == ["tolist"]


def test_only_changes_of_block_tables_go_to_the_device():
    builder, sequence = InputBuilder(BlockPool(10, 4), 3, 4), Sequence([1, 2, 3], 9)

    def changes(blocks):
        sequence.blocks = blocks
        step = builder.start(1, 0.0, Plan([(sequence, 1)]))
        inputs = builder.build(step)
        assert inputs.rows.tolist() == [2] and step.tables == [[blocks]]
        return dict(zip(inputs.table_places.tolist(), inputs.table_blocks.tolist(), strict=True))

    assert changes([7, 8]) == {8: 7, 9: 8}
    assert changes([7, 8]) == {}
    assert changes([7, 8, 5]) == {10: 5}
    assert changes([7, 9, 5]) == {8: 7, 9: 9, 10: 5}
    builder.reset()
    assert changes([7, 9, 5]) == {8: 7, 9: 9, 10: 5}


def test_rows_of_sequences_that_have_gone_are_used_again():
    """More requests than rows, and a step's own sequences keep theirs."""
    model = Transformer(CONFIG, seed=2)
    llm = LLM(model, block_size=4, max_num_seqs=3)
    prompts = [prompt for prompt, _, _, _ in mixed_requests(20)]
    params = [SamplingParams(max_tokens=1 + 5 * (i % 4)) for i in range(20)]
    outputs = llm.generate(prompts, params)
    for output, prompt, each in zip(outputs, prompts, params, strict=True):
        assert output.answers[0].ids == list(generate(model, prompt, each.max_tokens))
    assert len(llm.runner.tables.host) == 6
