"""Lab 02's measurements and figures: what they return, not how fast the machine is."""

import pytest
import torch
from matplotlib.figure import Figure

from course.lab02_one_device import experiments, watching
from course.lab02_one_device import figures as pictures
from minillm.model import ModelConfig
from minillm.train import PRECISIONS

TINY = ModelConfig(64, 16, 24, 2, 2, 1, max_seq_len=32, tie_embeddings=True)


def test_memory_of_a_step_is_predicted_by_kind_and_drawn():
    found = experiments.step_memory(TINY, "bf16", batch=2, seq=32)
    predicted = experiments.predicted_memory(TINY, 2, 32, "bf16")
    assert (predicted.activation, predicted.total) == pytest.approx((found.activation, found.total), rel=0.02)
    figure = pictures.draw_memory({"bf16": found}, {"bf16": predicted})
    assert figure.axes[0].get_xlabel() == "memory (MiB)"
    assert isinstance(pictures.memory_plan("Llama 3.2 1B", 1, 1024), Figure)


def test_recompute_tradeoff_counts_what_it_predicts():
    found = experiments.recompute_tradeoff(TINY, batch=1, seq=16, repeats=1)
    assert list(found) == list(experiments.MODES)
    assert all(numbers["flops"] == numbers["predicted_flops"] for numbers in found.values())
    assert found["full"]["activation"] < found["none"]["activation"] and found["none"]["seconds"] > 0
    assert isinstance(pictures.draw_recompute(found), Figure)
    assert isinstance(pictures.recompute_plan(layers=8), Figure)


def test_early_stop_saves_the_last_matmul():
    assert experiments.early_stop(8, 4) == pytest.approx({"early stop": 7 / 6, "to the end": 4 / 3})


@pytest.mark.parametrize("mixed", [False, True])
def test_state_of_a_stack_is_sixteen_bytes_per_weight(mixed):
    held = watching.stack_memory(16, 32, 2, 8, mixed)
    assert held["parameter"] + held["gradient"] + held["optimizer"] == 16 * 2 * 2 * 16 * 32


def test_threads_are_given_back():
    before = torch.get_num_threads()
    experiments.count_flops(lambda: None)
    assert torch.get_num_threads() == before


def test_figures_of_splits_runs_and_gradients():
    split = dict.fromkeys(("input", "forward", "backward", "optimizer", "idle"), 0.01) | {"mfu": 0.5}
    assert isinstance(pictures.draw_split({"one": split}), Figure)
    assert isinstance(pictures.draw_runs({"A": experiments.Tuning([2.0, 1.0], [1.0, 1.0], 1.0)}), Figure)
    axes = pictures.draw_underflow(torch.tensor([1e-3, 1e-12]), 0, tokens=1, batch_tokens=1).axes[0]
    assert axes.get_title(loc="left").startswith("Scale 2^0: 50.0% become zero")
    assert set(pictures.PRECISIONS.values()) <= set(PRECISIONS)
