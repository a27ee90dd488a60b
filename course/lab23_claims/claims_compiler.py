"""Statements about compilers and recorded graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from course.kit.receipts import Row, row
from course.shared.statement import claim, computed
from minillm.predict.kernels import Kernel, step_seconds


@claim(
    "kernels",
    "torch.compile compiles a function once.",
    "false",
    "It compiles again when a guard fails: for another type or string each time. For another size or Python number it "
    "compiles a second graph, which takes any.",
    "nothing changes but the values of tensors",
    "PyTorch, troubleshooting torch.compile: https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
)
def compiled_once() -> list[Row]:
    return [
        row("graphs after 4 calls with other values", 1, _graphs([(torch.ones(2), "a"), (torch.zeros(2), "a")] * 2)),
        row("after 3 calls with other strings", 3, _graphs([(torch.ones(2), kind) for kind in ("a", "b", "c")])),
        row("after 5 calls with other sizes", 2, _graphs([(torch.ones(size), "a") for size in range(2, 7)])),
        row("after 5 calls with other integers", 2, _graphs([(torch.ones(2), number) for number in range(2, 7)])),
    ]


def _graphs(calls: list[tuple[Tensor, object]]) -> int:
    """How many graphs torch.compile makes of calls of one function."""
    made = []

    def keep(graph: torch.fx.GraphModule, _: list) -> Callable:
        made.append(graph)
        return graph.forward

    def shifted(x: Tensor, kind: object) -> Tensor:
        if isinstance(kind, int):
            return x + kind
        return x + (1 if kind == "a" else 2 if kind == "b" else 3)

    torch._dynamo.reset()
    compiled = torch.compile(shifted, backend=keep)
    for call in calls:
        compiled(*call)
    torch._dynamo.reset()
    return len(made)


@claim(
    "kernels",
    "CUDA graphs make kernels faster.",
    "false",
    "Each kernel takes as long as before. What goes is the host's work for each launch, which small kernels wait for.",
    "never; a step gains as long as its launches take longer than its kernels",
    "PyTorch, accelerating with CUDA graphs: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",
)
def graphs_speed_up_kernels() -> list[Row]:
    small, large = ([Kernel("", micros, 0)] * 14 for micros in (3, 30))  # bytes of a memory that moves one in a µs
    return [
        computed("14 kernels of 3 µs, 5 µs a launch", 14 * 5, step_seconds(small, 1.0, 1.0, 5)),
        computed("    replayed", 14 * 3, step_seconds(small, 1.0, 1.0, 0)),
        computed("14 kernels of 30 µs: launched / replayed", 1.0,
                 step_seconds(large, 1.0, 1.0, 5) / step_seconds(large, 1.0, 1.0, 0)),
    ]  # fmt: skip
