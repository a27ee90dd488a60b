"""Where sharded training meets other groups, other wrappers and torch's own tools."""

import pytest
import seam_programs as programs
import torch
from seam_programs import KINDS

from minillm.comm import launch


@pytest.fixture(scope="module")
def two():
    return launch(programs.two_ranks, 2, timeout=180)


@pytest.fixture(scope="module")
def four():
    return launch(programs.four_ranks, 4, timeout=180)


@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_sharding_is_one_process_and_sends_a_shard_across(four, kind):
    """Gradient: reduce-scatter inside, all-reduce of the shard across; weights are gathered inside only."""
    for rank in four:
        distance, sent, calls, shard = rank["hybrid"][kind]
        assert distance < 1e-12
        assert calls["all_reduce"] == calls["reduce_scatter"] > 1
        padded = sent["across"]  # all-reduce of a shard over two ranks: once its bytes
        assert shard <= padded <= shard * 1.1 + 64
        again = (3 * 6 + 6 + 6 * 2 + 2) * 8 // 2  # FullyShard gathers the stem once more for its backward
        assert sent["inside"] == (3 * padded + again if kind == "fsdp" else 2 * padded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_over_replicas_hides_behind_backward(four, kind):
    assert [rank["hybrid_overlap"][kind] for rank in four] == [[True]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_replica_alone_uses_is_stepped_on_all(four, kind):
    assert max(rank["hybrid_unused"][kind] for rank in four) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_state_of_parts_within_parts_are_those_of_the_whole(four, kind):
    for rank in four:
        found, (norm, moments) = rank["nested"]
        assert found[kind][0] == pytest.approx(norm)
        for name, tensor in moments.items():
            torch.testing.assert_close(found[kind][1][name], tensor)


def test_a_second_wrapper_replaces_the_first(two):
    for rank in two:
        for (wrap, stage), (distance, calls) in rank["second_wrapper"][0].items():
            assert distance < 1e-12, (wrap, stage)
            assert "all_reduce" not in calls and calls["reduce_scatter"] == 1


def test_wrappers_that_cannot_be_replaced_are_refused(two):
    for rank in two:
        for name, (torchs, sharded, part) in rank["second_wrapper"][1].items():
            assert "torch's DistributedDataParallel reduces these gradients already" in torchs, name
            assert "sharded already" in sharded, name
            assert "is reduced by an earlier wrapper" in part, name


@pytest.mark.parametrize("kind", KINDS)
def test_torch_s_clipping_is_refused_and_ours_has_every_norm(two, kind):
    for rank in two:
        found, norms = rank["torch_tools"]
        clipped, late, copied, ours, _ = found[kind]
        assert "sees only this rank's slices" in clipped and "use clip_grad_norm_ of" in clipped
        assert "make all groups in make(named)" in late
        assert all("belongs to this process's group" in text for text in copied)
        assert ours == pytest.approx(norms)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_s_grad_scaler_agrees_on_every_rank(two, kind):
    for rank in two:
        after_good, after_overflow, moved = rank["torch_tools"][0][kind][-1]
        assert (after_good, after_overflow, moved) == (16.0, 8.0, 0.0)


def test_a_step_goes_over_each_parameter_once(two):
    visited, parameters, buckets = two[0]["visits"]
    assert visited == parameters and buckets > 3


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_and_groups_that_slices_would_mislead(two, kind):
    refused, (by_ndim, by_shape), sizes = two[0]["optimizers"][kind]
    assert refused[0].startswith("Adafactor looks at whole matrices") and refused[1].startswith("LBFGS looks at whole")
    assert len(by_ndim) == 1 and "len(parameter.whole_shape)" in by_ndim[0] and not by_shape
    assert sizes == [6, 6]


def test_buffers_are_those_of_rank_0_as_in_torch(two):
    """Rows differ between the ranks, and so do the statistics, until the next forward pass."""
    for rank in two:
        wanted_loss, wanted = rank["buffers"]["torch"]
        for name, (loss, found) in rank["buffers"].items():
            assert loss == pytest.approx(wanted_loss), name
            for key, buffer in wanted.items():
                torch.testing.assert_close(found[key], buffer)
    assert torch.equal(*(rank["buffers"]["ddp"][1]["norm.running_mean"] for rank in two))


def test_copies_of_wrappers_are_refused_and_those_of_modules_are_free(two):
    for name, texts in two[0]["copies"].items():
        assert all(f"a {name} belongs to this process's group" in text for text in texts)


def test_reentrant_checkpointing(two):
    assert max(two[0]["reentrant"].values()) < 1e-12


def test_refusals_of_fully_shard_say_what_is_wrong(two):
    said = two[0]["refusals"]
    assert "parameters outside of the blocks are used between two of them, before b" in said["between"]
    assert "a runs after b: name the blocks in the order they run" in said["order"]
    assert "a runs twice in one pass" in said["twice"]
    assert (
        "blocks pair and pair.0 overlap" in said["nested"] and "blocks pair.0 and pair overlap" in said["nested twice"]
    )
