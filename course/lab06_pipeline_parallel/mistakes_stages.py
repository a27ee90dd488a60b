"""Spoilers of lab 06, second part: stages that scale twice, keep everything, wait for each other; copies that drift."""

import torch

from course.kit import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("06_pipeline_parallel")

# A stage

stage_step = KnownAnswers("stage-step")

stage_step.mistake("not-divided", {" / self.microbatches": ""}, expect="4 times too large")
stage_step.mistake("divided-twice", {"/ self.microbatches": "/ self.microbatches**2"}, expect="4 times too small")
stage_step.mistake(
    "clears-gradients",
    {"x, y = self.kept.pop(m)": "self.module.zero_grad()\n        x, y = self.kept.pop(m)"},
    expect="of the last microbatch alone",
)
stage_step.mistake("gradient-of-ones", {"y.backward(gradient)": "y.sum().backward()"}, expect="what travels back")
stage_step.mistake("keeps-everything", {"self.kept.pop(m)": "self.kept[m]"}, expect="let go of what is kept")
stage_step.mistake(
    "blocking-sends",
    {
        "self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))": (
            "self.group.send(y, self.group.rank + 1)"
        ),
        "self.sent.append(self.group.send(x.grad, self.group.rank - 1, async_op=True))": (
            "self.group.send(x.grad, self.group.rank - 1)"
        ),
    },
    expect="waits for 4 of its sends before it goes on",
)
stage_step.mistake(
    "only-the-newest-kept",
    {"self.kept.pop(m)": "self.kept[max(self.kept)]\n        del self.kept[m]"},
    expect="second time|KeyError|the gradient is wrong",
)
stage_step.mistake("input-without-gradient", {"x.requires_grad_()": ""}, expect="NoneType|x.grad|no gradient")
stage_step.mistake(
    "first-input-requires-a-gradient", {"y = self.module(x)": "y = self.module(x.requires_grad_())"}, expect="floating"
)
stage_step.mistake(
    "keeps-inputs",
    {"x, y = self.kept.pop(m)": "x, y = self.kept.pop(m)\n        self.kept[-1 - m] = x"},
    expect="holds the inputs of 4 microbatches at once where 1 are enough",
)


stage_step.mistake(
    "handles-thrown-away",
    {
        "self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))": (
            "self.group.send(y, self.group.rank + 1, async_op=True)"
        )
    },
    expect="handles nobody waits for, so they may never arrive: keep it in self.sent",
)
stage_step.mistake(
    "activations-wait",
    {
        "self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))": (
            "self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))\n            self.sent[-1].wait()"
        )
    },
    expect="waits for 4 of its sends before it goes on",
)
stage_step.mistake(
    "gradient-into-the-output", {"torch.empty_like(y)": "y"}, expect="the gradient is wrong|modified by an inplace"
)
stage_step.mistake(
    "a-buffer-of-float64", {"torch.empty_like(y)": "torch.empty(y.shape, dtype=torch.float64)"}, expect="float32"
)


stage_step.alternative(
    "requires-a-gradient-before-it-receives",
    {
        "torch.empty_like(self.like)": "torch.empty_like(self.like, requires_grad=True)",
        "            x.requires_grad_()\n": "",
    },
)


@stage_step.alternative("gradients-by-autograd-grad")
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


@stage_step.alternative("loss-in-backward")
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


@stage_step.alternative("recomputes-in-backward")
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


@stage_step.mistake("two-buffers-in-turn", expect="did a later receive overwrite a saved activation")
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

tied_embedding = KnownAnswers("tied-embedding")


@tied_embedding.mistake("only-the-first", expect="only its own gradient")
def only_the_first(weight, group):
    last = group.world_size - 1
    if last and group.rank == last:
        group.send(weight.grad, 0)
    elif last and group.rank == 0:
        theirs = torch.empty_like(weight.grad)
        group.recv(theirs, last)
        weight.grad += theirs


tied_embedding.mistake(
    "averages",
    {"weight.grad += theirs": "weight.grad += theirs\n    weight.grad /= 2"},
    expect="the mean; two uses of one weight add up",
)
tied_embedding.mistake(
    "swaps", {"weight.grad += theirs": "weight.grad.copy_(theirs)"}, expect="the other end's gradient, without its own"
)
tied_embedding.mistake(
    "sums-the-weights",
    {
        "empty_like(weight.grad)": "empty_like(weight.data)",
        "(weight.grad, other)": "(weight.data, other)",
        "weight.grad += theirs": "weight.data += theirs",
    },
    expect="changed its input",
)


tied_embedding.mistake(
    "a-buffer-of-float32", {"torch.empty_like(weight.grad)": "torch.empty(weight.shape)"}, expect="float64"
)


@tied_embedding.mistake("pickles", expect="gather_objects pickles")
def pickles(weight, group):
    found = group.gather_objects(None if weight is None else weight.grad)
    if weight is not None and group.world_size > 1:
        weight.grad = found[0] + found[-1]


tied_embedding.mistake(
    "both-send-first",
    {
        "group.exchange(send=(weight.grad, other), recv=(theirs, other))": (
            "group.send(weight.grad, other)\n    group.recv(theirs, other)"
        )
    },
    expect="Deadlock: these ranks are all in send",
)


tied_embedding.mistake(
    "never-waits",
    {"recv=(theirs, other))": "recv=(theirs, other), async_op=True)"},
    expect="handles nobody waits for, so they may never arrive: wait",
)


@tied_embedding.alternative("there-and-back")
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


@tied_embedding.mistake("all-reduce-at-the-ends-only", expect="which the stages between never join")
def reduces_at_the_ends(weight, group):
    if weight is not None and group.world_size > 1:
        group.all_reduce(weight.grad)
