"""Lab 08's formulas and pictures: its answers follow from `predict.training.moe` and the planner."""

import pytest
import torch

from course.lab08_expert_parallel import experiments, receipts
from course.lab08_expert_parallel import experiments_links as links
from course.lab08_expert_parallel import experiments_training as training
from course.lab08_expert_parallel import figures as pictures
from minillm.predict.training import moe


def test_the_numbers_of_the_design_answers():
    assert receipts.per_token_bytes() == pytest.approx(10e6, rel=0.01)
    serving = {cells[0]: cells for cells in receipts.design_serving().rows}
    assert serving["ep 8"][2] == "82 GB" and serving["ep 32"][1:4] == ("8", "20 GB", "128")
    assert moe.crossing_rows(256, 8, 32)[1] == pytest.approx(7, rel=0.01)
    cut, inside, across = receipts.design_training().rows
    assert cut[1] == "940 MB" and inside[1] == across[1] == "235 MB"


def test_half_of_the_experts_are_read_by_twenty_two_tokens():
    read = [1 - (1 - 8 / 256) ** tokens for tokens in (21, 22)]
    assert read[0] < 0.5 < read[1]


def test_a_fair_router_drops_a_tenth_at_capacity_factor_one():
    shares = [moe.expected_dropped_share(tokens, 2, 8, 1.0) for tokens in (64, 1024)]
    assert shares[0] == pytest.approx(0.1, abs=0.03) and shares[1] < shares[0] / 3


@pytest.mark.parametrize("fullest", links.FULLEST)
def test_skewed_tokens_load_rank_0_as_asked(fullest):
    rows = links.loads(fullest)
    assert sum(rows) == links.WORLD * links.ROWS_PER_RANK
    assert rows[0] == max(rows) == round(fullest * links.ROWS_PER_RANK) and max(rows[1:]) - min(rows[1:]) <= 2


def test_every_expert_is_asked_for_equally():
    assert torch.bincount(experiments.balanced_choice(64).flatten()).tolist() == [16] * experiments.EXPERTS


def test_equal_active_flops_but_for_the_router():
    dense, experts = training.DENSE, training.BARE
    assert experts.moe.top_k * experts.moe.intermediate_size == dense.intermediate_size


def test_a_short_training_counts_its_load():
    run = training.train(training.BARE, steps=2)
    assert len(run.losses) == 2 and run.loads.shape == (2, training.NUM_EXPERTS)
    assert torch.allclose(run.loads.sum(1), torch.ones(2)) and run.imbalance >= 1
    assert training.dropped(run, 4.0) == 0
    assert training.dropped(run, 0.5) > 0


@pytest.mark.parametrize("experts", [8, 64, 256])
def test_the_pictures_with_sliders_draw(experts):
    for view in (pictures.drops_by_chance, pictures.weights_read, pictures.rows_that_cross):
        assert view(experts=experts, top_k=2).axes[0].lines
