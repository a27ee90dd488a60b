"""Lab 17, backward: gradients through codes, and which of an adapter's gradients are shares of a sum over ranks."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab17_adapters import rank_programs
from course.lab17_adapters.checks import close
from course.lab17_adapters.codes import WatchedCodes
from course.lab17_adapters.rank_programs import COLUMN, ROW, CutAdapter, Finished
from course.shared.diagnose import expect_tensor
from minillm.predict import comms

# Through codes.


@exercise(
    "nf4-backward",
    minutes=20,
    difficulty=3,
    hints=(
        "The gradient of x is dy @ W. What can be decoded once more need not be kept in between. Does W learn?",
        "forward: ctx.codes = codes; return x @ codes.weight().T. backward: return dy @ ctx.codes.weight(), None: the "
        "None is for the codes. x is not kept, since only the gradient of W would need it.",
    ),
)
def check_backward(learner: Any) -> Receipt:
    if not (isinstance(learner, type) and issubclass(learner, torch.autograd.Function)):
        raise CheckFailed("the exercise asks for the class Through4Bits, a torch.autograd.Function")
    rows = []
    cases = ((3, 4, 64), (5, 7, 128), (random.randint(6, 12), random.randint(20, 40), 64 * random.randint(3, 4)))
    for tokens, outputs, inputs in cases:
        name = f"{tokens} tokens, weight {outputs} x {inputs}"
        codes = WatchedCodes(torch.randn(outputs, inputs) / 8)
        weight = codes.weight()
        leaf, dy = torch.randn(tokens, inputs, requires_grad=True), torch.randn(tokens, outputs)
        x = leaf.clone()
        before, memory = codes.decoded, StorageWeakRef(x.untyped_storage())
        y = learner.apply(x, codes)
        expect_tensor(f"{name}: the output", y, (tokens, outputs))
        if not close(y.detach(), leaf.detach() @ weight.T):
            raise CheckFailed(f"{name}: the output is not x @ weight.T", evidence=y.detach())
        if y.grad_fn is None:
            raise CheckFailed(f"{name}: the output has no gradient: call nothing that detaches x")
        del weight, x
        kept = _floats_kept(y.grad_fn)
        if codes.held or kept >= 4 * outputs * inputs:
            raise CheckFailed(
                f"{name}: a decoded weight, {4 * outputs * inputs:,} B, is kept from forward to backward; the codes "
                f"are {codes.nbytes:,} B: keep those, and decode once more"
            )
        if kept or not memory.expired():
            what = f"{kept:,} B of floats are" if kept else "x is"
            raise CheckFailed(
                f"{name}: {what} kept for backward. Only the gradient of a weight that learns needs "
                "the layer's input, and this one is frozen"
            )
        forward = codes.decoded - before
        y.backward(dy)
        right = dy @ codes.weight()
        backward = codes.decoded - before - forward - 1
        if leaf.grad is None:
            raise CheckFailed(f"{name}: x has no gradient: layers below, and their adapters, learn nothing")
        expect_tensor(f"{name}: the gradient of x", leaf.grad, leaf.shape)
        if not close(leaf.grad, right):
            raise CheckFailed(f"{name}: the gradient of x is not dy @ weight", evidence=leaf.grad)
        if backward == 0:
            raise CheckFailed(f"{name}: backward decodes nothing: what does it multiply by, a weight that was kept?")
        if forward != 1 or backward != 1:
            raise CheckFailed(
                f"{name}: decoded {forward} times in forward and {backward} times in backward; once each is enough"
            )
        rows.append(row(f"{name}: floats kept from forward to backward", 0, kept, "B"))
        rows.append(row("    decoded, forward and backward", 2, forward + backward))
    return receipt("through 4-bit codes", rows, open_rows=2)


def _floats_kept(node: Any) -> int:
    """Bytes of floating-point tensors that a Function's node holds, saved or as attributes."""
    held: dict[int, Tensor] = {}
    for each in _within([node.saved_tensors, vars(node)]):
        if isinstance(each, Tensor) and each.is_floating_point():
            held[each.untyped_storage().data_ptr()] = each
    return sum(each.untyped_storage().nbytes() for each in held.values())


def _within(value: Any, depth: int = 5) -> Iterator[Any]:
    """What a value holds: entries of lists, tuples and dicts, and what a function took from around it."""
    if isinstance(value, dict):
        value = list(value.values())
    elif closure := getattr(value, "__closure__", None):
        value = [cell.cell_contents for cell in closure]
    if isinstance(value, list | tuple) and depth:
        for each in value:
            yield from _within(each, depth - 1)
    else:
        yield value


# On ranks.


@exercise(
    "adapter-gradients",
    minutes=15,
    difficulty=3,
    hints=(
        "Ask of A and of B: do all ranks hold this matrix, or has each its own part of it? And does one rank's "
        "backward pass see all of what the matrix did?",
        "column: every rank has all of A, and its backward pass came through this rank's outputs only, so A's gradient "
        "is a share of a sum; B's rows are this rank's own. row: the same with A and B exchanged. group.all_reduce "
        "adds in place and returns its argument: hand it a clone.",
    ),
)
def check_gradients(learner: Any) -> Receipt:
    cases = [CutAdapter.draw(kind, world) for world in (4, 3, 1) for kind in (COLUMN, ROW)]
    rows = []
    for case, ranks in zip(cases, rank_programs.try_cases(learner, cases), strict=True):
        for rank, found in enumerate(ranks):
            _judge_rank(case, rank, found)
        n, shared = case.world_size, case.shared
        numel = case.gradients[shared].numel()
        sent = comms.ring_all_reduce(numel, 8, n).sent_per_rank[0]
        found = ranks[0]
        what = f"{case.kind} layer, {n} rank{'s' if n > 1 else ''}: bytes sent for {shared}"
        rows.append(row(what, sent, found.bytes, "B"))
        if rows[-1].verdict == "off":
            raise CheckFailed(
                f"{case.kind} layer on {n} ranks: right gradients, but rank 0 sent {found.bytes:,} B in "
                f"{found.calls or 'no call'}; one all-reduce of {shared}'s gradient is {sent:,} B",
                rows,
            )
    return receipt("an adapter beside a cut layer", rows, open_rows=4)


def _judge_rank(case: CutAdapter, rank: int, found: Finished) -> None:
    n, who = case.world_size, f"{case.kind} layer, rank {rank} of {case.world_size}"
    if not isinstance(found.results, tuple | list) or len(found.results) != 2:
        raise CheckFailed(f"{who}: returned {found.results!r:.60}; the exercise asks for (gradient of A, of B)")
    for which, result in zip("AB", found.results, strict=True):
        wanted = case.wanted(which, rank)
        expect_tensor(f"{who}: the gradient of {which}", result, wanted.shape)
        if same(result, wanted):
            continue
        share = case.share(which, rank)
        if which == case.shared:
            said = "the ranks' shares of it are not added up"
            if same(result * n, wanted):
                said = "it is the mean over ranks: they hold parts of one layer and not parts of a batch, so shares add"
            elif same(result, share):
                said = "it is this rank's share alone, and the other ranks' matrices would drift apart from this one's"
        else:
            said = "it was mixed with other ranks' gradients, which belong to other parts of the matrix"
        raise CheckFailed(f"{who}: the gradient of {which} is wrong: {said}", evidence=result)


def same(found: Tensor, right: Tensor) -> bool:
    """Within what another order of summation explains in float64."""
    return bool((found - right).norm() <= 1e-10 * right.norm())
