"""Context parallelism in the training loop: the steps of one process, its own part of the data, any other layout."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm.__main__ import run
from minillm.comm import launch
from minillm.data import TokenDataset, Tokens
from minillm.measure import ledger
from minillm.model import ModelConfig
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

MODEL = ModelConfig(53, 16, 30, 4, 4, 2, max_seq_len=24, tie_embeddings=True, qk_norm=True)
COMMON = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--lr", "0.01", "--steps", "4"]


def trainer(batch_size, seq_len=16, parallel=None, documents=False):
    """Of text in documents of 53 tokens, so that some windows hold two."""
    config = TrainConfig(MODEL, seq_len=seq_len, batch_size=batch_size, steps=6, lr=1e-2, documents=documents)
    tokens = Tokens((np.arange(3000) ** 2 % 53).astype(np.uint16), 53, 0, 1, 9000)
    return Trainer(config, tokens, tokens, workers=0, parallel=parallel)


def relay(group, layouts, seq_len, documents=False):
    """Each layout takes a step and hands its checkpoint on. Returns how far losses and norms are off, and bytes sent
    over dp × cp by each."""
    torch.set_num_threads(1)
    alone, state, found, sent = trainer(8, seq_len, documents=documents), None, [], []
    for layout in layouts:
        with trainer(8 // layout.dp, seq_len, make_strategy(group, layout), documents) as ours:
            if state:
                ours.load_state_dict(state)
            with ledger() as led:
                step, expected = ours.step(), alone.step()
            found.append([step.loss - expected.loss, step.grad_norm / expected.grad_norm - 1])
            assert step.tokens == expected.tokens
            state = ours.state_dict()
            mine, whole = ours.validate(640), alone.validate(640)
            found.append([mine.loss - whole.loss, mine.tokens - whole.tokens])
            sent.append(led.bytes(group="dp_cp"))
    alone.close()
    return max(abs(number) for numbers in found for number in numbers), sent


LAYOUTS = {  # by the number of ranks that share the batch, which a resumed run keeps
    1: [
        ParallelConfig(cp=4),
        ParallelConfig(cp=4, context="hybrid", zero=3),
        ParallelConfig(cp=2, tp=2, sequence=True, context="ring"),
        ParallelConfig(tp=4),
        ParallelConfig(cp=2, pp=2, accumulate=4, context="gather", zero=2),
    ],
    2: [
        ParallelConfig(cp=2, dp=2, context="ulysses", zero=1),
        ParallelConfig(dp=2, tp=2),
        ParallelConfig(cp=2, dp=2, zero=3),
    ],
}


@pytest.mark.full
@pytest.mark.parametrize(("dp", "seq_len"), [(1, 16), (2, 13)])
def test_steps_are_those_of_one_process_and_checkpoints_fit_every_layout(dp, seq_len):
    layouts = [replace(each, pad=True) if each.cp > 1 else each for each in LAYOUTS[dp]]
    for off, sent in launch(relay, 4, layouts, seq_len):
        assert off < 2e-4
        reduced = [num_bytes > 0 for num_bytes in sent]
        assert reduced == [each.cp > 1 for each in layouts]  # the sum over cp is not left out where dp is 1


@pytest.mark.full
def test_documents_keep_apart_on_every_axis():
    layouts = [ParallelConfig(cp=4), *LAYOUTS[1][2:], ParallelConfig(cp=2, tp=2, context="ulysses", zero=3)]
    for off, _ in launch(relay, 4, [replace(each, pad=each.cp > 1) for each in layouts], 13, True):
        assert off < 2e-4


def test_documents_are_trained_on_and_validated_as_if_each_were_alone():
    """RoPE looks at distances only, so a document gives the same losses wherever it stands in a window."""
    with trainer(8, documents=True) as ours:
        dataset = ours.loader.dataset
        indices = ours.loader.load(0).indices
        inputs, targets = dataset.batch(indices)
        documents = dataset.documents(indices)
        total, pieces = 0.0, 0
        for row, its_targets, its_documents in zip(inputs, targets, documents, strict=True):
            for one in its_documents.unique():
                mine = its_documents == one
                total += ours.model(row[None, mine], targets=its_targets[None, mine])[0].item()
                pieces += 1
        assert pieces > len(inputs), "some window should hold two documents"
        validated = ours.validate().loss
        assert ours.step().loss == pytest.approx(total / inputs.numel(), rel=1e-5)
    with trainer(8) as mixed:
        assert abs(mixed.validate().loss - validated) > 1e-5


def test_a_separator_ends_its_document():
    tokens = Tokens(np.array([5, 6, 0, 7, 0, 0, 8, 9, 3], dtype=np.uint16), 53, 0, 3, 9)
    dataset = TokenDataset(tokens, 4, torch.tensor([0, 3]))
    assert dataset.documents([0, 1]).tolist() == [[0, 0, 0, 1], [1, 2, 3, 3]]
    with pytest.raises(ValueError, match="Tensor does not say where documents end"):
        TokenDataset(torch.arange(9), 4).documents([0])
    with pytest.raises(ValueError, match="compile would begin anew"):
        TrainConfig(MODEL, seq_len=16, compile=True, documents=True)


class Watched:
    """An array that notes which of its elements are read."""

    def __init__(self, array):
        self.array, self.read = array, set()

    def __len__(self):
        return len(self.array)

    def __array__(self, *_, **__):
        raise AssertionError("all of it is read")

    def __getitem__(self, places):
        self.read |= set(np.asarray(places).ravel().tolist())
        return self.array[places]


def test_a_rank_reads_its_own_part_of_a_window():
    watched = Watched(np.arange(100, dtype=np.uint16))
    tokens = Tokens(watched.array, 100, 0, 1, 100)
    object.__setattr__(tokens, "array", watched)
    dataset = TokenDataset(tokens, 16, torch.tensor([0, 1, 14, 15]))
    inputs, targets = dataset.batch([0, 2])
    assert inputs.tolist() == [[0, 1, 14, 15], [32, 33, 46, 47]] and torch.equal(targets, inputs + 1)
    assert watched.read == {0, 1, 2, 14, 15, 16, 32, 33, 34, 46, 47, 48}


def test_padding_has_no_targets():
    dataset = TokenDataset(torch.arange(40), 13, np.array([12, 13, 14, 15]))
    inputs, targets = dataset.batch([1])
    assert inputs[0, 0] == 25 and targets.tolist() == [[26, -100, -100, -100]] and inputs.shape == (1, 4)


def losses(home, *arguments):
    assert run([*COMMON, "--batch-size", "4", *arguments, "--json", "found.json"]) == 0
    return json.loads((home / "found.json").read_text())


@pytest.mark.full
def test_whole_run_by_the_command_and_resumed_in_another_layout(home):
    alone = losses(home, "--run", "alone")
    cut = losses(home, "--run", "cut", "--cp", "2", "--context", "ulysses")
    assert cut["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert cut["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-4)
    assert run(["train", "--resume", "--run", "cut", "--tp", "2", "--json", "found.json"]) == 0
    resumed = json.loads((home / "found.json").read_text())
    assert resumed["losses"] == [] and resumed["validation_loss"] == pytest.approx(cut["validation_loss"], rel=1e-6)


@pytest.mark.full
def test_under_torchrun(home):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minillm"]
    argv = [*torchrun, *COMMON, "--batch-size", "2", "--cp", "2", "--context", "ring"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("on 2 ranks") == done.stdout.count("bits per byte: the best") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--cp 2 --seq-len 30", "a sequence of 30 tokens does not divide into equal parts for cp 2 zigzag: use 32"),
        ("--cp 4 --context ulysses", "2 heads do not divide over 4 ranks of Ulysses attention"),
        ("--cp 2 --tp 2 --context ulysses", "1 heads do not divide over 2 ranks of Ulysses attention"),
        ("--cp 2 --context spiral", "context 'spiral' is unknown: use one of ring, zigzag, ulysses, hybrid, gather"),
        ("--cp 6 --context hybrid --node 4", "node 4 does not divide cp 6"),
        ("--pad", "--pad lengthens windows for --cp ranks to share: add --cp"),
        ("--cp 2 --compile", "--compile does not look through"),
        ("--cp 2 --zero 1 --offload cpu", "offload cpu is for ZeRO alone"),
        ("--cp 0", "cp"),
    ],
)
def test_bad_input_is_one_sentence_before_any_rank_starts(options, said, home, capsys):
    assert run([*COMMON, "--batch-size", "8", *options.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
