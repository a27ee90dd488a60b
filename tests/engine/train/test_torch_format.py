"""torch.distributed.checkpoint loads what we write, and what it writes loads here: the next step has the same bits."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_programs import MODEL, trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from minillm.model import Transformer
from minillm.train import adamw
from minillm.train.checkpoint.manifest import committed
from minillm.train.checkpoint.torch_format import from_torch, to_torch
from minillm.train.checkpoint.writer import Checkpointer


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_out_to_torch_and_back(tmp_path):
    ours = trainer()
    for _ in range(2):
        ours.step()
    Checkpointer(tmp_path / "run").save(ours)
    to_torch(committed(tmp_path / "run")[-1], tmp_path / "torch")

    again = trainer(seed=0)
    from_torch(tmp_path / "torch", again)
    assert again.steps_done == 2 and same(weights(again.model), weights(ours.model))

    model = Transformer(MODEL, seed=5)  # torch's own way, with a model and an optimizer that have run
    optimizer = adamw(model.named_parameters(), ours.config)
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert same(weights(model), weights(ours.model))
    for parameter, other in zip(model.parameters(), ours.model.parameters(), strict=True):
        theirs, mine = optimizer.state[parameter], ours.optimizer.state[other]
        assert theirs["step"] == mine["step"] == 2 and torch.equal(theirs["exp_avg_sq"], mine["exp_avg_sq"])

    assert again.step().loss == ours.step().loss
    assert same(weights(again.model), weights(ours.model))


def test_in_from_what_torch_has_saved(tmp_path):
    model = Transformer(MODEL, seed=5)
    ours = trainer()
    optimizer = adamw(model.named_parameters(), ours.config)
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path, no_dist=True)
    from_torch(tmp_path, ours)
    assert ours.steps_done == 0 and same(weights(model), weights(ours.model))
    for parameter, other in zip(model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], ours.optimizer.state[other]["exp_avg"])
    with pytest.raises(ValueError, match=r"none holds nothing that torch\.distributed\.checkpoint has written whole"):
        from_torch(tmp_path / "none", ours)
