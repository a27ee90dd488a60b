"""CUDA graphs on the pretended node: what a capture refuses, what a replay repeats, and an engine that decodes so."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from minillm.comm import Group, launch
from minillm.comm.backends.native import NativeBackend
from minillm.model import ModelConfig, Transformer
from minillm.model.paged import gathered
from minillm.serve import LLM, SamplingParams
from minillm.serve.run import decode_graphs
from minillm.serve.run.decode_graphs import DecodeGraphs
from tests.engine.node.launching import on_node
from tests.engine.node.node import Node, pretend_node
from tests.engine.node.races import NodeError

Patch = pytest.MonkeyPatch


@pytest.fixture
def node() -> Iterator[Node]:
    with pretend_node() as node:
        yield node


def captured(work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = work()
    return recorded, result


def test_a_replay_reads_what_its_input_holds_now(node: Node) -> None:
    x, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def work() -> torch.Tensor:
        total.add_(x)
        return (x * 2 + torch.arange(4, device="cuda")).view(2, 2)

    recorded, y = captured(work)
    assert y.isnan().all() and total.tolist() == [0] * 4, "a capture runs nothing"
    recorded.replay()
    assert y.tolist() == [[2, 3], [4, 5]] and total.tolist() == [1] * 4
    x.fill_(5)
    node.counting.clear()
    recorded.replay()
    assert dict(node.counting.launches) == {"replay": 1}
    assert y.tolist() == [[10, 11], [12, 13]] and total.tolist() == [6] * 4


def test_another_tensor_is_not_the_input_of_a_replay(node: Node) -> None:
    x = torch.ones(2, device="cuda")
    recorded, _ = captured(lambda: x + 1)
    x = torch.full((2,), 7.0, device="cuda")
    with pytest.raises(NodeError, match=r"a replay uses memory that has been freed since its capture: \[2\]"):
        recorded.replay()


# What a capture or a replay does not forgive. x: four ones on cuda:0; side: a stream.


def from_another_stream(x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    with torch.cuda.stream(side):
        return x * 2


def forked(x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return x * 2


def waits_for_earlier_work(x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    torch.cuda.current_stream().wait_stream(side)
    return x * 2


REFUSED: dict[str, tuple[Callable, str]] = {
    "item": (lambda x, _: x * x.sum().item(), "the host waits for cuda:0: the host reads a value .* captured"),
    "mask": (lambda x, _: x[x > 0], "the host waits .* index with a mask"),
    "values of the host": (
        lambda x, _: x + torch.tensor([1.0] * 4, device="cuda"),
        "torch.tensor of the host's values",
    ),
    "pinned memory": (lambda x, _: x.copy_(torch.ones(4).pin_memory(), non_blocking=True), "pin_memory at"),
    "blocking copy": (lambda x, _: x.copy_(torch.ones(4)), "blocking copy to the device"),
    "synchronize": (lambda x, _: torch.cuda.synchronize(), "torch.cuda.synchronize .*captured"),
    "question": (lambda x, _: torch.cuda.current_stream().record_event().query(), "Event.query at"),
    "another stream": (from_another_stream, "mul .* runs on side stream .* which it has not waited for"),
    "a fork that nobody joins": (forked, "nothing waits for side stream .* before the end"),
    "work from before": (waits_for_earlier_work, "waits for work that is not captured"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_capture_breaks_off(fault: str, node: Node) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    work, message = REFUSED[fault]
    with pytest.raises(NodeError, match=message):
        captured(lambda: work(x, side))
    assert not torch.cuda.is_current_stream_capturing() and x.tolist() == [1] * 4
    captured(lambda: x * 2)[0].replay()


def test_a_fork_that_joins_again(node: Node) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()

    def work() -> torch.Tensor:
        y = forked(x, side)
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    recorded, y = captured(work)
    recorded.replay()
    assert y.tolist() == [3] * 4


def test_an_input_that_another_stream_still_writes(node: Node) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    recorded, _ = captured(lambda: x * 2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.fill_(3)
    with pytest.raises(NodeError, match=r"the replay of a graph .* does not wait for fill_ on side"):
        recorded.replay()


# Collectives in a graph.


def reduce_in_a_graph(group: Group) -> list[list[float]]:
    x = torch.full((2,), 1.0 + group.rank, device=group.device)

    def work() -> torch.Tensor:
        y = group.all_gather(group.all_reduce(x * 2))
        return y + 1

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    recorded, y = captured(work)
    results = []
    for step in range(2):
        x.add_(step)
        recorded.replay()
        results.append(y.tolist())
    return results


@pytest.mark.full
def test_collectives_are_carried_out_again() -> None:
    assert launch(on_node(reduce_in_a_graph), 2, device="cuda") == [[[7.0] * 4, [11.0] * 4]] * 2


def asked_in_a_graph(group: Group) -> None:
    """A backend that asks in a capture which of its collectives are done."""
    group.all_reduce(torch.ones(2, device=group.device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeBackend, "_capturing", lambda self: False)
        with pytest.raises(NodeError, match=r"Event.query at .*captured"):
            captured(lambda: group.all_reduce(torch.ones(2, device=group.device)))


@pytest.mark.full
def test_a_backend_that_asks_in_a_capture() -> None:
    launch(on_node(asked_in_a_graph), 1, device="cuda")


# An engine.

CONFIG = ModelConfig(64, 32, 64, 2, 4, 2, head_dim=8, max_seq_len=64)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10], [11, 12, 13]]


@dataclass(frozen=True)
class Served:
    """tokens: of each request. waits, launches: of each step; sizes: of the graphs that were recorded."""

    tokens: list[list[int]]
    waits: list[int]
    launches: list[int]
    sizes: list[int]


def serve(device: str, node: Node | None, num_layers: int = 2, **how: object) -> Served:
    """Requests that end at different times, so that a step has five sequences, then four, ... and is padded."""
    model = Transformer(replace(CONFIG, num_layers=num_layers), seed=0, device=device)
    llm = LLM(model, num_blocks=64, block_size=4, backend=gathered, **how)
    for seed, prompt in enumerate(PROMPTS):
        llm.add(prompt, SamplingParams(max_tokens=4 + 2 * seed, temperature=0.8 * (seed % 2), seed=seed))
    outputs, waits, launches = [], [], []
    while llm.unfinished:
        if node is not None:
            node.counting.clear()
        outputs += llm.step()
        if node is not None:
            waits.append(sum(not each.site.is_within(("gather.py:prepare",)) for each in node.counting.waits))
            launches.append(node.counting.launches.total())
    errors = [record.error for record in llm.records if record.error]
    assert not errors, errors
    tokens = [output.answers[0].tokens for output in sorted(outputs, key=lambda output: output.request_id)]
    graphs = llm.runner.graphs
    return Served(tokens, waits, launches, sorted(graphs.graphs) if graphs else [])


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True], ids=["one after the other", "async scheduling"])
def test_an_engine_decodes_by_replays(ahead: bool) -> None:
    """With copies and sampling a step launches what does not depend on the number of layers, and waits once."""
    launches = []
    for num_layers in (1, 3):
        expected = serve("cpu", None, num_layers)
        with pretend_node() as node, warnings.catch_warnings():
            warnings.simplefilter("error")
            found = serve("cuda", node, num_layers, graphs=True, warm_up=True, max_num_seqs=5, async_scheduling=ahead)
        assert found.tokens == expected.tokens and found.sizes == [1, 2, 4, 5]
        assert max(found.waits[2:]) <= 1
        launches.append(found.launches[2:])
    assert launches[0] == launches[1]


def inputs_not_static(patch: Patch) -> None:
    """The graph reads the tensor that a step brings, not the one that stays."""
    sound = DecodeGraphs._fill

    def fill(self: DecodeGraphs, graph: decode_graphs.Graph, *given: object) -> None:
        if graph.replay is None:
            sound(self, graph, *given)
            graph.inputs = graph.inputs.clone()
            return
        kept, graph.inputs = graph.inputs, graph.inputs.clone()
        sound(self, graph, *given)
        del kept

    patch.setattr(DecodeGraphs, "_fill", fill)


def value_read_in_the_pass(patch: Patch) -> None:
    sound = DecodeGraphs._compute
    patch.setattr(
        DecodeGraphs, "_compute", lambda self, graph: sound(self, graph) * max(1, graph.inputs.max().item() * 0)
    )


FAULTS = {
    "inputs that are not static": (inputs_not_static, "a replay uses memory that has been freed since its capture"),
    "a value read in the pass": (value_read_in_the_pass, "decoding without CUDA graphs: NodeError: the host waits"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, monkeypatch: Patch) -> None:
    plant, message = FAULTS[name]
    plant(monkeypatch)
    with pretend_node() as node, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((NodeError, UserWarning, AssertionError), match=message):
            serve("cuda", node, graphs=True, max_num_seqs=5)
