"""Context parallelism by the Triton kernels, in Triton's interpreter, against dense attention in float64; and how much is
launched. Run by test_context_kernels.py, which sets TRITON_INTERPRET for this process and the ranks that it starts."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.comm import launch
from minillm.model import dense
from minillm.model.attention import blocks, tiled_triton
from minillm.parallel.context_parallel import context_attention
from tests.engine.comm.nccl_like import on_nccl_like

SEQ, HEADS, KV_HEADS, HEAD_DIM = 48, 4, 2, 12
MASKS = [(None, False), (9, False), (None, True)]  # window, documents
KERNELS = ("_forward", "_backward_keys", "_backward_queries")
VIEWS = {"alias", "detach", "view", "select", "slice", "transpose", "permute", "unbind", "unsqueeze", "expand", "split"}


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operations of torch's that compute, and kernels of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.operations = 0
        self.is_inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if not self.is_inside and name not in VIEWS and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.operations += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self):
        """Also the kernels: the interpreter's own copies are none of the caller's."""
        sound = {name: getattr(tiled_triton, name) for name in KERNELS}
        for name, kernel in sound.items():
            setattr(tiled_triton, name, Counted(kernel, self))
        try:
            with self:
                yield
        finally:
            for name, kernel in sound.items():
                setattr(tiled_triton, name, kernel)


class Counted:
    def __init__(self, kernel, launches: Launches) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def call(*args, **kwargs):
            self.launches.kernels, self.launches.is_inside = self.launches.kernels + 1, True
            try:
                self.kernel[grid](*args, **kwargs)
            finally:
                self.launches.is_inside = False

        return call


def draw(batch=2):
    generator = torch.Generator().manual_seed(3)
    q, d_out = (torch.randn(batch, HEADS, SEQ, HEAD_DIM, generator=generator) for _ in range(2))
    k, v = (torch.randn(batch, KV_HEADS, SEQ, HEAD_DIM, generator=generator) for _ in range(2))
    documents = torch.randint(3, (batch, SEQ), generator=generator).sort(dim=1).values
    return q, k, v, d_out, documents


def attend(group, context, window=None, documents=False, dtype=torch.float32):
    """This rank's part of the output and the gradients, its positions, and what was launched forward and backward."""
    attention = context_attention(context, group)
    *whole, segments = draw()
    at = attention.positions(SEQ)
    own = [x[:, :, at].to(dtype) for x in whole]
    inputs = [x.requires_grad_() for x in own[:3]]
    how = {"positions": at, "window": window, "segments": segments if documents else None}
    attention(*inputs, **how)  # whatever is worked out once
    forward, backward = Launches(), Launches()
    with forward.counting():
        out = attention(*inputs, **how)
    with backward.counting():
        gradients = torch.autograd.grad(out, inputs, own[3])
    counts = [(each.kernels, each.operations) for each in (forward, backward)]
    return at, [out.detach(), *gradients], counts


def all_of_them(group):
    cases = [(context, *mask) for context in ("ring", "zigzag", "ulysses", "gather") for mask in MASKS]
    return {case: attend(group, *case) for case in cases if case[0] != "ulysses" or group.world_size == 2}


@pytest.mark.parametrize(("world_size", "how"), [(2, all_of_them), (3, all_of_them), (2, on_nccl_like(all_of_them))])
def test_outputs_and_gradients_are_those_of_one_process(world_size, how):
    ranks = launch(how, world_size, timeout=300)
    for context, window, documents in ranks[0]:
        q, k, v, d_out, segments = (x.double() if x.is_floating_point() else x for x in draw())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        expected = dense(*inputs, window=window, segments=segments if documents else None)
        right = [expected.detach(), *torch.autograd.grad(expected, inputs, d_out)]
        for rank in ranks:
            at, found, _ = rank[context, window, documents]
            for mine, whole in zip(found, right, strict=True):
                torch.testing.assert_close(mine.double(), whole[:, :, at], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up_in_float32(dtype):
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    ranks = launch(attend, 3, "zigzag", None, False, dtype, timeout=300)
    inputs = [x.to(dtype).double().requires_grad_() for x in draw()[:3]]
    expected = dense(*inputs)
    right = [expected.detach(), *torch.autograd.grad(expected, inputs, draw()[3].to(dtype).double())]
    for at, found, _ in ranks:
        for mine, whole in zip(found, right, strict=True):
            assert mine.dtype is dtype
            torch.testing.assert_close(mine.double(), whole[:, :, at], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_launches_at_most_four_kernels_for_a_block(world_size):
    """Forward one for each block, backward two and the sum of the gradients; and what a layer does once."""
    for _, _, (forward, backward) in launch(attend, world_size, "zigzag", timeout=300):
        assert forward[0] == world_size and backward[0] == 2 * world_size
        assert sum(forward) <= world_size + 3
        assert sum(backward) <= 4 * world_size + 8


@pytest.mark.parametrize("context", ["ulysses", "gather"])
def test_one_kernel_attends_to_the_whole_sequence(context):
    for _, _, (forward, backward) in launch(attend, 2, context, 20, timeout=300):
        assert (forward[0], backward[0]) == (1, 2)


def test_float64_stays_exact():
    q = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    assert isinstance(blocks.attention_block(q, q, range(4), range(4), None), blocks.TiledBlock)
    assert isinstance(blocks.attention_block(q.float(), q.float(), range(4), range(4), None), blocks.KernelBlock)
