"""Spoilers of lab 02, recomputation: blocks that keep too much or lose a gradient, and right ones of another make."""

import torch
from torch.utils.checkpoint import checkpoint

from course.kit.exercises import KnownAnswers

recompute_block = KnownAnswers("recompute-block")


@recompute_block.mistake("keeps the graph of the forward pass", expect="keep x only")
class KeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.x = block, x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = block(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        return None, *torch.autograd.grad(ctx.y, (ctx.x, *ctx.block.parameters()), gradient)


recompute_block.mistake(
    "backward inside, and its gradients returned",
    {
        "return None, *torch.autograd.grad(y, (x, *ctx.block.parameters()), gradient)": (
            "y.backward(gradient)\n"
            "        return None, x.grad, *[parameter.grad.clone() for parameter in "
            "ctx.block.parameters()]"
        )
    },
    expect="also wrote into .grad",
)
recompute_block.mistake(
    "forgets the gradient from above",
    {"parameters()), gradient)": "parameters()), torch.ones_like(gradient))"},
    expect="gradient from above",
)
recompute_block.mistake(
    "runs the block without autograd",
    {"        x = x.detach().requires_grad_()\n        with torch.enable_grad():\n            y =": "        y ="},
    expect="does not require grad",
)


@recompute_block.mistake("parameters get theirs inside, none is returned", expect="no gradient of the parameters")
class Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.count = block, len(parameters)
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradient)
        return (None, x.grad) + (None,) * ctx.count


recompute_block.mistake(
    "keeps the output as an attribute",
    {"return block(x)": "ctx.y = block(x)\n        return ctx.y.clone()"},
    expect="where the block inputs take",
)
recompute_block.mistake(
    "backward inside, and .grad cleared",
    {
        "return None, *torch.autograd.grad(y, (x, *ctx.block.parameters()), gradient)": (
            "y.backward(gradient)\n"
            "        found = [parameter.grad for parameter in ctx.block.parameters()]\n"
            "        ctx.block.zero_grad()\n"
            "        return None, x.grad, *found"
        )
    },
    expect="changes or clears it",
)
recompute_block.mistake(
    "a list of inputs on the block",
    {
        "ctx.save_for_backward(x)": "block.__dict__.setdefault('inputs', []).append(x)",
        "(x,) = ctx.saved_tensors": "x = ctx.block.inputs.pop()",
    },
    expect="not in a list that all runs share",
)
recompute_block.alternative(
    "keeps x as an attribute",
    {"ctx.save_for_backward(x)": "ctx.x = x", "(x,) = ctx.saved_tensors": "", "x = x.detach()": "x = ctx.x.detach()"},
)
recompute_block.mistake(
    "runs the block twice in backward",
    {"            y = ctx.block(x)": "            ctx.block(x)\n            y = ctx.block(x)"},
    expect="2 are enough",
)


INPUTS = {}


@recompute_block.mistake("keeps x by block, in a global", expect="wrong where one runs twice before backward")
class KeptByBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        INPUTS[id(block)] = x.detach().clone()
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = INPUTS[id(ctx.block)].requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.block.parameters()), gradient)


@recompute_block.alternative("backward into a copy of the leaves")
class OnLeaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.names = block, [name for name, _ in block.named_parameters()]
        ctx.save_for_backward(x, *parameters)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = torch.func.functional_call(ctx.block, dict(zip(ctx.names, leaves[1:], strict=True)), (leaves[0],))
        y.backward(gradient)
        return None, *[leaf.grad for leaf in leaves]


@recompute_block.alternative("torch's checkpoint, which stops before the last product: 7/6 of the FLOPs")
class ByCheckpoint(torch.autograd.Function):
    @staticmethod
    def apply(block, x, *parameters):
        return checkpoint(block, x, use_reentrant=False)
