"""What a small all-reduce costs a decode step is one function, and labs 20, 21 and 23 say of it what it says."""

import pytest

from minillm.predict.planner.architectures import ARCHITECTURES
from minillm.predict.planner.clusters import DEVICES, cluster
from minillm.predict.planner.layout import Layout, axis_path
from minillm.predict.planner.serving import KERNEL_S, SMALL_KERNELS, decode_seconds, rank_serving


@pytest.mark.parametrize(("model", "tp"), [("llama-3-8b", 1), ("llama-3-8b", 8), ("llama-3-70b", 4)])
def test_a_decode_step_added_up_by_hand(model, tp):
    """Weights and cache over the memory's bandwidth, two all-reduces and five small kernels per layer."""
    shape, machine = ARCHITECTURES[model], cluster("h100", 8)
    read = (2 * shape.parameters + 1000 * shape.kv_bytes()) / tp / 3.35e12
    exchange = 8e-6 + (tp - 1) * 2 * shape.hidden_size / (450e9 * 0.8)
    by_hand = read + shape.num_layers * (2 * exchange * (tp > 1) + SMALL_KERNELS * KERNEL_S)
    assert decode_seconds(shape, machine, tp) == pytest.approx(by_hand, rel=1e-3)


def test_a_plan_counts_the_same_step():
    """Its TPOT is that step, and the prompts of sequences that come in while 500 tokens are written."""
    shape, machine = ARCHITECTURES["llama-3-70b"], cluster("h100", 8)
    plans = [plan for plan in rank_serving(shape, machine, 1000, 500) if plan.pp == 1]
    for plan in plans:
        running = decode_seconds(shape, machine, plan.tp, sequences=plan.sequences, context=1000 + 500 // 2)
        assert plan.tpot == pytest.approx(running + plan.sequences * plan.ttft / 500, rel=1e-9)
    assert {4, 8} <= {plan.tp for plan in plans}


def test_lab_23_tensor_parallelism_shortens_a_step_unless_small_all_reduces_are_slow():
    """The claim's rows by the planner: 20 µs shorten a step of 8B and of 70B, 100 µs lengthen that of 8B."""
    for model, micros, shorter in (("llama-3-70b", 20, True), ("llama-3-8b", 20, True), ("llama-3-8b", 100, False)):
        machine = cluster("h100", 8, latency=(micros * 1e-6, 25e-6))
        one, eight = (decode_seconds(ARCHITECTURES[model], machine, tp) for tp in (1, 8))
        assert (eight < one) == shorter, (model, micros)


def test_lab_21_tp_8_reads_half_the_weights_of_tp_4_and_pays_the_same_exchanges():
    shape, machine = ARCHITECTURES["llama-3-70b"], cluster("h100", 8)
    four, eight = (decode_seconds(shape, machine, tp) for tp in (4, 8))
    fixed = shape.num_layers * (2 * 8e-6 + SMALL_KERNELS * KERNEL_S)
    assert eight < four and (eight - fixed) / (four - fixed) == pytest.approx(0.5, abs=0.01)


def test_lab_20_sixteen_ranks_lose_to_the_networks_latency_not_to_its_bandwidth():
    machine = cluster("h100", 16)
    inside, across = (axis_path(machine, Layout(tp=tp, dp=16 // tp), "tp") for tp in (8, 16))
    assert across.bandwidth / inside.bandwidth > 0.8, "the eight cards of a node carry the ring together"
    model = ARCHITECTURES["llama-3-405b"]
    assert decode_seconds(model, machine, 16) > decode_seconds(model, machine, 8) * 0.95
    assert DEVICES["h100"].link == 450e9
