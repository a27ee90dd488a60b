"""What the tests of tensor and sequence parallelism run on each rank."""

import itertools

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.equivalence import Batch
from minillm.measure import ledger
from minillm.model import ModelConfig, Transformer, cross_entropy
from minillm.parallel.sharding.gather import gather
from minillm.parallel.sharding.placement import global_norm, sum_partial
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import named_gradients, placements

CORNERS = {  # name -> settings of the model, names of what is frozen
    "plain": (dict(), ()),
    "one kv head": (dict(num_kv_heads=1, qkv_bias=True), ()),
    "two kv heads": (dict(num_kv_heads=2, qkv_bias=True, qk_norm=True), ("mlp_norm", "k_proj.bias", "q_proj.weight")),
    "frozen input": (dict(num_kv_heads=2, qk_norm=True), ("embedding", "blocks.0.attention_norm", "blocks.1.mlp")),
}
TIED = (False, True)


def config_of(**settings):
    return ModelConfig(37, 16, 22, 2, 4, max_seq_len=8, **settings)


def model_of(config, frozen=(), seed=0, **options):
    """A model whose norms and biases are not all alike."""
    model = Transformer(config, seed=seed, dtype=torch.float64, **options)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        if any(pattern in name for pattern in frozen):
            parameter.requires_grad_(False)
    return model


def places_of(config, group, sequence):
    return placements(config, group.rank, group.world_size, sequence)


def whole(model, config, group, sequence, what=lambda p: p.grad):
    """Name -> what of every parameter that has one, joined from all ranks."""
    parts = {name: what(p) for name, p in model.named_parameters()}
    return gather({n: part for n, part in parts.items() if part is not None}, places_of(config, group, sequence), group)


def sum_shares(model, config, group, sequence):
    sum_partial(named_gradients(model.named_parameters()), places_of(config, group, sequence), group)


def error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def step(model, config, group, batch, sequence):
    nll, weight = model(batch.tokens, targets=batch.targets, weights=batch.weights)
    loss = nll / weight
    loss.backward()
    sum_shares(model, config, group, sequence)
    return loss.item()


def equalities(group):
    """Case -> the largest relative error of loss and gradients against one process, and what should be None is."""
    torch.set_num_threads(1)
    found = {}
    for (name, (settings, frozen)), tied, sequence in itertools.product(CORNERS.items(), TIED, (False, True)):
        config = config_of(tie_embeddings=tied, **settings)
        batch = Batch.random(config, 3, 8, seed=1)
        alone = model_of(config, frozen)
        expected = cross_entropy(alone(batch.tokens), batch.targets, batch.weights)
        expected.backward()
        model = tensor_parallel(model_of(config, frozen), config, group, sequence=sequence, regather=tied)
        loss = step(model, config, group, batch, sequence)
        norm = global_norm(named_gradients(model.named_parameters()), places_of(config, group, sequence), group)
        expected_norm = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
        errors = {"loss": abs(loss - expected.item()), "norm": error(norm, expected_norm)}
        gradients = whole(model, config, group, sequence)
        for parameter, p in alone.named_parameters():
            assert (parameter not in gradients) == (p.grad is None) == (not p.requires_grad), parameter
            if p.grad is not None:
                errors[parameter] = error(gradients[parameter], p.grad)
        worst = max(errors, key=errors.get)
        found[name, tied, sequence] = errors[worst], worst
    return found


class Watch(TorchDispatchMode):
    """Shapes of all that any operation returns."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.shapes.add(tuple(each.shape))
        return result


def saved_bytes(function, *known):
    """(result, bytes of the storages that autograd saves meanwhile), without those of `known` and of parameters."""
    seen, keep = {t.untyped_storage().data_ptr() for t in known}, []
    total = 0

    def pack(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and not isinstance(tensor, nn.Parameter):
            total += storage.nbytes()
            keep.append(tensor)
        seen.add(storage.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, total


def receipts(group, config, batch, seq, sequence, regather):
    """(calls forward, bytes forward, calls backward, bytes backward, bytes saved by one block, parameters)."""
    torch.set_num_threads(1)
    model = tensor_parallel(Transformer(config), config, group, sequence=sequence, regather=regather)
    tokens = torch.randint(config.vocab_size, (2, batch, seq), generator=torch.Generator().manual_seed(0))
    with ledger() as forward:
        nll, _ = model(tokens[0], targets=tokens[1])
    with ledger() as backward:
        nll.backward()
    x = torch.randn(batch, seq // model.sequence_shards, config.hidden_size, requires_grad=True)
    rotation = model.rope(torch.arange(seq), x.dtype)
    _, saved = saved_bytes(lambda: model.blocks[0](x, rotation), *rotation)
    count = sum(p.numel() for p in model.parameters())
    return forward.calls, forward.bytes(), backward.calls, backward.bytes(), saved, count
