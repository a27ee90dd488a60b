"""Spoilers of lab 25: compiler, recorded step, which bug."""

from course.kit.exercises import alternative, mistake
from course.lab25_kernels.tried import right, wrong

mistake(
    "one-graph",
    "counter still a Python number",
    {'self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)': "self.calls = 0"},
    expect="compiled again",
)
mistake(
    "one-graph",
    "asks the host",
    {"return torch.where(y.abs().max() > self.limit, y / 2, y)": "return y / 2 if y.abs().max() > self.limit else y"},
    expect="still needs the host",
)
mistake(
    "one-graph",
    "each number by itself",
    {"y.abs().max() > self.limit": "y.abs() > self.limit"},
    says="Only the numbers above the limit are halved here; if one is above it, all are.",
)
mistake(
    "one-graph",
    "maximum without the sign left out",
    {"y.abs().max()": "y.max()"},
    says="A number may be above the limit in size and negative.",
)
mistake("one-graph", "counts no longer", {"        self.calls += 1\n": ""}, expect="module.calls is 0")
alternative(
    "one-graph",
    "a factor instead of a choice",
    {
        "return torch.where(y.abs().max() > self.limit, y / 2, y)": "return y / (1 + (y.abs().amax() > "
        "self.limit).float())"
    },
)

COPIES = """    for static, given in ((graph.tokens, tokens), (graph.slots, slots)):
        static[:n].copy_(given)
        static[n:].fill_(given[0])
"""
mistake(
    "replay-step",
    "bound to the name",
    {COPIES: "    more = (0,) * (graph.size - n)\n    graph.tokens = torch.cat((tokens, tokens[[*more]]))\n"
             "    graph.slots = torch.cat((slots, slots[[*more]]))\n"},
    expect="overwritten|hold its token",
)  # fmt: skip
mistake(
    "replay-step",
    "padding left as it was",
    {"        static[n:].fill_(given[0])\n": ""},
    expect="another sequence's",
)
mistake(
    "replay-step",
    "padding of zeros",
    {"static[n:].fill_(given[0])": "static[n:].fill_(0)"},
    expect="another sequence's|hold its token",
)
mistake("replay-step", "result not copied", {"graph.logits[:n].clone()": "graph.logits[:n]"}, expect="later replay")
mistake("replay-step", "always the largest graph", {"min(size for size in graphs if size >= n)": "max(graphs)"},
        expect="takes one replay of size")  # fmt: skip
mistake(
    "replay-step",
    "padding and all",
    {"graph.logits[:n].clone()": "graph.logits.clone()"},
    expect="asks for logits",
)
alternative(
    "replay-step", "padding repeats the last sequence", {"static[n:].fill_(given[0])": "static[n:].fill_(given[-1])"}
)

wrong(
    "which-kernel-bug",
    "a width without a tail",
    {"torch.ones(3, 77, dtype=torch.float16)": "torch.ones(3, 64, dtype=torch.float16)"},
    says="With a width that 64 divides there is no tail to read past.",
)
wrong(
    "which-kernel-bug",
    "values only",
    {'    if trace.races:\n        return "race"\n': ""},
    says="The interpreter runs one program after the other, so a race has right values: look at the trace.",
)
wrong(
    "which-kernel-bug",
    "float16 with a short row",
    {
        "torch.ones(1, 4099, dtype=torch.float16)": "torch.ones(1, 99, dtype=torch.float16)",
        "sums[0] == 4099": "sums[0] == 99",
    },
    says="A float16 sum of 99 ones is right. It takes more than 2,048.",
)
wrong(
    "which-kernel-bug",
    "the same numbers twice",
    {
        "torch.full((3, 77), 2.0, dtype=torch.float16)": "torch.ones(3, 77, dtype=torch.float16)",
        "torch.full((3,), 154.0)": "torch.full((3,), 77.0)",
    },
    says="A stale input gives the old answer, which is right as long as the numbers are the old ones.",
)
right("which-kernel-bug", "the races first", {
    '    if trace.outside:\n        return "missing mask"\n    if trace.races:\n        return "race"\n':
    '    if trace.races:\n        return "race"\n    if trace.outside:\n        return "missing mask"\n'})  # fmt: skip
