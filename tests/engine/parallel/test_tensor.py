"""Tensor parallelism against one process in float64, and what it sends, holds and overlaps."""

import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tensor_programs import Watch, config_of, equalities, error, model_of, receipts, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.comm import launch
from minillm.comm.operation import Work
from minillm.equivalence import Batch
from minillm.measure import ledger, memory
from minillm.model import ModelConfig, Transformer, cross_entropy_sums
from minillm.parallel.sharding.placement import Partial, Shard
from minillm.parallel.tensor_parallel import layers as tensor
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import part_of, placements
from minillm.parallel.tensor_parallel.regions import Region, copy_to, reduce_from
from minillm.parallel.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
from minillm.predict.training import tensor as predict
from minillm.predict.training.activations import block_activation_bytes
from minillm.train.activation_checkpointing import EXPENSIVE, checkpoint_blocks

pytestmark = pytest.mark.drawn(2)

MODEL = ModelConfig(52, 32, 44, 3, 4, 2, max_seq_len=600, qk_norm=True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_gradient_equals_one_process(world_size):
    for found in launch(equalities, world_size):
        assert len(found) == 16
        for case, (worst, where) in found.items():
            assert worst < 1e-10, (case, where)


def test_rules_say_which_part_is_whose():
    config = config_of(num_kv_heads=2)
    kv = [part_of(config, "blocks.1.attention.k_proj.weight", rank, 4) for rank in range(4)]
    assert kv == [Partial(Shard(0, part, 2, copy)) for part in (0, 1) for copy in (0, 1)]
    assert part_of(config, "blocks.0.attention.v_proj.bias", 1, 2) == Shard(0, 1, 2)
    assert not isinstance(part_of(config, "norm.weight", 0, 4), Partial)
    assert isinstance(part_of(config, "norm.weight", 0, 4, True), Partial)
    for name, place in placements(config, 1, 4).items():
        assert place.is_counted == (not name.endswith(("norm.weight", "k_proj.weight", "v_proj.weight"))), name
    with pytest.raises(ValueError, match=r"'gateway.weight' is none of a Transformer's"):
        part_of(config, "gateway.weight", 0, 2)


@pytest.mark.parametrize(
    ("settings", "ranks", "says"),
    [
        (dict(num_heads=6), 4, "6 attention heads do not divide over 4 tensor-parallel ranks.*use one of 1, 2, 3, 6"),
        (dict(num_heads=12, num_kv_heads=6), 4, "6 kv heads neither divide over 4 .* nor the ranks over them"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_anybody_waits(settings, ranks, says):
    class Alone:
        name, rank, world_size = "world", 0, ranks

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
    assert tuple(call.count for call in layer_calls) == (2 * layers, 2 * layers)
    assert predict.cost(layer_calls, world_size).sent_per_rank[0] == layers * per_layer
    for rank, found in enumerate(launch(receipts, world_size, MODEL, batch, seq, False, True)):
        forward, forward_bytes, backward, backward_bytes, saved, parameters = found
        assert forward == {"all_reduce": 2 * layers + 1 + 2}  # 1200 tokens of the loss in one chunk: 52 / t words < 32
        assert backward == {"all_reduce": 2 * layers + 1}
        for measured, is_backward in ((forward_bytes, False), (backward_bytes, True)):
            half = [call for call in calls if call.backward == is_backward]
            assert measured == predict.cost(half, world_size).sent_per_rank[rank]
        loss = 3 * predict.cost(calls[:1], world_size).sent_per_rank[rank] * batch * seq // table
        assert forward_bytes - backward_bytes == loss == batch * seq * predict.loss_bytes_per_token(world_size)
        assert parameters == predict.parameters(MODEL, world_size)
        assert saved == block_activation_bytes(MODEL, batch, seq, tp=world_size)


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
        part = Shard(dim, group.rank, group.world_size)
        assert error(got.weight.grad, part.cut(layer.weight.grad)) < 1e-12
    bias = Shard(0, group.rank, group.world_size).cut(whole_column.bias.grad)
    assert error(column.bias.grad, bias) < 1e-12 and error(row.bias.grad, whole_row.bias.grad) < 1e-12
    words = Shard(0, group.rank, group.world_size).cut(whole_table.weight.grad)
    assert torch.allclose(table.weight.grad, words, atol=1e-12)

    z = torch.ones(3, 2, requires_grad=True)  # f and g by themselves are each other's transpose
    entered = copy_to(z, group)
    left = reduce_from((group.rank + 1) * entered, group)
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
    again = tensor_parallel(Transformer(config, seed=None), config, group).initialize(3)
    cut = tensor_parallel(Transformer(config, seed=3), config, group)
    for model in (later, again, cut):
        joined = whole(model, config, group, False, lambda p: p.detach())
        assert all(torch.equal(joined[name], p) for name, p in whole_model.named_parameters())

    tokens = Batch.random(config, 2, 8).tokens
    with torch.no_grad():
        logits = cut(tokens)
        assert logits.shape[-1] == 10 and torch.isinf(logits[..., 7:]).all() == (group.rank == 3)
        words = torch.cat(list(group.all_gather(logits[None])), -1)
        assert torch.allclose(words[..., :37], whole_model(tokens), atol=1e-5)

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


WIDE = ModelConfig(208, 32, 44, 1, 4, 2, max_seq_len=2000)


def big_loss(group):
    """Shapes of all results, and the loss's all-reduces, of 2000 and of 4000 tokens."""
    torch.set_num_threads(1)
    model, found = tensor_parallel(Transformer(WIDE), WIDE, group), []
    for rows in (1, 2):
        tokens = torch.randint(208, (2, rows, 2000), generator=torch.Generator().manual_seed(0))
        with Watch() as watch, ledger() as led:
            model(tokens[0], targets=tokens[1])[0].backward()
        found.append((watch.shapes, [event.shape for event in led.select("all_reduce") if event.shape[-1] == 1]))
    return found


def test_the_loss_holds_few_logits_and_talks_as_often_for_any_number_of_tokens():
    for found in launch(big_loss, 2):
        for tokens, (shapes, reduced) in zip((2000, 4000), found, strict=True):
            chunk = predict.loss_chunk(tokens, 32, 104)
            assert chunk == max(512, tokens * 32 // 104)
            assert not any(208 in shape for shape in shapes)  # no vocabulary anywhere
            logits = {shape for shape in shapes if len(shape) == 2 and shape[1] == 104 and shape[0] > 32}
            assert max(rows for rows, _ in logits) == chunk and chunk * 104 <= tokens * 32
            assert len(reduced) == 2 * -(-tokens // chunk) == 8  # 104 words / 32 hidden, rounded up, twice
    assert -(-32768 // predict.loss_chunk(32768, 4096, 128256 // 8)) == 4  # Llama 3 8B on 8 ranks


def copies_made(group):
    torch.set_num_threads(1)
    layer, x = RowParallelLinear(16, 8, group), torch.randn(4, 16 // group.world_size)
    calls = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Look():
        layer(x)
    return torch.ops.aten.clone.default in calls


def test_watching_operations_changes_none():
    """Only what keeps results to hand them out again, selective recomputation, may cost a copy."""
    assert launch(copies_made, 2) == [False, False]


def freed(group):
    torch.set_num_threads(1)
    gc.disable()
    try:
        model = Transformer(MODEL)
        old = [weakref.ref(p) for name, p in model.named_parameters() if not name.endswith("norm.weight")]
        tensor_parallel(model, MODEL, group)
        assert all(ref() is None for ref in old)
        tokens = torch.randint(52, (2, 2, 600))
        with memory(model) as tracker:
            model(tokens[0], targets=tokens[1])[0].backward()
            assert tracker.live.parameter == 4 * predict.parameters(MODEL, 2) == tracker.live.gradient
            assert tracker.live.activation == 0
            left = tracker.live.other
        kept = sum(piece.nbytes for pieces in group.scratch._free.values() for piece in pieces)
        assert left == tokens.nbytes + kept  # and no tensor of a message
        del tracker
        model = weakref.ref(tensor_parallel(Transformer(MODEL), MODEL, group))
        assert model() is None
    finally:
        gc.enable()


def test_what_is_not_used_any_more_is_freed():
    launch(freed, 2)


def overlap(group):
    """What backward does, in order, and which operations it has begun by then."""
    did, compute, wait = [], tensor.weight_gradient, Work.wait

    def noted(weight, function):
        did.append(("dW", *led.calls))
        return compute(weight, function)

    def noted_wait(work):
        did.append(("wait", *led.calls))
        return wait(work)

    layer = ColumnParallelLinear(8, 8, group)
    x = torch.ones(4, 8, requires_grad=True)
    y = layer(x)
    dw, waiting = mock.patch.object(tensor, "weight_gradient", noted), mock.patch.object(Work, "wait", noted_wait)
    with ledger() as led, dw, waiting:
        y.sum().backward()
    return did


def test_the_sum_of_the_input_gradient_travels_while_the_weight_gradient_is_computed():
    order = [(what, "all_reduce") for what in ("wait", "dW", "wait")]  # the first is for the input, which is there
    assert launch(overlap, 2) == [order] * 2


def test_one_loss_for_any_chunk():
    def chunks(group):
        from minillm.parallel.tensor_parallel.vocab import linear_vocab_parallel_cross_entropy_sums as ours

        draw = torch.Generator().manual_seed(0)
        x, head = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (21, 10))
        targets = torch.randint(10, (21,), generator=draw)
        expected = F.cross_entropy(x @ head.T, targets, reduction="sum")
        part = Shard(0, group.rank, 4).cut(head)
        options = dict(region=Region(group), vocab_size=10)
        found = [ours(x, part, targets, chunk, **options) for chunk in (1, 5, 21, 512)]
        assert all(torch.allclose(total, expected, atol=1e-12) and count == 21 for total, count in found)
        try:
            ours(x, part, targets[1:], **options)
        except ValueError as said:
            return str(said)

    assert launch(chunks, 4) == ["targets [20] and positions [21] do not match: one of the targets per position."] * 4
