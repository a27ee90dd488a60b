"""A ZeroOptimizer whose module is wrapped, cast or clipped by somebody else afterwards says so."""

import pytest
import zero_misuse_programs as programs

from minillm.comm import launch


@pytest.fixture(scope="module")
def ranks():
    return launch(programs.misuses, 2, timeout=120)


@pytest.mark.parametrize("stage", [1, 2])
def test_torch_s_ddp_around_the_module_afterwards(ranks, stage):
    """The order of `accelerate.prepare(model, optimizer)`: both would reduce the same .grad."""
    for rank in ranks:
        text, moved = rank["torch", stage]
        assert "torch's DistributedDataParallel reduces these gradients as well" in text and moved == 0


def test_a_ddp_that_ignores_these_parameters_is_let_through(ranks):
    for rank in ranks:
        text, moved = rank["ignored"]
        assert text == "nothing" and moved > 0


def test_torch_s_ddp_around_our_other_wrappers(ranks):
    assert all("torch's DistributedDataParallel reduces these gradients as well" in rank["ddp"] for rank in ranks)
    assert all("is not needed when a module doesn't have any param" in rank["fsdp"] for rank in ranks)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_later_wrapper_of_ours_ends_the_optimizer(ranks, stage):
    for rank in ranks:
        text, moved = rank["ours", stage]
        assert "a later wrapper reduces this module's gradients" in text and moved == 0


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["float", "to"])
def test_a_module_that_was_cast(ranks, name, stage):
    for rank in ranks:
        text, moved = rank[name, stage]
        assert "was moved or cast after the optimizer was made" in text and moved == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_a_cast_to_what_it_is_already_changes_nothing(ranks, stage):
    for rank in ranks:
        text, moved = rank["nothing", stage]
        assert text == "nothing" and moved > 0


def test_torch_s_clipping_of_the_module_s_own_gradients(ranks):
    """Stage 1 keeps full gradients, of which the own part is the average and the rest is this rank's alone."""
    assert all("use clip_grad_norm_ of the optimizer" in rank["clip"] for rank in ranks)


def test_norms_of_slices_that_are_written_by_hand(ranks):
    for rank in ranks:
        assert len(rank["norms"]) == 8
        assert all("a norm (that of torch.nn.utils.clip_grad_norm_, too) sees only" in said for said in rank["norms"])
