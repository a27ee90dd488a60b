"""ZeRO stages 1 and 2: the numbers of one process, and the bytes of the closed forms. One launch per world size."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zero_programs as programs
from zero_programs import MODEL, UNTIED, Case

from minillm.comm import launch
from minillm.model import ModelConfig
from minillm.predict.model import ADAM_FP32, ADAM_MIXED, StateBytes
from minillm.predict.training.sharding import Zero, padded_all

pytestmark = pytest.mark.drawn(2)

FP64 = StateBytes(parameter=8, gradient=8, master=0, moments=16)
FROZEN = ("blocks.0.mlp.up_proj.weight", "norm.weight")
CASES = (
    Case(MODEL, 1, 1, recompute=True),
    Case(UNTIED, 1, 2, FROZEN, max_norm=None),
    Case(MODEL, 2, 1, offload="file"),
    Case(UNTIED, 2, 2, FROZEN, offload="cpu", recompute=True),
)
BIG = ModelConfig(
    vocab_size=53, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32,
    max_seq_len=16,
)  # fmt: skip
MIXED = [(torch.bfloat16, 1, None, 1.0), (torch.float16, 2, "cpu", 1024.0), (torch.bfloat16, 2, "file", 1.0)]
PEAKS = [(stage, master) for master in (False, True) for stage in (1, 2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(world_size, name) -> each rank's result of one program; all programs of a world size run in one launch."""
    folder, done = tmp_path_factory.mktemp("nvme"), {}
    placed = lambda where: Path(folder) if where == "file" else where  # noqa: E731

    def todo(world_size):
        calls = {}
        if world_size in (2, 4):
            calls |= {("peak", *how): (programs.peaks, BIG, *how) for how in PEAKS}
        if world_size < 4:
            calls |= {case: (programs.sharded, replace(case, offload=placed(case.offload))) for case in CASES}
        if world_size in (2, 3):
            calls |= {("odd", stage): (programs.odd, stage, world_size) for stage in (1, 2)}
        if world_size == 2:
            calls |= {("torch", stage): (programs.against_torch, stage) for stage in (1, 2)}
            calls |= {("mixed", *how): (programs.mixed, how[0], how[1], placed(how[2]), how[3]) for how in MIXED}
            calls["decisions"] = (programs.decisions,)
            calls["saved"] = (programs.resumed, CASES[3], None, 2)
        if world_size == 3:
            saved = results(2, "saved")
            calls["resumed"] = (programs.resumed, replace(CASES[3], stage=1, accumulate=1), saved[0])
            calls["foreign model"] = (programs.refused, CASES[0], saved[0]["state"])
        return calls

    def results(world_size, name):
        if world_size not in done:
            calls = todo(world_size)
            ranks = launch(programs.several, world_size, list(calls.values()), timeout=120)
            done[world_size] = {key: [rank[i] for rank in ranks] for i, key in enumerate(calls)}
            assert not any(folder.iterdir()), "nothing is left on the disk"
        return done[world_size][name]

    return results


def worst(found, expected):
    """Largest error of any tensor, relative to the largest number of the expected one."""
    assert found.keys() == expected.keys()
    return max(((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(1e-12)).item() for n in found)


def worst_state(found, expected):
    """The same for torch's optimizer states; settings have to be equal."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    found, expected = (
        {f"{i}.{key}": value for i, parts in state["state"].items() for key, value in parts.items()}
        for state in (found, expected)
    )
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    return worst(found, expected)


def same_bits(ranks):
    return all(torch.equal(rank["weights"][n], ranks[0]["weights"][n]) for rank in ranks for n in rank["weights"])


def host_link(form):
    """(down, up): bytes of a step with the optimizer offloaded, the gradient shard and the updated weights (Ren et al.
    2021, §3)."""
    own = form.elements // form.world_size
    return own * form.state.gradient, own * form.state.parameter


@pytest.mark.drawn(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=["stage1", "stage1-accumulate-frozen", "stage2-file", "stage2-accumulate"])
def test_equals_one_process(run, world_size, case):
    expected, ranks = programs.alone(case), run(world_size, case)
    gradients = {name: gradient.flatten() for name, gradient in expected["gradients"].items()}
    slices = {name: torch.cat([r["slices"][name] for r in ranks if name in r["slices"]]) for name in gradients}
    assert worst(slices, gradients) < 1e-10
    buckets = ranks[0]["buckets"]
    form = Zero(padded_all(buckets, world_size), world_size, case.stage, FP64, case.accumulate)
    assert len(form.buckets) > 3 and same_bits(ranks)
    for rank in ranks:
        assert worst(rank["weights"], expected["weights"]) < 1e-10
        assert rank["norms"] == ranks[0]["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        assert worst_state(rank["state"], expected["state"]) < 1e-10
        assert rank["calls"] == form.collectives | {"all_reduce": 1}, "the one all-reduce is the norm's"
        assert sum(rank["bytes"].values()) - rank["bytes"]["all_reduce"] == form.sent
        assert rank["held"] == form.gradient and rank["left"] == 0
        assert rank["host"][:2] == (tuple(5 * x for x in host_link(form)) if case.offload else (0, 0))
    in_files = sum(rank["host"][2] for rank in ranks)  # the weights, and two moments without the padding
    assert in_files == (8 * form.elements + 16 * sum(buckets) if case.offload == "file" else 0)


@pytest.mark.parametrize("stage", [1, 2])
def test_equals_torch_s_zero_redundancy_optimizer(run, stage):
    for rank in run(2, ("torch", stage)):
        assert worst(rank["ours"], rank["theirs"]) < 1e-10


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_of_every_kind(run, stage, world_size):
    """A scalar, fewer elements than ranks, tied, strided, unused on one rank, unused on all (which must not decay)."""
    expected, ranks = programs.odd(None, stage, world_size), run(world_size, ("odd", stage))
    assert same_bits(ranks)
    for rank in ranks:
        assert worst(rank["weights"], expected["weights"]) < 1e-10
        assert torch.equal(rank["weights"]["nobody"], torch.ones(3, 3, dtype=torch.float64))
        assert worst_state(rank["state"], expected["state"]) < 1e-10
        assert worst_state(rank["again"], rank["state"]) == 0


@pytest.mark.parametrize("how", MIXED, ids=["bf16", "fp16-scaled-offloaded", "bf16-in-files"])
def test_masters_are_those_of_one_process_to_the_bit(run, how):
    dtype, _, offload, loss_scale = how
    expected, ranks = programs.mixed_alone(dtype, loss_scale), run(2, ("mixed", *how))
    masters = expected["masters"]
    for rank in ranks:
        assert all(torch.equal(rank["weights"][name], expected["weights"][name]) for name in masters)
        assert all(torch.equal(rank["state"]["masters"][name], masters[name]) for name in masters)
        assert rank["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert worst_state(rank["again"], rank["state"]) == 0
        assert all(torch.equal(rank["again"]["masters"][name], masters[name]) for name in masters)
    down, up = (sum(rank["host"][way] for rank in ranks) for way in (0, 1))
    psi = sum(padded_all([weight.numel() for weight in masters.values()], 1))
    if offload:  # P62, over all ranks, 3 steps; padding at the end of each bucket
        assert down == up == pytest.approx(3 * 2 * psi, rel=0.001)


def test_decisions_and_sentences(run):
    first, second = run(2, "decisions")
    assert first["stage"] == "stage=3 must be 1 or 2; FullyShard is stage 3, which shards parameters too."
    assert first["offload"].startswith("offload='nvme' must be None, 'cpu' or the pathlib.Path of a folder")
    assert first["cap"].startswith("bucket_cap_mb is 0")
    assert first["model"] == second["model"] and "rank 1 has weight [3, 2]" in first["model"]
    assert (
        first["unused"].startswith("no gradient on rank 0 of group 'world' for nobody")
        and "find_unused=True" in first["unused"]
    )
    assert "has been reduced already" in first["twice"] and "no_sync()" in first["twice"]
    assert not math.isfinite(first["norm"]) and not math.isfinite(second["norm"]), "one rank's infinity is everyone's"
    assert first["ratio"] == second["ratio"] == pytest.approx(2.0)


def test_a_whole_state_goes_on_anywhere(run):
    """Saved by two ranks in stage 2; loaded by torch's AdamW in one process, and by three ranks in stage 1."""
    saved, expected = run(2, "saved"), programs.alone(CASES[3])
    assert worst_state(saved[0]["state"], saved[1]["state"]) == 0
    assert worst(programs.alone(CASES[3], saved[0])["weights"], expected["weights"]) < 1e-10
    ranks = run(3, "resumed")
    assert same_bits(ranks) and worst(ranks[0]["weights"], expected["weights"]) < 1e-10
    assert worst_state(ranks[0]["state"], expected["state"]) < 1e-10
    assert "of another model" in run(3, "foreign model")[0]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("how", PEAKS, ids=["fp32-1", "fp32-2", "mixed-1", "mixed-2"])
def test_peak_bytes_by_kind(run, world_size, how):
    """P50, P51: fp32 8Ψ + 8Ψ/N and 4Ψ + 12Ψ/N, mixed 4Ψ + 12Ψ/N and 2Ψ + 14Ψ/N, and in stage 2 buckets on their way."""
    stage, master = how
    state = ADAM_MIXED if master else ADAM_FP32
    for rank in run(world_size, ("peak", *how)):
        form = Zero(tuple(rank["buckets"]), world_size, stage, state)
        assert rank["peak"]["parameter"] == form.parameter
        assert rank["peak"]["gradient"] == form.gradient_peak and rank["resting"].gradient == form.gradient
        assert rank["peak"]["optimizer"] == pytest.approx(form.optimizer, rel=0.001), "beside moments, step counters"
        at_rest = form.parameter + form.gradient + form.optimizer
        assert at_rest == pytest.approx(state.per_rank(form.elements, world_size, stage), rel=0.001)


def test_wrapping_again_replaces_the_hooks_of_the_earlier_wrapper(run):
    assert run(2, "decisions")[0]["wrapped again"] == pytest.approx(1.0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_state_is_offloaded_to_the_host():
    """Two ranks that share the card if there is only one. One process computes there, too: angles of positions are
    float32, and their cosines the card's own."""
    case = replace(CASES[3], offload="cpu")
    calls = [(programs.sharded, case), (programs.peaks, BIG, 2, True), (programs.peaks, BIG, 2, True, "cpu")]
    expected = programs.alone(case, device="cuda")
    ranks = launch(programs.several, 2, calls, device="cuda", timeout=120)
    for equal, here, offloaded in ranks:
        assert worst(equal["weights"], expected["weights"]) < 1e-9
        form = Zero(tuple(here["buckets"]), 2, 2, ADAM_MIXED)
        assert here["peak"]["optimizer"] == pytest.approx(form.optimizer, rel=0.001)
        assert offloaded["peak"]["optimizer"] == 0
        assert offloaded["host"][:2] == tuple(2 * x for x in host_link(form))
