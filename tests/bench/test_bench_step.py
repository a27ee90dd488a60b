"""The comparison of training steps: right gradients pass, wrong ones are not timed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm.bench.step import PEERS, compare
from minillm.data import Tokens
from minillm.model import ModelConfig
from minillm.train import TrainConfig, Trainer

TOKENS = Tokens(np.random.default_rng(0).integers(0, 61, 3000).astype(np.uint16), 61, 0, 1, 9000)
CONFIG = TrainConfig(ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=16, tie_embeddings=True), seq_len=16, batch_size=4)


@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_the_same_gradients(name):
    row = compare("step", name, PEERS[name], CONFIG, TOKENS, torch.device("cpu"), steps=1, repeats=5)
    assert row.correct and row.runs == 5 and row.ours > 0 and row.theirs > 0 and row.unit == "tokens/s"
    assert row.ratio > 0


def test_a_second_precision_is_not_the_first_one_s():
    """accelerate keeps one for the whole process."""
    used = []
    for precision in ("fp32", "bf16"):
        with Trainer(replace(CONFIG, precision=precision), TOKENS, workers=0) as ours:
            theirs = PEERS["transformers, accelerate loop"](ours, TOKENS)
            used.append(theirs.accelerator.mixed_precision)
    assert used == ["no", "bf16"]


def test_peers_train_alike():
    """After several updates too: the same loss step by step, so both do the same work."""
    with Trainer(CONFIG, TOKENS, workers=0) as ours:
        theirs = PEERS["transformers, plain loop"](ours, TOKENS)
        for group in theirs.optimizer.param_groups:
            group["lr"] = CONFIG.lr / CONFIG.warmup_steps
        assert ours.step().loss == pytest.approx(theirs.step(), abs=1e-5)
        assert ours.step().loss == pytest.approx(theirs.step(), abs=1e-4)


def test_wrong_gradients_are_not_timed():
    def wrong(ours, tokens):
        peer = PEERS["transformers, plain loop"](ours, tokens)
        peer.model.model.norm.weight.data.mul_(1.01)
        return peer

    row = compare("step", "wrong", wrong, CONFIG, TOKENS, torch.device("cpu"), steps=1, repeats=5)
    assert not row.correct and row.ratio is None and row.runs == 0
