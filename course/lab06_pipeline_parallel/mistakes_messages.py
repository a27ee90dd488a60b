"""Spoilers of lab 06, third part: messages in the naive order, and backwards that put nothing off."""

from course.kit import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("06_pipeline_parallel")

# Messages


def _one_by_one(order, stage, stages):
    return [
        part
        for step in ANSWERS.place_messages(order, stage, stages)
        for part in ([step] if isinstance(step, str) else [[text] for text in step])
    ]


rendezvous_messages = KnownAnswers("rendezvous-messages")


@rendezvous_messages.mistake("one-after-the-other", expect="1F1B, 4 stages.*deadlock.*post the send together")
def one_by_one(order, stage, stages):
    return _one_by_one(order, stage, stages)


rendezvous_messages.mistake(
    "sends-everywhere", {" if 0 <= target < stages else []": ""}, expect="'send B2', but nobody is there"
)
rendezvous_messages.mistake("never-receives", {'steps[-1].append(f"recv {action}")': "pass"}, expect="never receives")


@rendezvous_messages.mistake("receives-too-late", expect="which needs it")
def receives_late(order, stage, stages):
    steps = []
    for step in _one_by_one(order, stage, stages):
        late = steps and not isinstance(step, list) and isinstance(steps[-1], list) and steps[-1][0].startswith("recv")
        steps[len(steps) - bool(late) : len(steps)] = [step, steps[-1]] if late else [step]
    return steps


@rendezvous_messages.mistake("sends-before-it-is-made", expect="before it has made it")
def sends_early(order, stage, stages):
    steps = []
    for step in _one_by_one(order, stage, stages):
        early = isinstance(step, list) and step[0].startswith("send")
        steps[len(steps) - early : len(steps)] = [step, steps[-1]] if early else [step]
    return steps


@rendezvous_messages.mistake("loose-messages", expect="put messages into lists")
def loose(order, stage, stages):
    steps = ANSWERS.place_messages(order, stage, stages)
    return [text for step in steps for text in ([step] if isinstance(step, str) else step)]


rendezvous_messages.mistake(
    "microbatches-of-one-digit",
    {"recv {action}": "recv {action[:2]}", "send {action}": "send {action[:2]}"},
    expect="2 stages, 1. microbatches",
)
rendezvous_messages.mistake("reordered", {"in order:": "in sorted(order, reverse=True):"}, expect="keep the order")


@rendezvous_messages.alternative("forwards-before-backwards")
def forwards_first(order, stage, stages):
    """One message at a time: where a gradient leaves and an activation comes in, the activation goes first."""
    steps = []
    for step in ANSWERS.place_messages(order, stage, stages):
        loose = (
            [step] if isinstance(step, str) else sorted(([text] for text in step), key=lambda text: text[0][5] == "B")
        )
        steps += loose
    return steps


@rendezvous_messages.alternative("receives-first-in-the-list")
def receives_first(order, stage, stages):
    return [step if isinstance(step, str) else sorted(step) for step in ANSWERS.place_messages(order, stage, stages)]


# A backward in two halves

split_backward = KnownAnswers("split-backward")

split_backward.mistake(
    "nothing-put-off",
    {
        "ctx.later.append(weight_gradient)": "",
        "return gradient @ weight, None": "return gradient @ weight, gradient.T @ x",
    },
    expect="nothing was put off",
)
split_backward.mistake(
    "computed-at-once-added-later",
    {
        "def weight_gradient():\n            found = gradient.T @ x.detach()": (
            "found = gradient.T @ x\n\n        def weight_gradient():"
        )
    },
    expect="only its addition",
)
split_backward.mistake(
    "rows-at-once",
    {
        "def weight_gradient():\n            found = gradient.T @ x.detach()": (
            "rows = [(gradient[:, [i]] * x).sum(0) for i in range(gradient.shape[1])]\n\n"
            "        def weight_gradient():\n            found = torch.stack(rows)"
        )
    },
    expect="only its addition",
)
split_backward.mistake(
    "the-list-of-the-newest-forward",
    {"ctx.later = later": "SplitLinear.later = later", "ctx.later.append": "SplitLinear.later.append"},
    expect="Lists of other microbatches hold",
)
split_backward.mistake(
    "computed-again-later",
    {
        "found = gradient.T @ x.detach()": (
            "with torch.enable_grad():\n"
            "                inner, twin = x.detach().requires_grad_(), "
            "weight.detach().requires_grad_()\n"
            "                (inner @ twin.T).backward(gradient)\n"
            "            found = twin.grad"
        )
    },
    expect="what is put off takes 3 products",
)
split_backward.mistake(
    "overwrites",
    {"found if weight.grad is None else weight.grad + found": "found"},
    expect="not the sum over 3 microbatches",
)
split_backward.mistake("forgets-the-weights", {"ctx.later.append(weight_gradient)": ""}, expect="0 functions in later")
split_backward.mistake(
    "input-put-off-too",
    {"return gradient @ weight": "return torch.zeros_like(x)"},
    expect="the input's gradient is not right after backward",
)
split_backward.mistake("keeps-a-graph", {"x.detach()": "x"}, expect="weight.grad carries a graph")
split_backward.mistake(
    "outer-products-at-once",
    {
        "def weight_gradient():\n            found = gradient.T @ x.detach()": (
            "found = (gradient[:, :, None] * x[:, None, :]).sum(0)\n\n        def weight_gradient():"
        )
    },
    expect="only its addition",
)
split_backward.alternative(
    "outer-products", {"gradient.T @ x.detach()": "(gradient[:, :, None] * x.detach()[:, None, :]).sum(0)"}
)
split_backward.alternative(
    "accumulates-through-autograd",
    {
        "weight.grad = found if weight.grad is None else weight.grad + found": (
            "torch.autograd.backward(weight.view_as(weight), found)"
        )
    },
)
