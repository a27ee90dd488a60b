"""The FlashInfer backend against a stand-in that does what FlashInfer's documentation says of its arguments."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_paged import scattered

from minillm.model import ModelConfig, Transformer
from minillm.model.paged import block_by_block, gathered, paged_attention
from minillm.model.paged.flashinfer import FlashInfer
from minillm.serve import LLM, SamplingParams


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper: query i of a sequence stands at the end of its keys, window_left is the
    number of keys before its own that it sees."""

    def __init__(self, workspace, kv_layout, *, backend):
        assert kv_layout == "NHD" and workspace.dtype is torch.uint8 and not workspace.any() and backend == "fa2"

    def plan(self, qo_indptr, kv_indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, **options):
        for each in (qo_indptr, kv_indptr, indices, last_page_len):
            assert each.dtype is torch.int32 and each.device.type == "cpu"
        assert options.pop("causal") and options.pop("q_data_type") is options.pop("kv_data_type")
        self.sizes = (qo_indptr, kv_indptr, indices.long(), last_page_len, heads // kv_heads, head_dim)
        self.left, self.cap = options.pop("window_left"), options.pop("logits_soft_cap")
        assert not options

    def run(self, q, pools):
        qo_indptr, kv_indptr, indices, last_page_len, group, head_dim = self.sizes
        page_size, parts = pools[0].shape[1], []
        for s in range(len(last_page_len)):
            pages = indices[kv_indptr[s] : kv_indptr[s + 1]]
            length = (len(pages) - 1) * page_size + last_page_len[s]
            k, v = (pool[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for pool in pools)
            mine = q[qo_indptr[s] : qo_indptr[s + 1]].double()
            scores = torch.einsum("qhd,khd->hqk", mine, k) / head_dim**0.5
            scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
            distance = torch.arange(length - len(mine), length)[:, None] - torch.arange(length)
            hidden = (distance < 0) | ((distance > self.left) if self.left >= 0 else torch.tensor(False))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype))
        return torch.cat(parts)


class DecodeWrapper(Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper: one query a sequence, at the end of its keys."""

    def __init__(self, workspace, kv_layout, *, use_tensor_cores, backend):
        super().__init__(workspace, kv_layout, backend=backend)
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last_page_len, *sizes, **options):
        queries = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(queries, indptr, indices, last_page_len, *sizes, causal=True, **options)
        assert self.use_tensor_cores == (self.sizes[4] >= 4)


@pytest.fixture
def installed(monkeypatch):
    module = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    module.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.parametrize("window, soft_cap", [(None, None), (3, None), (20, 0.5)])
@pytest.mark.parametrize(
    "heads, lengths", [(4, [(1, 30), (7, 12), (1, 1), (16, 16), (2, 9)]), (4, [(1, 30), (1, 1)]), (8, [(1, 9), (1, 4)])]
)
def test_equals_the_loop_over_blocks(installed, heads, lengths, window, soft_cap):
    parts, pools, tables = scattered(0, lengths, heads, 2, 4, 16)
    q, pools = torch.cat([part[0] for part in parts]).bfloat16(), [pool.bfloat16() for pool in pools]
    where = (tables, *zip(*lengths, strict=True))
    options = {"window": window} | ({} if soft_cap is None else {"soft_cap": soft_cap})
    exact = paged_attention(q.double(), *(p.double() for p in pools), *where, **options, backend=block_by_block)
    y = paged_attention(q, *pools, *where, **options, backend=FlashInfer())
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)


def test_in_the_engine_with_layers_of_two_kinds(installed):
    kinds = {"sliding_window": 4, "full_attention_layers": (1,)}
    model = Transformer(ModelConfig(50, 32, 64, 3, 4, 2, max_seq_len=32, init_std=0.2, **kinds), seed=3).bfloat16()
    prompts, found = [[1, 2, 3, 4, 5, 6, 7], [10], [1, 2, 3, 4, 9]], []
    for backend in (gathered, FlashInfer()):
        outputs = LLM(model, block_size=2, chunk=3, backend=backend).generate(prompts, SamplingParams(max_tokens=2))
        found.append([output.answers[0].ids[:1] for output in outputs])
    assert found[0] == found[1] and len(backend._wrappers) == 4  # two kinds of layers, prompts and single tokens


class LateDevice:
    """A device that carries out copies from pinned memory when it is waited for, not when they are launched."""

    def __init__(self):
        self.queue = []

    def wait(self):
        for copy in self.queue:
            copy()
        self.queue.clear()

    def recorded_event(self):
        return SimpleNamespace(synchronize=self.wait)


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_plan_is_not_written_over_before_it_is_copied(installed, monkeypatch):
    """Two passes of which the host reads nothing: FlashInfer's plan goes through one pinned buffer."""
    device = LateDevice()
    pinned, copied = [None], []

    class Late(Wrapper):
        def plan(self, qo_indptr, *rest, **options):
            super().plan(qo_indptr, *rest, **options)
            pinned[0] = qo_indptr.tolist()
            device.queue.append(lambda: copied.append(pinned[0]))

    monkeypatch.setattr(sys.modules["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper", Late)
    monkeypatch.setattr("minillm.model.paged.flashinfer.recorded_event", device.recorded_event)
    backend, wanted = FlashInfer(), []
    for lengths in ([(3, 8)], [(5, 9)], [(2, 4), (4, 4)]):
        parts, pools, tables = scattered(0, lengths, 4, 2, 4, 16)
        q, pools = torch.cat([part[0] for part in parts]).bfloat16(), [pool.bfloat16() for pool in pools]
        backend.prepare(q.as_subclass(OnGPU), pools[0], tables, *zip(*lengths, strict=True), window=None)
        wanted.append([0, *torch.tensor([count for count, _ in lengths]).cumsum(0).tolist()])
    device.wait()
    assert copied == wanted


def test_what_it_cannot_do_is_told(installed, monkeypatch):
    parts, pools, tables = scattered(0, [(1, 5)], 2, 1, 4)
    with pytest.raises(ValueError, match="FlashInfer takes float16 or bfloat16"):
        paged_attention(parts[0][0].float(), *(p.float() for p in pools), tables, [1], [5], backend=FlashInfer())
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr("minillm.model.paged.flashinfer.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install flashinfer-python"):
        FlashInfer()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_real_one():
    pytest.importorskip("flashinfer")
    lengths = [(1, 700), (70, 300), (1, 1)]
    parts, pools, tables = scattered(0, lengths, 8, 2, 16, 128)
    q, pools = torch.cat([part[0] for part in parts]), [pool.nan_to_num() for pool in pools]
    where = (tables.cuda(), *zip(*lengths, strict=True))
    exact = paged_attention(q.cuda(), *(p.cuda() for p in pools), *where)
    y = paged_attention(q.cuda().bfloat16(), *(p.cuda().bfloat16() for p in pools), *where, backend=FlashInfer())
    torch.testing.assert_close(y.double(), exact, rtol=3e-2, atol=3e-2)
