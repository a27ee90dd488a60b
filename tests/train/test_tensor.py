"""Tensor parallelism against one process in float64, and what it sends, holds and overlaps."""

import gc
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from tensor_programs import Watch, config_of, equalities, error, model_of, receipts, whole
from torch import nn

from minillm.comm import Link, launch
from minillm.equivalence import Batch
from minillm.measure import ledger, memory
from minillm.model import ModelConfig, Transformer, cross_entropy_sums
from minillm.parallel.tensor_parallel import layers as tensor
from minillm.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    Split,
    VocabParallelEmbedding,
    gather_logits,
    initialize_parallel,
    join,
    split_of,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)
from minillm.parallel.tensor_parallel.regions import TensorRegion, enter, leave
from minillm.predict import tensor as predict
from minillm.train.activation_checkpointing import EXPENSIVE, checkpoint_blocks

MODEL = ModelConfig(52, 32, 44, 3, 4, 2, max_seq_len=600, qk_norm=True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_gradient_equals_one_process(world_size):
    for found in launch(equalities, world_size):
        assert len(found) == 16
        for case, (worst, where) in found.items():
            assert worst < 1e-10, (case, where)


def test_splits_join_to_the_whole_for_any_size():
    for rows, parts in ((37, 4), (5, 4), (8, 4), (3, 8), (1, 1)):
        for dim in (0, 1):
            tensor_ = torch.randn((rows, 3) if dim == 0 else (3, rows))
            splits = [Split(dim, part, parts) for part in range(parts)]
            pieces = [split.cut(tensor_) for split in splits]
            assert len({piece.shape for piece in pieces}) == 1 and all(piece.is_contiguous() for piece in pieces)
            assert sum(split.real(rows) for split in splits) == rows
            assert torch.equal(join(pieces, splits, tensor_.shape), tensor_)
    config = config_of(num_kv_heads=2)
    assert [split_of(config, "blocks.1.attention.k_proj.weight", r, 4).part for r in range(4)] == [0, 0, 1, 1]
    assert split_of(config, "blocks.0.attention.v_proj.bias", 3, 4).partial
    assert not split_of(config, "blocks.0.attention.v_proj.bias", 1, 2).partial
    assert not split_of(config, "norm.weight", 0, 4).partial and split_of(config, "norm.weight", 0, 4, True).partial
    with pytest.raises(ValueError, match=r"'router.weight' is none of a Transformer's"):
        split_of(config, "router.weight", 0, 2)


@pytest.mark.parametrize(
    ("settings", "ranks", "says"),
    [
        (dict(num_heads=6), 4, "6 attention heads do not divide over 4 tensor-parallel ranks.*use one of 1, 2, 3, 6"),
        (dict(num_heads=12, num_kv_heads=6), 4, "6 kv heads neither divide over 4 .* nor the ranks over them"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_anybody_waits(settings, ranks, says):
    class Alone:
        rank, world_size = 0, ranks

    config = ModelConfig(37, 48, 64, 1, **settings)
    model = Transformer(config, device="meta")
    with pytest.raises(ValueError, match=says):
        tensor_parallel(model, config, Alone)
    assert type(model.blocks[0].attention.q_proj) is nn.Linear
    Alone.world_size = 1
    with pytest.raises(ValueError, match="tensor parallel already"):
        tensor_parallel(tensor_parallel(model, config, Alone), config, Alone)


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_bytes_and_parameters_as_predicted(world_size):
    batch, seq, layers = 2, 600, MODEL.num_layers
    calls = predict.microbatch(MODEL, batch, seq)
    table = batch * seq * MODEL.hidden_size
    per_layer = predict.layer_bytes(batch, seq, MODEL.hidden_size, 4, world_size)
    layer_calls = [call for call in calls if call.part == "layers"]
    assert tuple(call.count for call in layer_calls) == predict.layer_all_reduces(layers) == (2 * layers, 2 * layers)
    assert predict.cost(layer_calls, world_size).sent_per_rank[0] == layers * per_layer
    for rank, found in enumerate(launch(receipts, world_size, MODEL, batch, seq, False, True)):
        forward, forward_bytes, backward, backward_bytes, saved, parameters = found
        assert forward == {"all_reduce": 2 * layers + 1 + 2 * 3}  # 1200 tokens of the loss in 3 chunks
        assert backward == {"all_reduce": 2 * layers + 1}
        for measured, is_backward in ((forward_bytes, False), (backward_bytes, True)):
            half = [call for call in calls if call.backward == is_backward]
            assert measured == predict.cost(half, world_size).sent_per_rank[rank]
        loss = 3 * predict.cost(calls[:1], world_size).sent_per_rank[rank] * batch * seq // table
        assert forward_bytes - backward_bytes == loss == batch * seq * predict.loss_bytes_per_token(world_size)
        assert parameters == predict.parameters(MODEL, world_size)
        assert saved == predict.block_activation_bytes(MODEL, batch, seq, world_size)


def pieces(group):
    """Layers alone, as torch's: values, gradients and what each direction sends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole_column, whole_row = nn.Linear(6, 10, dtype=torch.float64), nn.Linear(10, 5, dtype=torch.float64)
    whole_table = nn.Embedding(7, 6, dtype=torch.float64)
    torch.manual_seed(0)  # what they draw alone is what torch's layers draw
    column = ColumnParallelLinear(6, 10, group, bias=True, dtype=torch.float64)
    row = RowParallelLinear(10, 5, group, bias=True, dtype=torch.float64)
    table = VocabParallelEmbedding(7, 6, group, dtype=torch.float64)
    ids = torch.tensor([[0, 6, 3, 3]])
    x = whole_table(ids)
    expected = whole_row(torch.tanh(whole_column(x)))
    with ledger() as embedding:
        mine = table(ids)
    inner = mine.detach().requires_grad_()
    with ledger() as begin:
        hidden = column(inner)
    between = torch.tanh(hidden).detach().requires_grad_()
    with ledger() as end:
        y = row(between)
    assert torch.allclose(y, expected, atol=1e-12) and torch.allclose(mine, x, atol=1e-12)
    with ledger() as row_backward:
        y.square().sum().backward()
    with ledger() as column_backward:
        torch.tanh(hidden).backward(between.grad)
    with ledger() as embedding_backward:
        mine.backward(inner.grad)
    expected.square().sum().backward()
    for got, layer, dim in ((column, whole_column, 0), (row, whole_row, 1)):
        split = Split(dim, group.rank, group.world_size)
        assert error(got.weight.grad, split.cut(layer.weight.grad)) < 1e-12
    bias = Split(0, group.rank, group.world_size).cut(whole_column.bias.grad)
    assert error(column.bias.grad, bias) < 1e-12 and error(row.bias.grad, whole_row.bias.grad) < 1e-12
    words = Split(0, group.rank, group.world_size).cut(whole_table.weight.grad)
    assert torch.allclose(table.weight.grad, words, atol=1e-12)

    z = torch.ones(3, 2, requires_grad=True)  # f and g by themselves are each other's transpose
    entered = enter(z, TensorRegion(group))
    left = leave((group.rank + 1) * entered, TensorRegion(group))
    left.sum().backward()
    total = group.world_size * (group.world_size + 1) / 2
    assert torch.equal(left, total * torch.ones(3, 2)) and torch.equal(z.grad, total * torch.ones(3, 2))

    logits = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets, weights = torch.tensor([[0, 7, -100], [4, 4, 1]]), torch.rand(2, 3, dtype=torch.float64)
    words = logits.detach().chunk(group.world_size, -1)[group.rank].clone().requires_grad_()
    for given in (None, weights):
        a, b = vocab_parallel_cross_entropy(words, targets, group, given), cross_entropy_sums(logits, targets, given)
        assert all(torch.allclose(i, j, atol=1e-12) for i, j in zip(a, b, strict=True))
        (mine,), (theirs,) = torch.autograd.grad(3 * a[0], words), torch.autograd.grad(3 * b[0], logits)
        assert torch.allclose(mine, theirs.chunk(group.world_size, -1)[group.rank], atol=1e-12)
    ledgers = embedding, begin, end, embedding_backward, column_backward, row_backward
    return [dict(led.calls) for led in ledgers]


def test_layers_alone_are_torchs_and_only_one_end_of_a_region_talks_in_each_direction():
    one = {"all_reduce": 1}
    assert launch(pieces, 2) == [[one, {}, one, {}, one, {}]] * 2  # embedding, column, row; then their backwards


def whole_models(group):
    """Initial values, "meta", a module that is a part of a model, generation, recomputation, autocast, padding."""
    torch.set_num_threads(1)
    config = config_of(num_kv_heads=2)
    whole_model = Transformer(config, seed=3)
    later = tensor_parallel(Transformer(config, device="meta"), config, group)
    assert all(p.is_meta for p in later.parameters())
    later.to_empty(device="cpu").initialize(3)
    again = initialize_parallel(tensor_parallel(Transformer(config, seed=None), config, group), config, group, 3)
    cut = tensor_parallel(Transformer(config, seed=3), config, group)
    for model in (later, again, cut):
        joined = whole(model, config, group, False, lambda p: p.detach())
        assert all(torch.equal(joined[name], p) for name, p in whole_model.named_parameters())

    tokens = Batch.random(config, 2, 8).tokens
    with torch.no_grad():
        logits = cut(tokens)
        assert logits.shape[-1] == 10 and torch.isinf(logits[..., 7:]).all() == (group.rank == 3)
        assert torch.allclose(gather_logits(logits, group, 37), whole_model(tokens), atol=1e-5)

    part = nn.Module()  # a stage of a pipeline: no embedding, no head, layers by their number
    part.blocks = nn.ModuleDict({"1": model_of(config).blocks[1]})
    tensor_parallel(part, config, group)
    alone, x = model_of(config), torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotation = alone.rope(torch.arange(8), x.dtype)
    assert torch.allclose(part.blocks["1"](x, rotation), alone.blocks[1](x, rotation), atol=1e-12)
    assert {name for name, _ in part.named_parameters()} == {
        name for name, _ in alone.named_parameters() if name.startswith("blocks.1.")
    }

    batch = Batch.random(config, 2, 8)
    gradients = []
    for keep in (None, frozenset(), EXPENSIVE):
        model = checkpoint_blocks(tensor_parallel(model_of(config), config, group), keep)
        model(batch.tokens, targets=batch.targets)[0].backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients[0], other, strict=True))

    half = tensor_parallel(Transformer(config), config, group)
    with torch.autocast("cpu", torch.bfloat16):
        nll, count = half(batch.tokens, targets=batch.targets)
        expected, _ = Transformer(config)(batch.tokens, targets=batch.targets)
    (nll / count).backward()
    assert nll.dtype == torch.float32 and torch.allclose(nll, expected, rtol=1e-2)
    assert all(p.grad.dtype == torch.float32 for p in half.parameters())

    padded = cut.blocks[0].mlp.down_proj.weight[:, 4 if group.rank == 3 else 6 :]  # 22 columns, 6 a rank
    optimizer = torch.optim.AdamW(cut.parameters(), weight_decay=0.1)
    for _ in range(3):
        cut(batch.tokens, targets=batch.targets)[0].backward()
        optimizer.step()
    assert not padded.any()


def test_initial_values_meta_parts_logits_recomputation_autocast_and_padding():
    launch(whole_models, 4)


def no_whole_logits(group):
    torch.set_num_threads(1)
    model = tensor_parallel(Transformer(MODEL), MODEL, group)
    tokens = torch.randint(52, (2, 2, 600), generator=torch.Generator().manual_seed(0))
    with Watch() as watch:
        model(tokens[0], targets=tokens[1])[0].backward()
        with torch.no_grad():
            model(tokens[0], targets=tokens[1])
    return watch.shapes


def test_no_rank_holds_the_logits_of_its_tokens():
    for shapes in launch(no_whole_logits, 2):
        assert not any(52 in shape for shape in shapes)  # no vocabulary anywhere
        assert {shape for shape in shapes if 26 in shape and max(shape) > 512} == set()  # its half, 512 tokens at most
        assert (512, 26) in shapes


def freed(group):
    torch.set_num_threads(1)
    gc.disable()
    try:
        model = Transformer(MODEL)
        old = [weakref.ref(p) for name, p in model.named_parameters() if not name.endswith("norm.weight")]
        tensor_parallel(model, MODEL, group)
        assert all(ref() is None for ref in old)
        tokens = torch.randint(52, (2, 2, 600))
        with memory(model) as census:
            model(tokens[0], targets=tokens[1])[0].backward()
            assert census.live.parameter == 4 * predict.parameters(MODEL, 2) == census.live.gradient
            assert census.live.activation == 0
            left = census.live.other
        assert left == tokens.nbytes + sum(piece.nbytes for piece in group.scratch._free)  # and no tensor of a message
        del census
        model = weakref.ref(tensor_parallel(Transformer(MODEL), MODEL, group))
        assert model() is None
    finally:
        gc.enable()


def test_what_is_not_used_any_more_is_freed():
    launch(freed, 2)


def overlap(group):
    """(seconds the all-reduce took, seconds anybody waited for it, weight gradients begun before it ended)."""
    torch.set_num_threads(1)
    began, compute = [], tensor.weight_gradient

    def slow(weight, function):
        began.append(time.monotonic())
        time.sleep(0.4)
        return compute(weight, function)

    layer = ColumnParallelLinear(8, 8, group)
    x = torch.ones(4, 8, requires_grad=True)
    y = layer(x)
    tensor.weight_gradient = slow
    group.barrier()
    try:
        with ledger() as led:
            y.sum().backward()
    finally:
        tensor.weight_gradient = compute
    (event,) = led.events
    return event.end - event.start, event.waited, began[0] < event.end, event.emulated


def test_the_sum_of_the_input_gradient_travels_while_the_weight_gradient_is_computed():
    for took, waited, before, emulated in launch(overlap, 2, link=Link(latency_s=0.1)):  # emulated: 2 rounds of 0.1 s
        assert emulated and took >= 0.2 and before and waited < took / 2


def test_one_loss_for_any_chunk():
    def chunks(group):
        from minillm.parallel.tensor_parallel.vocab import linear_vocab_parallel_cross_entropy_sums as ours

        draw = torch.Generator().manual_seed(0)
        x, head = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (21, 10))
        targets = torch.randint(10, (21,), generator=draw)
        expected = F.cross_entropy(x @ head.T, targets, reduction="sum")
        part = Split(0, group.rank, 4).cut(head)
        options = dict(region=TensorRegion(group), vocab_size=10)
        found = [ours(x, part, targets, chunk, **options) for chunk in (1, 5, 21, 512)]
        assert all(torch.allclose(total, expected, atol=1e-12) and count == 21 for total, count in found)
        try:
            ours(x, part, targets[1:], **options)
        except ValueError as said:
            return str(said)

    assert launch(chunks, 4) == ["targets [20] and positions [21] do not match: one of the targets per position."] * 4
