"""Spoilers of lab 06, second part: stages that scale twice, keep everything, wait for each other; copies that drift."""

import torch

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("06_pipeline_parallel")

# A stage


@mistake("stage-step", "not-divided", expect="4 times too large")
class NotDivided(ANSWERS.Stage):
    def __init__(self, module, group, like, loss, microbatches):
        super().__init__(module, group, like, loss, 1)


@mistake("stage-step", "divided-twice", expect="4 times too small")
class DividedTwice(ANSWERS.Stage):
    def __init__(self, module, group, like, loss, microbatches):
        super().__init__(module, group, like, lambda y, m: loss(y, m) / microbatches, microbatches)


@mistake("stage-step", "clears-gradients", expect="of the last microbatch alone")
class ClearsGradients(ANSWERS.Stage):
    def backward(self, m):
        self.module.zero_grad()
        super().backward(m)


@mistake("stage-step", "gradient-of-ones", expect="what travels back")
class GradientOfOnes(ANSWERS.Stage):
    def backward(self, m):
        x, y = self.kept.pop(m)
        if not self.last:
            self.group.recv(torch.empty_like(y), self.group.rank + 1)
        y.sum().backward()
        if not self.first:
            self.sent.append(self.group.send(x.grad, self.group.rank - 1, async_op=True))


@mistake("stage-step", "keeps-everything", expect="let go of what is kept")
class KeepsEverything(ANSWERS.Stage):
    def backward(self, m):
        kept = self.kept[m]
        super().backward(m)
        self.kept[m] = kept


@mistake("stage-step", "blocking-sends", expect="right under GPipe, but under 1F1B")
class BlockingSends(ANSWERS.Stage):
    def forward(self, m, x=None):
        super().forward(m, x)
        self._wait()

    def backward(self, m):
        super().backward(m)
        self._wait()

    def _wait(self):
        while self.sent:
            self.sent.pop().wait()


@mistake("stage-step", "only-the-newest-kept", expect="second time|KeyError|the gradient is wrong")
class OnlyTheNewest(ANSWERS.Stage):
    def backward(self, m):
        self.kept[m] = self.kept[max(self.kept)]
        super().backward(m)


@mistake("stage-step", "input-without-gradient", expect="NoneType|x.grad|no gradient")
class InputWithoutGradient(ANSWERS.Stage):
    def forward(self, m, x=None):
        if not self.first:
            x = torch.empty_like(self.like)
            self.group.recv(x, self.group.rank - 1)
        y = self.module(x)
        if self.last:
            y = self.loss(y, m) / self.microbatches
        else:
            self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))
        self.kept[m] = x, y


@alternative("stage-step", "gradients-by-autograd-grad")
class ByAutogradGrad(ANSWERS.Stage):
    def backward(self, m):
        x, y = self.kept.pop(m)
        gradient = None
        if not self.last:
            gradient = torch.empty_like(y)
            self.group.recv(gradient, self.group.rank + 1)
        weights = list(self.module.parameters())
        found = torch.autograd.grad(y, weights if self.first else [*weights, x], gradient)
        for weight, new in zip(weights, found, strict=False):
            weight.grad = new if weight.grad is None else weight.grad + new
        if not self.first:
            self.sent.append(self.group.send(found[-1], self.group.rank - 1, async_op=True))


@alternative("stage-step", "loss-in-backward")
class LossInBackward(ANSWERS.Stage):
    def forward(self, m, x=None):
        if not self.first:
            x = torch.empty_like(self.like)
            self.group.exchange(recv=(x, self.group.rank - 1))
            x.requires_grad_()
        y = self.module(x)
        if not self.last:
            self.sent.append(self.group.exchange(send=(y, self.group.rank + 1), async_op=True))
        self.kept[m] = x, y

    def backward(self, m):
        if self.last:
            x, y = self.kept[m]
            self.kept[m] = x, self.loss(y, m) / self.microbatches
        super().backward(m)


@alternative("stage-step", "recomputes-in-backward")
class Recomputes(ANSWERS.Stage):
    def forward(self, m, x=None):
        if not self.first:
            x = torch.empty_like(self.like)
            self.group.recv(x, self.group.rank - 1)
        with torch.no_grad():
            y = self.module(x)
        if not self.last:
            self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))
        self.kept[m] = x, None

    def backward(self, m):
        x, _ = self.kept.pop(m)
        y = self.module(x if self.first else x.requires_grad_())
        self.kept[m] = x, self.loss(y, m) / self.microbatches if self.last else y
        super().backward(m)


@mistake("stage-step", "two-buffers-in-turn", expect="did a later receive overwrite a saved activation")
class TwoBuffers(ANSWERS.Stage):
    def forward(self, m, x=None):
        if not self.first:
            self.inputs = getattr(self, "inputs", [torch.empty_like(self.like) for _ in range(2)])
            self.group.recv(self.inputs[m % 2], self.group.rank - 1)
            x = self.inputs[m % 2].data.requires_grad_()
        y = self.module(x)
        if self.last:
            y = self.loss(y, m) / self.microbatches
        else:
            self.sent.append(self.group.send(y.detach(), self.group.rank + 1, async_op=True))
        self.kept[m] = x, y


# The tied embedding


@mistake("tied-embedding", "only-the-first", expect="only its own gradient")
def only_the_first(weight, group):
    last = group.world_size - 1
    if last and group.rank == last:
        group.send(weight.grad, 0)
    elif last and group.rank == 0:
        theirs = torch.empty_like(weight.grad)
        group.recv(theirs, last)
        weight.grad += theirs


@mistake("tied-embedding", "averages", expect="the mean; two uses of one weight add up")
def averages(weight, group):
    ANSWERS.sum_tied(weight, group)
    if weight is not None and group.world_size > 1:
        weight.grad /= 2


@mistake("tied-embedding", "swaps", expect="the other end's gradient, without its own")
def swaps(weight, group):
    if weight is not None and group.world_size > 1:
        mine = weight.grad.clone()
        ANSWERS.sum_tied(weight, group)
        weight.grad -= mine


@mistake("tied-embedding", "sums-the-weights", expect="the weight itself changed")
def sums_weights(weight, group):
    if weight is not None and group.world_size > 1:
        other = group.world_size - 1 - group.rank
        theirs = torch.empty_like(weight.data)
        group.exchange(send=(weight.data, other), recv=(theirs, other))
        weight.data += theirs


@mistake("tied-embedding", "pickles", expect="gather_objects pickles")
def pickles(weight, group):
    found = group.gather_objects(None if weight is None else weight.grad)
    if weight is not None and group.world_size > 1:
        weight.grad = found[0] + found[-1]


@mistake("tied-embedding", "both-send-first", expect="Deadlock: these ranks are all in send")
def both_send_first(weight, group):
    if weight is None or group.world_size == 1:
        return
    other = group.world_size - 1 - group.rank
    theirs = torch.empty_like(weight.grad)
    group.send(weight.grad, other)
    group.recv(theirs, other)
    weight.grad += theirs


@alternative("tied-embedding", "there-and-back")
def there_and_back(weight, group):
    last = group.world_size - 1
    if last == 0 or weight is None:
        return
    theirs = torch.empty_like(weight.grad)
    if group.rank == last:
        group.send(weight.grad, 0)
        group.recv(theirs, 0)
        weight.grad = theirs
    else:
        group.recv(theirs, last)
        weight.grad += theirs
        group.send(weight.grad, last)


@mistake("tied-embedding", "all-reduce-at-the-ends-only", expect="which the stages between never join")
def reduces_at_the_ends(weight, group):
    if weight is not None and group.world_size > 1:
        group.all_reduce(weight.grad)
