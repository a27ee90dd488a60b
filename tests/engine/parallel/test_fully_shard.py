"""ZeRO stage 3 computes what one process computes, and holds and sends what the formulas say."""

import math
import re

import pytest
import sharding_programs as programs
import torch
from sharding_programs import CASES

from minillm.comm import launch
from minillm.predict.model import ADAM_FP32
from minillm.predict.training import sharding as predict


@pytest.fixture(scope="module")
def against_one_process():
    """[{(world_size, case): result}] of 4 ranks."""
    return launch(programs.against_one_process, 4, timeout=180)


def test_gradients_norm_and_weights_are_those_of_one_process_in_float64(against_one_process):
    for place, result in against_one_process[0].items():
        assert max(result["worst"].values()) <= 1e-10, (place, result["worst"])
        assert result["left"] == [], place


def test_whole_weights_are_bit_equal_on_all_ranks(against_one_process):
    for world_size, case in against_one_process[0]:
        digests = {ranks[world_size, case]["digest"] for ranks in against_one_process if (world_size, case) in ranks}
        assert len(digests) == 1, (world_size, case)


def test_traffic_and_gathered_bytes_are_as_predicted(against_one_process):
    for (world_size, case), result in against_one_process[0].items():
        config, options, shard = CASES[case]
        if "frozen" in options or "blocks" in shard:
            continue
        blocks, rest = predict.fully_shard_units(config)
        wanted = predict.fully_shard_traffic(
            blocks, rest, world_size, itemsize=8, microbatches=options.get("microbatches", 1)
        )
        assert result["calls"] == {"all_gather": wanted.all_gathers, "reduce_scatter": wanted.reduce_scatters}
        assert result["bytes"] == wanted.bytes
        prefetch = shard.get("prefetch", 1)
        assert (
            result["peak_bytes"]
            == predict.fully_shard_held(blocks, rest, world_size, itemsize=8, prefetch=prefetch).gathered
        )
        assert result["peak_groups"] == prefetch + 1
    # Frozen: only what trains is reduced; a block of which a part is frozen has two flat parameters.
    assert against_one_process[0][4, "frozen"]["calls"] == {"all_gather": 11, "reduce_scatter": 3}
    assert against_one_process[0][4, "one unit"]["calls"] == {"all_gather": 1, "reduce_scatter": 1}


@pytest.fixture(scope="module")
def resources(tmp_path_factory):
    return launch(programs.resources, 4, tmp_path_factory.mktemp("offload"), timeout=180)


@pytest.mark.full
def test_memory_by_kind_is_as_predicted(resources):
    blocks, rest = predict.fully_shard_units(programs.DEEP)
    for rank in resources:
        for world_size, (peak, buffers, parameters) in rank["held"].items():
            wanted = predict.fully_shard_held(blocks, rest, world_size)
            assert peak.parameter == wanted.parameter
            assert peak.gradient == wanted.gradient
            assert peak.optimizer == wanted.optimizer + 4 * parameters  # Adam counts its steps in 4 bytes each
            assert peak.buffer - buffers == wanted.gathered  # at most two units, whatever the depth
            states = ADAM_FP32.per_rank(sum(blocks) + rest, world_size, stage=3)
            assert peak.parameter + peak.gradient + peak.optimizer == pytest.approx(states, rel=0.02)


@pytest.mark.full
def test_whole_gradients_are_those_of_two_blocks_and_the_rest(resources):
    blocks, rest = predict.fully_shard_units(programs.DEEP)
    for rank in resources:
        assert rank["whole gradients"] == (predict.fully_shard_held(blocks, rest, 4).whole_gradients, [])


@pytest.mark.full
def test_a_model_on_meta_is_initialised_unit_by_unit_to_the_same_bits(resources):
    for rank in resources:
        same_weights, same_output, peak, shards, largest_unit = rank["meta"]
        assert same_weights and same_output
        assert shards < peak <= shards + largest_unit < 2 * shards


@pytest.mark.full
def test_masters_are_float32_and_weights_travel_in_16_bits(resources):
    blocks, rest = predict.fully_shard_units(programs.DEEP)
    for rank in resources:
        sent, kept, saved = rank["precision"]
        assert sent[None] == predict.fully_shard_traffic(blocks, rest, 4, itemsize=2).bytes
        assert sent[torch.float32] == predict.fully_shard_traffic(blocks, rest, 4, itemsize=2, reduce_itemsize=4).bytes
        assert kept == {torch.float32} and saved == {torch.bfloat16}


@pytest.mark.full
def test_shards_and_state_in_host_memory_or_in_files_change_nothing(resources):
    for rank in resources:
        same, mapped, in_files, wanted = rank["offload"]
        assert same and mapped == {True} and in_files == wanted


@pytest.mark.full
def test_state_comes_back_whole_on_any_number_of_ranks(resources):
    for rank in resources:
        distance, errors = rank["state"]
        assert distance["on 4 ranks"] == 0 and max(distance.values()) <= 1e-12
        wanted = (
            "norm.weight is missing",
            r"is \[3\] in the state",
            "has other",
        )
        for text, error in zip(wanted, errors, strict=True):
            assert re.search(text, error)


@pytest.mark.full
def test_torch_fully_shard_agrees(resources):
    for rank in resources:
        assert max(rank["peer"]) <= 1e-10


@pytest.fixture(scope="module")
def corners():
    return launch(programs.corners, 2, timeout=180)


def test_bad_input_is_one_sentence(corners):
    wanted = {
        "model": r"rank 1 has stem.2.weight \[6, 4\] torch.float32 where rank 0 has stem.2.weight \[5, 4\]",
        "frozen": "rank 1 has head.bias .* frozen where rank 0 has head.bias",
        "tied": "blocks.1.weight and blocks.3.weight are tied but lie in different blocks",
        "blocks": "block 'stem.9' is not a part of the Toy",
        "no blocks": "Linear has no nn.ModuleList to shard by",
        "prefetch": "prefetch -1",
        "meta": "blocks.0.attention_norm.weight is on 'meta'",
        "shape": r"is \[1\], but the parameter \[16\]",
        "nothing": "no parameters",
        "moved": "before sharding",
        "earlier pass": "earlier forward pass",
        "out of order": "blocks.1 runs after blocks.2",
        "outside": "call the FullyShard itself",
        "twice": "nothingnothing",
    }
    for errors, *_ in corners:
        for name, text in wanted.items():
            assert re.search(text, errors[name]), (name, errors[name])
    assert corners[0][0]["lacking"] == "nothing"
    assert "no gradient on rank 1 of group 'world' for blocks.3.weight" in corners[1][0]["lacking"]


def test_blocks_left_out_repeated_or_unused_are_still_one_process(corners):
    for _, (once, twice), found, _ in corners:
        assert torch.equal(twice, 2 * once)  # backward through the same pass again
        for name, (distance, gathers, peak_groups) in found.items():
            assert distance <= 1e-10, name
            assert gathers == 2 * 5 + 1, name  # the stem's backward reads weights: one more
            assert peak_groups == 2, name


def test_the_norm_is_global_scaled_and_the_same_on_every_rank(corners):
    norm, unscaled, clipped, _ = corners[0][3]
    assert corners[1][3][:3] == [norm, unscaled, clipped]
    assert unscaled == pytest.approx(norm / 4) and clipped == pytest.approx(min(1.0, unscaled), rel=1e-4)
    assert not any(math.isfinite(norms[3]) for *_, norms in corners)  # though one rank's own gradient was
