"""Lab 05's rank programs, second part: sequence parallelism, and the order of events in a backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from course.lab05_tensor_parallel.rank_programs import Layer, Passed, alone, leaf, there_and_back, traffic
from course.shared.groups import on_groups
from minillm import measure
from minillm.comm import Group
from minillm.measure.watch import Watch as DispatchWatch

# Sequence parallel.


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def run_sequence(group: Group, learner: Any, cases: Sequence[Layer]) -> list[Passed | None]:
    """x + mlp(norm(x)), twice over, on shards of the sequence; then the norms' gradients are summed.

    weights: two norms, two layers of (gate, down). "sums" is the traffic of the third piece, "moved" whether it put
    another tensor into .grad, "unequal" what it makes of norms of several widths, "crossed" the gradients where both
    operators met another group between forward and backward.
    """
    other = alone(group)

    def run(case: Layer, part: Group) -> Passed:
        gather, scatter, sum_gradients = learner
        n, rank = part.world_size, part.rank
        norms = [leaf(w) for w in case.weights[:2]]
        cut = [leaf(w.chunk(n, i % 2)[rank]) for i, w in enumerate(case.weights[2:])]
        x = leaf(case.x.chunk(n)[rank])

        def compute() -> Tensor:
            y = x
            for norm, (into, out) in zip(norms, (cut[:2], cut[2:]), strict=True):
                whole = gather.apply(normalise(y, norm), part)
                y = y + scatter.apply(torch.tanh(whole @ into.T) @ out.T, part)
            return y

        leaves = {"x": x} | {str(i): w for i, w in enumerate([*norms, *cut])}
        passed = there_and_back(compute, case.output_gradient.chunk(n)[rank], leaves)
        own, places = [norm.grad.clone() for norm in norms], [norm.grad.data_ptr() for norm in norms]
        with measure.ledger() as led:
            sum_gradients(norms, part)
        widths = (case.x.shape[1] + 1, case.x.shape[0], 1)
        unequal = [leaf(torch.zeros(width, dtype=x.dtype)) for width in widths]
        for norm, gradient in zip(unequal, torch.arange(sum(widths), dtype=x.dtype).split(widths), strict=True):
            norm.grad = gradient + rank
        sum_gradients(unequal, part)
        results = passed.results | {"own": own, "sums": traffic(led)} | {f"d{i}": w.grad for i, w in enumerate(norms)}
        results["moved"] = [norm.grad.data_ptr() for norm in norms] != places
        results["unequal"] = torch.cat([norm.grad for norm in unequal])
        results["crossed"] = _crossed(gather, scatter, case, part, other)
        return Passed(results, passed.forward, passed.backward)

    return on_groups(group, cases, run)


def _crossed(gather: Any, scatter: Any, case: Layer, part: Group, other: Group) -> list[Tensor] | None:
    """The gradients of a shard that is gathered and of a sum that is scattered, where both operators meet another group
    before their backward passes; None if a backward pass fails then."""
    mine, share, gradient = leaf(case.x.chunk(part.world_size)[part.rank]), leaf(case.x), case.output_gradient
    outputs = gather.apply(mine, part), scatter.apply(share, part)
    for operator in (gather, scatter):
        operator.apply(leaf(case.x), other)
    try:
        outputs[0].backward(gradient.clone())
        outputs[1].backward(gradient.chunk(part.world_size)[part.rank].clone())
    except RuntimeError:  # a gradient of another group's size
        return None
    return [mine.grad, share.grad]


def whole_blocks(x: Tensor, *weights: Tensor) -> Tensor:
    for norm, into, out in zip(weights[:2], weights[2::2], weights[3::2], strict=True):
        x = x + torch.tanh(normalise(x, norm) @ into.T) @ out.T
    return x


# The order of events in a backward pass.


class Watch(DispatchWatch):
    """Notes matrix products by the shape of their result, and the start and the wait of all-reduces, in order."""

    def __init__(self, group: Group, shapes: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.group, self.log = group, []
        self.names = {tuple(sorted(shape)): name for name, shape in shapes.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(word in str(func) for word in ("mm", "matmul", "linear")) and isinstance(result, Tensor):
            self.log.append(self.names.get(tuple(sorted(size for size in result.shape if size > 1)), "?"))
        return result

    def __enter__(self) -> "Watch":
        reduce = self.group.all_reduce

        def all_reduce(x: Tensor, op: str = "sum", async_op: bool = False) -> Any:
            self.log.append("start" if async_op else "all-reduce")
            result = reduce(x, op, async_op)
            return _Noted(result, self.log) if async_op else result

        self.group.all_reduce = all_reduce
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del self.group.all_reduce  # the method shows through again


class _Noted:
    """A handle that says when it is waited for."""

    def __init__(self, handle: Any, log: list[str]) -> None:
        self._handle, self._log, self.done = handle, log, handle.done

    def wait(self) -> Any:
        self._log.append("wait")
        return self._handle.wait()


def run_column(group: Group, learner: Any, cases: Sequence[Layer]) -> list[Passed | None]:
    """learner.apply(x, weight, group) and its backward pass; "log" is what happened there, in order.

    "crossed" holds the gradients where another layer, of another group, ran between forward and backward.
    """
    other = alone(group)

    def run(case: Layer, part: Group) -> Passed:
        whole = case.weights[0]
        weight, x = leaf(whole.chunk(part.world_size)[part.rank]), leaf(case.x)
        gradient = case.output_gradient.chunk(part.world_size, dim=1)[part.rank].clone()
        shapes = {"dX": tuple(x.shape), "dW": tuple(weight.shape)}
        with measure.ledger() as forward:
            output = learner.apply(x, weight, part)
        with measure.ledger() as backward, Watch(part, shapes) as watch:
            output.backward(gradient)
        crossed = [leaf(x), leaf(weight)]
        output = learner.apply(*crossed, part)
        learner.apply(leaf(2 * x), leaf(3 * weight), other)
        output.backward(gradient.clone())
        results = {"output": output.detach(), "dx": x.grad, "dw": weight.grad, "log": watch.log}
        results["crossed"] = [each.grad for each in crossed]
        return Passed(results, traffic(forward), traffic(backward))

    return on_groups(group, cases, run)
