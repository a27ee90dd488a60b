"""Tensor and pipeline parallelism in the training loop: the steps of one process, checkpoints that fit any layout."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm.__main__ import run
from minillm.comm import launch
from minillm.data import Tokens
from minillm.model import ModelConfig
from minillm.train import TrainConfig, Trainer
from minillm.train.checkpoint.manifest import Manifest, committed
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

MODEL = ModelConfig(53, 16, 30, 4, 4, 1, max_seq_len=16, tie_embeddings=True, qk_norm=True)
LAYOUTS = [
    ParallelConfig(dp=2, tp=2, sequence=True),
    ParallelConfig(dp=2, pp=2, accumulate=2, zero=1),
    ParallelConfig(dp=2, tp=2, zero=3),
    ParallelConfig(dp=2, tp=2, zero=2),
    ParallelConfig(dp=2, tp=2, zero=2, dp_replicate=2),
    ParallelConfig(dp=2, pp=2, accumulate=2, zero=3),
    ParallelConfig(dp=2, pp=2, accumulate=4, schedule="zero_bubble_v"),
    ParallelConfig(dp=2, pp=2, accumulate=2, schedule="dualpipe"),
]


def trainer(batch_size, parallel=None, precision="fp32"):
    config = TrainConfig(MODEL, seq_len=16, batch_size=batch_size, steps=6, lr=1e-2, precision=precision)
    tokens = Tokens((np.arange(3000) ** 2 % 53).astype(np.uint16), 53, 0, 1, 9000)
    return Trainer(config, tokens, tokens, workers=0, parallel=parallel)


def relay(group, precision, layouts):
    """Each layout takes a step and hands its checkpoint on. Returns how far losses and norms, and weights, are off."""
    torch.set_num_threads(1)
    alone, state, found, weights = trainer(8, precision=precision), None, [], []
    for layout in layouts:
        with trainer(4, make_strategy(group, layout), precision) as ours:
            if state:
                ours.load_state_dict(state)
                again = ours.state_dict()
                assert same(again["model"], state["model"]) and same(again["optimizer"], state["optimizer"]), layout
            step, expected = ours.step(), alone.step()
            found.append([step.loss - expected.loss, step.grad_norm / expected.grad_norm - 1])
            assert step.tokens == expected.tokens
            state, snapshot = ours.state_dict(), copy.deepcopy(ours._learnt())
            if layout is layouts[-1]:
                mine, whole = ours.validate(), alone.validate()
                found.append([mine.loss - whole.loss, mine.tokens - whole.tokens])
            ours.step()
            ours._unlearn(snapshot)  # as the guard does after a bad step
            again = ours.state_dict()
            assert same(again["model"], state["model"]) and same(again["optimizer"], state["optimizer"]), layout
    with alone:
        single = alone.state_dict()
    for name, tensor in single["model"].items():
        weights.append((state["model"][name] - tensor).abs().max().item())
    ours, theirs = state["optimizer"], single["optimizer"]
    assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
    assert {i: sorted(s) for i, s in ours["state"].items()} == {i: sorted(s) for i, s in theirs["state"].items()}
    assert all(
        s[key].shape == theirs["state"][i][key].shape for i, s in ours["state"].items() for key in ("exp_avg", "step")
    )
    assert ours["masters"].keys() == theirs["masters"].keys()
    return max(abs(number) for numbers in found for number in numbers), max(weights)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() - {"names"} == b.keys() - {"names"} and all(same(a[key], b[key]) for key in a if key != "names")
    return a == b


@pytest.mark.full
def test_steps_are_those_of_one_process_and_checkpoints_fit_every_layout():
    for steps, weights in launch(relay, 4, "fp32", LAYOUTS):
        assert steps < 2e-4 and weights < 5e-3  # Adam: a gradient of nearly 0 moves its weight by up to lr, 1e-2
    for steps, weights in launch(relay, 4, "bf16-master", LAYOUTS[:2]):
        assert steps < 0.1 and weights < 0.05


@pytest.mark.full
def test_whole_run_by_the_command(tmp_path, home):
    common = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--lr", "0.01", "--steps", "4"]

    def found(*options):
        assert run([*common, "--batch-size", "4", *options, "--json", "found.json"]) == 0
        return json.loads((home / "found.json").read_text())

    alone = found("--run", "alone")
    split = found("--run", "split", "--tp", "2", "--sp", "--pp", "2", "--microbatches", "4")
    assert split["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert split["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-4)
    one, other = (Manifest.read(committed(home / "runs" / name)[-1]) for name in ("alone", "split"))
    assert one.tensors.keys() == other.tensors.keys() and one.nbytes == other.nbytes


@pytest.mark.full
def test_experts_on_two_ranks_learn_what_one_process_learns(tmp_path, home):
    common = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--lr", "0.01", "--steps", "3"]
    common += ["--experts", "4", "--top-k", "2", "--json", "found.json"]

    def found(*options):
        assert run([*common, *options]) == 0
        return json.loads((home / "found.json").read_text())

    alone = found("--run", "alone", "--batch-size", "4")
    spread = found("--run", "spread", "--batch-size", "2", "--dp", "2", "--ep", "2", "--ep-nodes", "2", "--zero", "1")
    assert spread["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert spread["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-4)
    one, other = (Manifest.read(committed(home / "runs" / name)[-1]) for name in ("alone", "spread"))
    assert {name: tensor.shape for name, tensor in one.tensors.items()} == {
        name: tensor.shape for name, tensor in other.tensors.items()
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tp 3", "attention heads do not divide over 3"),
        ("--pp 9", "9 parts need 9 layers, but the model has"),
        ("--pp 2 --microbatches 3", "--microbatches 3 does not divide the 8 windows"),
        ("--pp 2 --schedule interleaved --microbatches 1", "interleaved"),
        ("--pp 2 --schedule fast", "schedule 'fast' is none of gpipe"),
        ("--microbatches 4", "--microbatches 4 is for a pipeline"),
        ("--sp", "sequence parallelism splits what tensor-parallel ranks share"),
        ("--tp 2 --sp --seq-len 33", "a sequence of 33 tokens does not divide over 2"),
        ("--dp 2 --dp-replicate 2", "dp_replicate 2 says where ZeRO's shards lie"),
        ("--dp 3 --zero 2 --dp-replicate 2", "dp_replicate 2 does not divide dp 3"),
        ("--tp 2 --zero 1 --offload cpu", "offload cpu is for ZeRO alone"),
        ("--tp 2 --compile", "--compile does not look through"),
        ("--dp 2 --ep 2", "ep 2 spreads experts, but this model has none"),
        ("--dp 4 --ep 3 --experts 6", "ep 3 does not divide dp 4"),
        ("--dp 4 --ep 4 --ep-nodes 3 --experts 8", "ep_nodes 3 does not divide ep 4"),
        ("--dp 4 --ep 4 --experts 6", "6 experts do not divide over 4 expert-parallel ranks"),
        ("--top-k 2", "top_k 2 chooses among experts"),
        ("--experts 2 --top-k 3", "top_k 3 is more than num_experts 2"),
        ("--experts 8 --top-k 5", "top_k 5 does not divide the 96 columns"),
        ("--dp 65 --batch-size 65", "nproc=65 must be a whole number from 1 to 64"),
    ],
)
def test_bad_input_is_one_sentence_before_any_rank_starts(options, said, home, capsys):
    arguments = ["train", "--model-size", "tiny", "--data", "text", "--batch-size", "8", *options.split()]
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_a_layout_knows_its_ranks():
    layout = ParallelConfig(dp=2, tp=2, pp=2, accumulate=4, schedule="zero_bubble")
    assert layout.world_size == 8 and layout.is_hybrid and layout.order.microbatches == 4
    assert str(replace(layout, sequence=True)) == "dp 2, zero 0, accumulate 4, tp 2 sequence, pp 2 zero_bubble"
