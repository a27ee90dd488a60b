"""What candidates say to the number questions: right answers said differently and wrong ones of many kinds, counted.

A right answer comes in another unit, another spelling, with words around it, by another route or another convention
that the question leaves open. A wrong one is a mistake that people make, no number at all, or something copied.
"""

import random
from collections import Counter

import pytest

from course.lab20_design_training import receipts as training
from course.lab21_design_serving import receipts as serving
from course.lab24_interview import drills
from course.shared.decisions import Decision, judge

HOME = {name: cases for cases in (training.CASES, serving.CASES) for name in cases}
STATES = ("seventy_on_64", "states")


def asked(where: tuple[str, ...]) -> Decision:
    """A decision of a problem by two names, a drill by KIND:SEED."""
    return drills.drill(where[0]) if len(where) == 1 else HOME[where[0]].decisions(where[0])[where[1]]


RIGHT = {  # kind: (question, what is said)
    "another unit": [
        (STATES, "1270 GB"), (STATES, "1.155 TiB"), (STATES, "10.16 Tbit"), (STATES, "1,270,000 MB"),
        (("seven_on_8", "replica"), "113 GiB"), (("rag_32k", "cache"), "10500 MB"), (("rag_32k", "ttft"), "1850 ms"),
        (("checkpoint_interval", "mtbf"), "186 minutes"), (("checkpoint_interval", "mtbf"), "0.129 days"),
        (("checkpoint_interval", "interval"), "0.227 h"), (("money_and_energy", "days"), "1646 hours"),
        (("money_and_energy", "days"), "9.8 weeks"), (("money_and_energy", "energy"), "20,800,000 kWh"),
        (("a_hang", "lost"), "2.73k"), (("eight_on_24gb", "tpot"), "53,500 µs"), (("scaling", "busy"), "25 percent"),
        (("four_hundred_on_16k", "bubble"), "10.5 per cent"), (("offline_batch", "hours"), "0.71 days"),
    ],
    "spelled out": [
        (STATES, "1.27 terabytes"), (STATES, "1.27 × 10^12 bytes"), (STATES, "1.27*10^12"), (STATES, "1.27E12 B"),
        (("rag_32k", "cache"), "10.5 gigabytes"), (("rag_32k", "cache"), "10.5 billion bytes"),
        (("many_adapters", "adapter"), "84 megabytes"), (("fine_tune_on_a_node", "adapters"), "0.2 billion parameters"),
        (("a_hang", "lost"), "2731 GPU hours"), (("a_straggler", "lost"), "1/6"), (("scaling", "busy"), "1/4"),
        (("scaling", "busy"), "a quarter"), (("a_straggler", "lost"), "one sixth"), (("seven_on_8", "stage"), "ZeRO-3"),
        (("seven_on_8", "stage"), "stage 3"), (("chat_70b", "demand"), "60 thousand tokens per second"),
        (("at_the_edge", "speed"), "36 tok/s"), (("bursts", "load"), "71 seconds"), (("tail_at_85", "mean"), "17/3"),
    ],
    "words around it": [
        (STATES, "about 1.27 TB"), (STATES, "~1.3 TB"), (STATES, "1.27 TB in all"), (STATES, "roughly 1.3 TB in total"),
        (("seven_on_8", "replica"), "≈ 121 GB per GPU"), (("checkpoint_interval", "interval"), "around 13.6 minutes"),
        (("checkpoint_interval", "mtbf"), "approximately 3.1 hours"), (("bursts", "backlog"), "some 1,950 requests"),
        (("money_and_energy", "days"), "69 days or so"), (("gpt3_on_1024", "days"), "it takes 33 days"),
        (("does_speculation_pay", "alone"), "2x"), (("does_quantization_pay", "one"), "3.6 times faster"),
        (("at_the_edge", "speed"), "at most 36"), (("tail_at_85", "tail"), "30 service times"),
        (("chat_70b", "inside"), "3000 requests"), (("slower_on_two_nodes", "ratio"), "3 times slower"),
        (("fine_tune_on_a_node", "missing"), "640 GB are missing"),
    ],
    "another route": [  # rounded sizes, a bound from a data sheet, whole nodes
        (STATES, "1.26 TB"), (STATES, 18 * 70e9), (STATES, "1.2 TB"), (("seven_on_8", "replica"), 18 * 7e9),
        (("rag_32k", "cache"), 32768 * 327680), (("does_speculation_pay", "ridge"), 989 / 3.35),
        (("money_and_energy", "flops"), 6 * 405e9 * 15.6e12), (("eight_on_24gb", "tpot"), 16 / 300),
        (("many_adapters", "adapter"), 16 * 2 * 2.62e6), (("bursts", "load"), 140 / 2),
        (("bursts", "backlog"), 15 * 130),
        (("split_prefill_decode", "moved"), 2048 * 0.33e6), (("four_hundred_on_16k", "bubble"), 15 / 143),
        (("checkpoint_interval", "interval"), (60 * 11100) ** 0.5), (("chat_70b", "gpus"), 128),
        (("fine_tune_on_a_node", "missing"), 1260e9 - 640e9), (("blocked_by_a_prompt", "stall"), "1.3 s"),
    ],
    "another convention": [
        (("money_and_energy", "days"), 76), (("money_and_energy", "energy"), "23 GWh"), (("gpt3_on_1024", "days"), 34),
        (("does_speculation_pay", "ridge"), 174), (("does_quantization_pay", "one"), 16 / 4.25),
        (("seventy_on_64", "days"), "3243"), (("rag_32k", "cache"), "9.77 GiB"), (("seven_on_8", "replica"), "126 GB"),
    ],
}  # fmt: skip

WRONG = {
    "a factor of one thousand": [
        (STATES, "1.27 GB"), (STATES, "1270 TB"), (("rag_32k", "cache"), "10.5 MB"), (("rag_32k", "cache"), "10.5 TB"),
        (("many_adapters", "adapter"), "84 kB"), (("many_adapters", "adapter"), "84 GB"),
        (("checkpoint_interval", "interval"), "817 ms"), (("eight_on_24gb", "tpot"), "54 s"),
        (("money_and_energy", "energy"), "20.8 MWh"), (("bursts", "load"), "70,000"), (("a_hang", "lost"), "2.7"),
        (("split_prefill_decode", "moved"), "655 kB"), (("chat_70b", "demand"), "60"), (STATES, "1.27"),
    ],
    "bits and bytes": [
        (STATES, "10.2 TB"), (STATES, "159 GB"), (("rag_32k", "cache"), "84 GB"), (("rag_32k", "cache"), "1.3 GB"),
        (("split_prefill_decode", "moved"), "5.2 GB"), (("at_the_edge", "speed"), "284"),
        (("at_the_edge", "speed"), "4.4"),
        (("many_adapters", "adapter"), "671 MB"), (("slower_on_two_nodes", "ratio"), 3 / 8), (STATES, "1.27 Tbit"),
    ],
    "one for all, all for one": [
        (STATES, "19.8 GB"), (STATES, "81 TB"), (("seven_on_8", "replica"), "15.2 GB"), (("a_hang", "lost"), 1 / 6),
        (("a_loss_spike", "lost"), 0.194), (("checkpoint_interval", "mtbf"), "5.8 days"),
        (("rag_32k", "ttft"), "14.8 s"),
        (("starving_input", "read"), "39.7 kB/s"), (("four_hundred_on_16k", "states"), "106 TB"),
        (("chat_70b", "inside"), "15"), (("bursts", "backlog"), "15"),
    ],
    "inverted": [
        (("slower_on_two_nodes", "ratio"), 1 / 3), (("does_quantization_pay", "one"), 4.5 / 16),
        (("does_speculation_pay", "alone"), 1 / 1.98), (("does_speculation_pay", "ridge"), 3.35 / 989),
        (("at_the_edge", "speed"), 1 / 35.6), (("tail_at_85", "mean"), 0.15 / 0.85), (("scaling", "busy"), 4),
        (("eight_on_24gb", "tpot"), 18.7), (("a_straggler", "lost"), 5 / 6), (("four_hundred_on_16k", "bubble"), 0.895),
    ],
    "sign": [
        (STATES, "-1.27 TB"), (("a_straggler", "lost"), "-17 %"), (("bursts", "backlog"), -1950), (STATES, "−1.27e12"),
        (("checkpoint_interval", "interval"), "-817 s"), (("tail_at_85", "tail"), -29.6), (("bursts", "load"), "0"),
    ],
    "time units": [
        (("checkpoint_interval", "interval"), "13.6"), (("checkpoint_interval", "interval"), "13.6 h"),
        (("checkpoint_interval", "mtbf"), "3.1"), (("checkpoint_interval", "mtbf"), "3.1 days"),
        (("money_and_energy", "days"), "69 h"), (("money_and_energy", "days"), "1646"), (("rag_32k", "ttft"), "1.8 ms"),
        (("gpt3_on_1024", "days"), "797"), (("bursts", "load"), "1.2"), (("a_hang", "lost"), "9.8 million"),
        (("offline_batch", "hours"), "61,751"),
    ],
    "a known confusion": [
        (STATES, "141 GB"), (STATES, "847 GB"), (("seven_on_8", "replica"), "13.5 GB"), (("seven_on_8", "stage"), 1),
        (("seven_on_8", "stage"), "stage 2"), (("a_straggler", "lost"), "20 %"), (("a_straggler", "lost"), 0.2 / 1024),
        (("checkpoint_interval", "interval"), 578), (("four_hundred_on_16k", "bubble"), 15 / 128),
        (("four_hundred_on_16k", "bubble"), 0.48), (("money_and_energy", "days"), 28),
        (("money_and_energy", "energy"), "18.9 GWh"),
        (("rag_32k", "cache"), "84 GB"), (("rag_32k", "cache"), "5.2 GB"), (("does_quantization_pay", "one"), 4),
        (("does_speculation_pay", "alone"), 2.77), (("does_speculation_pay", "alone"), 3.8 / 1.4),
        (("tail_at_85", "mean"), 6.67), (("tail_at_85", "mean"), 0.85), (("tail_at_85", "tail"), 5.7),
        (("tail_at_85", "tail"), 7.8), (("bursts", "backlog"), 5200), (("bursts", "load"), "35 s"),
        (("scaling", "busy"), 1), (("eight_on_24gb", "tokens"), 10225), (("eight_on_24gb", "tpot"), 0.107),
        (("chat_70b", "demand"), 200_000), (("chat_70b", "demand"), 260_000),
        (("fine_tune_on_a_node", "adapters"), 65.5e6),
        (("fine_tune_on_a_node", "missing"), "1.27 TB"), (("many_adapters", "adapter"), "42 MB"),
        (("slower_on_two_nodes", "ratio"), 24), (("split_prefill_decode", "moved"), "5.2 GB"),
    ],
    "no number": [
        (where, said)
        for where in (STATES, ("a_straggler", "lost"), ("tail_at_85", "mean"))
        for said in ("", "   ", "many", "I would measure it", "it depends on the network", None)
    ],
    "copied question": [(where, asked(where).question) for where in (STATES, ("rag_32k", "cache"), ("bursts", "load"))],
    "keywords": [
        (STATES, "ZeRO-3 Adam 18 bytes master moments gradients"), (STATES, "bytes GPU 64 70B states"),
        (("checkpoint_interval", "interval"), "Young sqrt 2 save MTBF"),
        (("rag_32k", "cache"), "2 layers kv heads dim 2"),
        (("tail_at_85", "tail"), "p99 rho ln queue"), (("a_straggler", "lost"), "slowest rank synchronous 1.2"),
    ],
    "another kind": [
        (STATES, "5 s"), (STATES, "5 GB/s"), (STATES, "1.27 TFLOP"), (("bursts", "load"), "70 GB"),
        (("a_straggler", "lost"), "17 s"), (("money_and_energy", "days"), "69 GB"), (("scaling", "busy"), "25 ms"),
        (("a_hang", "lost"), "2731 dollars"), (("at_the_edge", "speed"), "36 GB/s"),
    ],
    "a list or two numbers": [
        (STATES, "1 or 2 TB"), (STATES, "1-2 TB"), (STATES, "1,27 TB"), (STATES, [1.27e12]), (STATES, "1.2.7 TB"),
        (("a_straggler", "lost"), "17 20"), (("tail_at_85", "mean"), "5.7, 29.6"), (("scaling", "busy"), "1/0"),
    ],
}  # fmt: skip
RIGHT_ANSWERS = [(kind, where, said) for kind, answers in RIGHT.items() for where, said in answers]
WRONG_ANSWERS = [(kind, where, said) for kind, answers in WRONG.items() for where, said in answers]


@pytest.mark.parametrize(("kind", "where", "said"), RIGHT_ANSWERS)
def test_a_right_answer_said_differently_is_accepted(kind, where, said):
    verdict = judge(asked(where), said)
    assert verdict.kind == "right", f"{kind}: {said!r} to {asked(where).question!r}: {verdict.sentence}"


@pytest.mark.parametrize(("kind", "where", "said"), WRONG_ANSWERS)
def test_a_wrong_answer_is_refused_with_a_sentence(kind, where, said):
    verdict = judge(asked(where), said)
    assert verdict.kind != "right", f"{kind}: {said!r} to {asked(where).question!r}"
    assert verdict.sentence.endswith((".", "?")) and len(verdict.sentence) > 10


def spoken(decision: Decision, draw: random.Random) -> list[str]:
    """A drill's number in ways in which it is said."""
    value, unit = decision.value, decision.unit
    around = draw.choice(("about {}", "~{}", "{} or so", "roughly {}", "{}"))
    said = [around.format(f"{value:.9g} {unit}".strip()), f"{value:.9e}"]
    said += {
        "B": [
            f"{value / 1e9:.9g} GB",
            f"{value / 2**20:.9g} MiB",
            f"{value / 1e6:.9g} megabytes",
            f"{8 * value:.9g} bits",
        ],
        "s": [f"{1e3 * value:.9g} ms", f"{value / 60:.9g} minutes"],
        "days": [f"{24 * value:.9g} hours", f"{value / 7:.9g} weeks"],
        "": [f"{value:.9g}x"] if value > 1 else [f"{100 * value:.9g} %"],
    }.get(unit, [])
    return said


@pytest.mark.parametrize("kind", drills.DRILLS)
def test_drills_take_their_number_as_it_is_said(kind):
    for seed in range(6):
        decision = drills.drill(f"{kind}:{seed}")
        for said in spoken(decision, random.Random(seed)):
            assert judge(decision, said).kind == "right", f"{said!r} to {decision.question!r}"


@pytest.mark.parametrize("kind", drills.DRILLS)
def test_drills_refuse_what_is_no_answer(kind):
    for seed in range(6):
        decision = drills.drill(f"{kind}:{seed}")
        wrong = (
            (decision.value or 1) * 5.7,
            (decision.value or 1) / 5.7,
            -decision.value - 1,
            "",
            "no idea",
            decision.question,
            "3 apples",
        )
        for said in wrong:
            assert judge(decision, said).kind != "right", f"{said!r} to {decision.question!r}"


@pytest.mark.parametrize("kind", ["hang_report", "slow_steps"])
def test_a_rank_may_be_called_one(kind):
    for seed in range(8):
        decision = drills.drill(f"{kind}:{seed}")
        right, other = int(decision.value), int(decision.value) + 1
        assert all(
            judge(decision, said).kind == "right" for said in (f"rank {right}", f"Rank {right}", f"rank #{right}")
        )
        for said in (f"rank {other}", f"ranks {right} and {other}", f"stack {right}", "rank", "the slowest rank"):
            assert judge(decision, said).kind != "right", said


def test_the_table_has_its_counts():
    """Rows of the table: kinds of answers and how many of each, all judged as they should be by the tests above."""
    right, wrong = (Counter(kind for kind, *_ in answers) for answers in (RIGHT_ANSWERS, WRONG_ANSWERS))
    assert sum(right.values()) >= 60 and len(right) >= 5 and min(right.values()) >= 8
    assert sum(wrong.values()) >= 100 and len(wrong) >= 10 and min(wrong.values()) >= 3
    assert len({where for _, where, _ in RIGHT_ANSWERS + WRONG_ANSWERS}) >= 30
