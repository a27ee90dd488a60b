"""The kernel's loopback counters see the bytes that an engine over ranks, and a hand-over, is predicted to send."""

import pytest

from minillm.comm import launch
from minillm.measure import ledger, wire
from minillm.model import ModelConfig, Transformer
from minillm.predict.serving.handover import handed_bytes
from minillm.serve import LLM, SamplingParams, over_ranks
from minillm.serve.transfer import PrefillPool

pytestmark = pytest.mark.wire

CONFIG = ModelConfig(512, 512, 512, 2, 8, 4, max_seq_len=1024)  # a pass of 1,000 tokens: 2 MB for an all-reduce
PROMPTS = [[(7 * place + number) % 512 for place in range(1000)] for number in range(6)]


def witness(group, pp):
    """(least bytes on the wire of a pass over 1,000 tokens; bytes that this rank says it sent, all passes together)."""

    def use(llm):
        llm.generate(PROMPTS[:1], SamplingParams(1))  # connections are made
        seen = []
        for prompt in PROMPTS[1:]:
            with wire() as on_wire:
                llm.generate([prompt], SamplingParams(1))
            seen.append(on_wire.sent)
        return min(seen)  # other programs only ever add to the counters

    with ledger() as led:
        options = {"token_budget": 1000, "num_blocks": 600}
        least = over_ranks(group, Transformer(CONFIG, seed=1), use, pp=pp, **options)
    return least, sum(led.bytes(op=op) for op in ("all_reduce", "all_gather", "send"))


@pytest.mark.parametrize(("ranks", "pp"), [(2, 1), (2, 2), (4, 2)])
def test_loopback_counters_agree(ranks, pp):
    found = launch(witness, ranks, pp)
    a_pass = sum(said for _, said in found) / len(PROMPTS)
    assert found[0][0] == pytest.approx(a_pass, rel=0.03)


def test_loopback_counters_agree_about_a_hand_over():
    model, sizes, seen = Transformer(CONFIG, seed=1), {"token_budget": 1000, "num_blocks": 600}, []
    with PrefillPool.spawn(model, 1, min_tokens=4, timeout_s=600, **sizes) as pool:
        llm = LLM(model, prefill=pool, **sizes)
        llm.generate(PROMPTS[:1], SamplingParams(1))  # connections are made
        for prompt in PROMPTS[1:]:
            with wire() as on_wire:
                llm.generate([prompt], SamplingParams(1))
            seen.append(on_wire.sent)
        handed = llm.handovers.nbytes / len(PROMPTS)
    assert handed == handed_bytes(CONFIG, 999, itemsize=4)
    assert min(seen) == pytest.approx(handed, rel=0.03)
