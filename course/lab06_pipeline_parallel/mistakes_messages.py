"""Spoilers of lab 06, third part: messages in the naive order, and backwards that put nothing off."""

import torch

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("06_pipeline_parallel")

# Messages


def _one_by_one(order, stage, stages):
    return [
        part
        for step in ANSWERS.place_messages(order, stage, stages)
        for part in ([step] if isinstance(step, str) else [[text] for text in step])
    ]


@mistake("rendezvous-messages", "one-after-the-other", expect="1F1B, 4 stages.*deadlock.*post the send together")
def one_by_one(order, stage, stages):
    return _one_by_one(order, stage, stages)


@mistake("rendezvous-messages", "sends-everywhere", expect="'send [FB]0', but nobody is there")
def sends_everywhere(order, stage, stages):
    return [part for action in order for part in (action, [f"send {action}"])]


@mistake("rendezvous-messages", "never-receives", expect="never receives")
def never_receives(order, stage, stages):
    steps = [
        step if isinstance(step, str) else [text for text in step if text.startswith("send")]
        for step in ANSWERS.place_messages(order, stage, stages)
    ]
    return [step for step in steps if step]


@mistake("rendezvous-messages", "receives-too-late", expect="which needs it")
def receives_late(order, stage, stages):
    steps = []
    for step in _one_by_one(order, stage, stages):
        late = steps and not isinstance(step, list) and isinstance(steps[-1], list) and steps[-1][0].startswith("recv")
        steps[len(steps) - bool(late) : len(steps)] = [step, steps[-1]] if late else [step]
    return steps


@mistake("rendezvous-messages", "sends-before-it-is-made", expect="before it has made it")
def sends_early(order, stage, stages):
    steps = []
    for step in _one_by_one(order, stage, stages):
        early = isinstance(step, list) and step[0].startswith("send")
        steps[len(steps) - early : len(steps)] = [step, steps[-1]] if early else [step]
    return steps


@mistake("rendezvous-messages", "loose-messages", expect="put messages into lists")
def loose(order, stage, stages):
    steps = ANSWERS.place_messages(order, stage, stages)
    return [text for step in steps for text in ([step] if isinstance(step, str) else step)]


@mistake("rendezvous-messages", "reordered", expect="keep the order")
def reordered(order, stage, stages):
    return ANSWERS.place_messages(sorted(order, reverse=True), stage, stages)


@alternative("rendezvous-messages", "forwards-before-backwards")
def forwards_first(order, stage, stages):
    """One message at a time: where a gradient leaves and an activation comes in, the activation goes first."""
    steps = []
    for step in ANSWERS.place_messages(order, stage, stages):
        loose = (
            [step] if isinstance(step, str) else sorted(([text] for text in step), key=lambda text: text[0][5] == "B")
        )
        steps += loose
    return steps


@alternative("rendezvous-messages", "receives-first-in-the-list")
def receives_first(order, stage, stages):
    return [step if isinstance(step, str) else sorted(step) for step in ANSWERS.place_messages(order, stage, stages)]


# A backward in two halves


@mistake("split-backward", "nothing-put-off", expect="nothing was put off")
class NothingPutOff(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x, None


@mistake("split-backward", "computed-at-once-added-later", expect="only its addition")
class AddedLater(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        found = gradient.T @ x

        def add():
            weight.grad = found if weight.grad is None else weight.grad + found

        ctx.later.append(add)
        return gradient @ weight, None, None


@mistake("split-backward", "computed-again-later", expect="what is put off takes 3 products")
class ComputedAgain(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors

        def again():
            with torch.enable_grad():
                inner, twin = x.detach().requires_grad_(), weight.detach().requires_grad_()
                (inner @ twin.T).backward(gradient)
            weight.grad = twin.grad if weight.grad is None else weight.grad + twin.grad

        ctx.later.append(again)
        return gradient @ weight, None, None


@mistake("split-backward", "overwrites", expect="not the sum over 3 microbatches")
class Overwrites(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors

        def put():
            weight.grad = gradient.T @ x

        ctx.later.append(put)
        return gradient @ weight, None, None


@mistake("split-backward", "forgets-the-weights", expect="0 functions in later")
class ForgetsWeights(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        _, weight = ctx.saved_tensors
        return gradient @ weight, None, None


@mistake("split-backward", "input-put-off-too", expect="the input's gradient is not right after backward")
class InputPutOff(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        ANSWERS.SplitLinear.backward(ctx, gradient)
        return torch.zeros_like(ctx.saved_tensors[0]), None, None


@mistake("split-backward", "keeps-a-graph", expect="weight.grad carries a graph")
class KeepsAGraph(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors

        def add():
            found = gradient.T @ x
            weight.grad = found if weight.grad is None else weight.grad + found

        ctx.later.append(add)
        return gradient @ weight, None, None


@alternative("split-backward", "accumulates-through-autograd")
class ThroughAutograd(ANSWERS.SplitLinear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors

        def accumulate():
            torch.autograd.backward(weight.view_as(weight), gradient.T @ x)

        ctx.later.append(accumulate)
        return gradient @ weight, None, None
