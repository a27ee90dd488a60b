"""Programs on the pretended node: decoding in this process, training on ranks, and the labs' torchrun scripts."""

import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from minillm.comm import Group, launch
from minillm.data import Tokens
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.model.paged import gathered
from minillm.serve import LLM, SamplingParams
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.node import streams
from tests.engine.node.launching import all_launches_on_a_node, on_node
from tests.engine.node.node import Node, pretend_node

CONFIG = ModelConfig(64, 32, 64, 2, 4, 2, head_dim=8, max_seq_len=64)
SCRIPTS = sorted((Path(__file__).parents[3] / "solutions" / "torchrun").glob("[0-9][0-9]_*.py"))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8]]


def answers(device: str, node: Node | None, **how: object) -> tuple[list[list[int]], list[Counter[str]]]:
    """Greedy and sampled tokens of an engine, and the host waits of each of its steps."""
    llm = LLM(Transformer(CONFIG, seed=0, device=device), num_blocks=64, backend=gathered, **how)
    for seed, prompt in enumerate(PROMPTS):
        llm.add(prompt, SamplingParams(max_tokens=8, temperature=0.8 * (seed % 2), seed=seed))
    outputs, waits = [], []
    while llm.unfinished:
        if node is not None:
            node.counting.clear()
        outputs += llm.step()
        if node is not None:
            waits.append(Counter(each.kind for each in node.counting.waits if not each.site.is_within(OF_THE_BACKEND)))
    errors = [record.error for record in llm.records if record.error]
    assert not errors, errors
    return [output.answers[0].tokens for output in sorted(outputs, key=lambda output: output.request_id)], waits


OF_THE_BACKEND = ("gather.py:prepare",)  # the backend for CPUs; a GPU's is Triton's, which makes no copy of its own


@pytest.mark.parametrize("ahead", [False, True], ids=["one after the other", "async scheduling"])
def test_decoding_reads_one_value_a_step(ahead: bool) -> None:
    expected, _ = answers("cpu", None)
    with pretend_node() as node:
        tokens, waits = answers("cuda", node, async_scheduling=ahead)
    assert tokens == expected
    assert max(each.total() for each in waits[1:]) == 1, waits


def test_generate_says_the_same_on_a_gpu() -> None:
    expected = list(generate(Transformer(CONFIG, seed=0), PROMPTS[0], 8))
    with pretend_node():
        assert list(generate(Transformer(CONFIG, seed=0, device="cuda"), PROMPTS[0], 8)) == expected


# Training: what a step of `Trainer` waits for.

LAYOUTS = [
    ParallelConfig(dp=2),
    ParallelConfig(dp=2, zero=2),
    ParallelConfig(dp=2, zero=3),
    ParallelConfig(tp=2, sequence=True),
    ParallelConfig(pp=2, accumulate=2),
]


# The loss, and the times of the ledger, once the step is done.
EXPECTED = (
    "the host reads values (.tolist) at minillm/train/trainer.py",
    "Event.synchronize at minillm/measure/clock.py",
)


def train(group: Group, layouts: list[ParallelConfig]) -> dict[str, tuple[list[float], list[str]]]:
    """Of each layout the losses of three steps, and the lines at which the last one has waited."""
    found = {}
    for layout in layouts:
        tokens = Tokens((np.arange(3000) ** 2 % 53).astype(np.uint16), 53, 0, 1, 9000)
        config = TrainConfig(CONFIG, seq_len=16, batch_size=4 // layout.dp, steps=3, accumulate=layout.accumulate)
        strategy = make_strategy(group, layout)
        with strategy, Trainer(config, tokens, parallel=strategy) as trainer:
            losses = []
            for _ in range(3):
                if (node := streams.NODE) is not None:
                    node.counting.clear()
                losses.append(trainer.step().loss)
            waits = [] if node is None else [f"{each.kind} at {each.site}" for each in node.counting.waits]
        found[str(layout)] = losses, waits
    return found


@pytest.mark.full
def test_trainers_learn_on_a_node_as_on_the_cpu() -> None:
    expected = launch(train, 2, LAYOUTS, timeout=200)[0]
    found = launch(on_node(train), 2, LAYOUTS, device="cuda", timeout=200)[0]
    for name, (losses, waits) in found.items():
        assert losses == pytest.approx(expected[name][0], rel=1e-4), name
        assert not [wait for wait in waits if not wait.startswith(EXPECTED)], name


# The labs.


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_torchrun_script(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    with all_launches_on_a_node(force=False), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
