"""A stage's layers of a model as its engine runs them: a pipeline's part (`parallel/pipeline_parallel/stages.py`) that
gives logits where it is the last, and has its blocks of keys and values wherever it is.
"""

import torch
from torch import Tensor

from minillm.comm import Group, Mesh
from minillm.model import Transformer
from minillm.model.attention import AttentionFunction
from minillm.model.parts import weight_of
from minillm.parallel.pipeline_parallel.stages import ModelPart, balance, layer_costs


class Stage(ModelPart):
    """This rank's stage of `model`, made of its modules. Those of the other stages give their memory back.

    mesh: pp stages, tp ranks that share each of them (`tensor_parallel` cuts it afterwards); group: all of these ranks.
    ValueError for more stages than layers.
    """

    def __init__(self, model: Transformer, group: Group, mesh: Mesh) -> None:
        stage, stages = mesh.pp.rank, mesh.pp.world_size
        layers = balance(layer_costs(model.config), stages)[stage]
        ends = {"first": stage == 0, "last": stage == stages - 1}
        super().__init__(model.config, layers, **ends, device="meta", attention=model.attention)
        self.group, self.mesh, self.rope = group, mesh, model.rope
        for name in ("embedding", "norm", "head"):
            self._take(name, getattr(model, name))
        for layer, block in enumerate(model.blocks):
            if layer in layers:
                self.blocks[str(layer)] = block
            else:
                block.to("meta")

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        attention: AttentionFunction | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x: tokens [batch, seq], or behind the first stage hidden states [batch, seq, hidden] -> hidden states, or of
        the last stage logits [batch, n, words] of the places `rows` along seq; None = all."""
        x = super().forward(x, positions, attention=attention)
        if not self.last:
            return x
        return self.logits(x if rows is None else x[:, rows])

    def nothing(self, tokens: int) -> Tensor:
        """An input of so many tokens that stands for none, where only the work counts: [1, tokens(, hidden)]."""
        weight = weight_of(self)
        if self.first:
            return torch.zeros(1, tokens, dtype=torch.int64, device=weight.device)
        return weight.new_zeros(1, tokens, self.config.hidden_size)

    def _take(self, name: str, module: torch.nn.Module | None) -> None:
        if getattr(self, name) is not None:
            setattr(self, name, module)
        elif module is not None:
            module.to("meta")
