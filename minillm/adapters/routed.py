"""A model in which every token of a pass goes through its own adapter, without a layer being replaced.

    q, k, v = linears(x, ...)        joined, quantized or plain, as before, and for all tokens
              + updates of q, k, v   for those rows of a pass that have an adapter (grouped.py)

Layers that share an input are applied by their part's `linears`, which is where their updates are added. The other two
of a block, the last of attention and of the MLP, have a forward hook, or where they are cut over ranks a `RoutedRow`
in their place, since an update is added before the shares are summed. The thread that makes a pass says which adapters
it needs: `with routes.taken(segments, adapters): model(...)`. Every other pass is the base's, as before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident

from torch import Tensor, nn

from minillm.adapters.cut import RoutedRow
from minillm.adapters.grouped import Matrices, Segment, add_updates
from minillm.model.parts import blocks_of
from minillm.parallel.tensor_parallel.layers import RowParallelLinear
from minillm.parallel.tensor_parallel.quantized import QuantizedRow

OfLayer = Mapping[str, Matrices]  # by the layer's name
PARTS = {"attention": (("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": (("gate_proj", "up_proj"), "down_proj")}


class Routes:
    """What the passes of a model need, by thread: engines of one model may be in several."""

    def __init__(self) -> None:
        self._of_thread: dict[int, tuple[Sequence[Segment], Mapping[int, OfLayer]]] = {}

    @contextmanager
    def taken(self, segments: Sequence[Segment], adapters: Mapping[int, OfLayer]) -> Iterator[None]:
        """Inside, this thread's passes add the updates of these adapters, by number, to the rows of their segments."""
        self._of_thread[get_ident()] = segments, adapters
        try:
            yield
        finally:
            del self._of_thread[get_ident()]

    def add(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """The outputs y of a layer for inputs x, with what the pass adds to them."""
        if (route := self._of_thread.get(get_ident())) is None:
            return y
        segments, adapters = route
        return add_updates(y, x, segments, {number: of[name] for number, of in adapters.items() if name in of})


class RoutedLinears:
    """In place of `linears` of attention or of an MLP. names: of its layers."""

    def __init__(self, linears: Callable[..., tuple[Tensor, ...]], routes: Routes, names: Sequence[str]):
        self.linears, self.routes, self.names = linears, routes, names

    def __call__(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        outputs = zip(self.names, self.linears(x, *layers), strict=True)
        return tuple(self.routes.add(name, y, x) for name, y in outputs)


class RoutedOutput:
    """A forward hook."""

    def __init__(self, routes: Routes, name: str):
        self.routes, self.name = routes, name

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
        return self.routes.add(self.name, y, inputs[0])


def routes_of(model: nn.Module) -> Routes:
    """The routes of a model, which has them from here on; a model that had some keeps those."""
    blocks = blocks_of(model)
    routes = blocks[0].attention.linears.routes if is_routed(model) else Routes()
    for number, block in zip(getattr(model, "layers", range(len(blocks))), blocks, strict=True):
        for place, (together, last) in PARTS.items():
            part, names = getattr(block, place), [f"blocks.{number}.{place}.{each}" for each in (*together, last)]
            if not hasattr(part, "linears"):  # a mixture of experts, which has no adapters
                continue
            if not isinstance(part.linears, RoutedLinears):
                part.linears = RoutedLinears(part.linears, routes, names[:-1])
            layer = getattr(part, last)
            if isinstance(layer, RowParallelLinear | QuantizedRow):
                setattr(part, last, RoutedRow(layer, routes.add, names[-1]))
            elif not isinstance(layer, RoutedRow) and not any(
                isinstance(hook, RoutedOutput) for hook in layer._forward_hooks.values()
            ):
                layer.register_forward_hook(RoutedOutput(routes, names[-1]))
    return routes


def is_routed(model: nn.Module) -> bool:
    return isinstance(blocks_of(model)[0].attention.linears, RoutedLinears)
