"""Context parallelism by the Triton kernels, in Triton's interpreter, against dense attention in float64, and what is
launched. Run by test_context_kernels.py, which sets TRITON_INTERPRET for this process and the ranks that it starts."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.comm import launch
from minillm.model import dense
from minillm.model.attention import blocks, tiled_kernels
from minillm.parallel.context_parallel import context_attention
from tests.engine.comm.nccl_like import on_nccl_like

SEQ, HEADS, KV_HEADS, HEAD_DIM = 24, 2, 1, 6
MASKS = [(None, False), (9, False), (None, True)]  # window, documents
KERNELS = ("forward", "backward_keys", "backward_queries")
MESSAGES = {"send", "recv_", "promote_types"}  # on a GPU they are none of ours, and the last is no operation
VIEWS = {"alias", "detach", "view", "select", "slice", "transpose", "permute", "unbind", "unsqueeze", "expand", "split"}


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operations of torch's that compute, and kernels of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.operations, self.is_inside = 0, [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if (
            not self.is_inside
            and name not in VIEWS | MESSAGES
            and not name.startswith(("empty", "new_empty", "_unsafe_view"))
        ):
            self.operations.append(name)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self):
        """Also the kernels: the interpreter's own copies are none of the caller's."""
        sound = {name: getattr(tiled_kernels, name) for name in KERNELS}
        for name, kernel in sound.items():
            setattr(tiled_kernels, name, Counted(kernel, self))
        try:
            with self:
                yield
        finally:
            for name, kernel in sound.items():
                setattr(tiled_kernels, name, kernel)


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


def draw(batch=1):
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
    cases = [case for case in cases if case[0] != "ulysses" or group.world_size == 2]
    return {case: attend(group, *case) for case in cases} | {"half": attend(group, "zigzag", dtype=torch.bfloat16)}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    """Two ranks on a backend that keeps NCCL's rules, three on gloo."""
    return launch(on_nccl_like(all_of_them) if request.param == 2 else all_of_them, request.param, timeout=300)


def right(dtype=torch.float32, window=None, documents=False):
    """Output and gradients of one process in float64."""
    q, k, v, d_out, segments = (x.to(dtype).double() if x.is_floating_point() else x for x in draw())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = dense(*inputs, window=window, segments=segments if documents else None)
    return [expected.detach(), *torch.autograd.grad(expected, inputs, d_out)]


def test_outputs_and_gradients_are_those_of_one_process(ranks):
    for case in ranks[0].keys() - {"half"}:
        for rank in ranks:
            at, found, _ = rank[case]
            for mine, whole in zip(found, right(window=case[1], documents=case[2]), strict=True):
                torch.testing.assert_close(mine.double(), whole[:, :, at], rtol=1e-4, atol=2e-5, msg=str(case))


def test_half_precision_adds_up_in_float32(ranks):
    for at, found, _ in (rank["half"] for rank in ranks):
        for mine, whole in zip(found, right(torch.bfloat16), strict=True):
            assert mine.dtype is torch.bfloat16
            torch.testing.assert_close(mine.double(), whole[:, :, at], rtol=3e-2, atol=3e-2)


def test_a_ring_launches_one_kernel_for_a_block_forward_and_three_backward(ranks):
    """Backward adding up the gradients is the third. The rest a layer does once: zeros, delta, K and V in one."""
    world_size = len(ranks)
    for rank in ranks:
        forward, backward = rank["zigzag", None, False][2]
        assert (forward[0], backward[0]) == (world_size, 2 * world_size)
        if world_size == 2:
            continue  # its backend copies messages on the CPU
        assert forward[1] == ["stack"]
        assert sorted(backward[1]) == ["add_"] * (world_size - 1) + ["mul", "stack", "sum", "zeros_like"]


def test_one_kernel_attends_to_the_whole_sequence(ranks):
    """Without a mask torch's own attention does, once heads are exchanged."""
    for rank in ranks:
        kernels = {case: [count for count, _ in found[2]] for case, found in rank.items()}
        assert kernels["gather", None, False] == kernels["gather", 9, False] == [1, 2]
        if len(ranks) == 2:
            assert kernels["ulysses", None, False] == [0, 0] and kernels["ulysses", 9, False] == [1, 2]


def test_float64_stays_exact():
    q = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    assert isinstance(blocks.attention_block(q, q, range(4), range(4), None), blocks.TiledBlock)
    assert isinstance(blocks.attention_block(q.float(), q.float(), range(4), range(4), None), blocks.KernelBlock)
