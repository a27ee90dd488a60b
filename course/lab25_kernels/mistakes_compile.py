"""Spoilers of lab 25: compiler, recorded step, which bug."""

from course.kit.exercises import KnownAnswers
from course.lab25_kernels.tried import KernelAnswers

one_graph = KnownAnswers("one-graph")

one_graph.mistake(
    "counter still a Python number",
    {'self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)': "self.calls = 0"},
    expect="compiled again",
)
one_graph.mistake(
    "asks the host",
    {"return torch.where(y.abs().max() > self.limit, y / 2, y)": "return y / 2 if y.abs().max() > self.limit else y"},
    expect="still needs the host",
)
one_graph.mistake(
    "each number by itself",
    {"y.abs().max() > self.limit": "y.abs() > self.limit"},
    says="Only the numbers above the limit are halved here; if one is above it, all are.",
)
one_graph.mistake(
    "maximum without the sign left out",
    {"y.abs().max()": "y.max()"},
    says="A number may be above the limit in size and negative.",
)
one_graph.mistake(
    "asks the host last",
    {
        "return torch.where(y.abs().max() > self.limit, y / 2, y)": (
            "half, over = y / 2, y.abs().max() > self.limit\n        return half if over else y"
        )
    },
    expect="it breaks",
)
one_graph.mistake(
    "each row by itself",
    {"y.abs().max()": "y.abs().amax(1, keepdim=True)"},
    says="Each row is judged by itself here: a number above the limit in any row halves all of them.",
)
one_graph.mistake("counts no longer", {"        self.calls += 1\n": ""}, expect="module.calls is 0")
one_graph.alternative(
    "a factor instead of a choice",
    {
        "return torch.where(y.abs().max() > self.limit, y / 2, y)": (
            "return y / (1 + (y.abs().amax() > self.limit).float())"
        )
    },
)

COPIES = """    for static, given in ((graph.tokens, tokens), (graph.slots, slots)):
        static[:n].copy_(given)
        static[n:].fill_(given[0])
"""


replay_step = KnownAnswers("replay-step")

replay_step.mistake(
    "bound to the name",
    {COPIES: "    more = (0,) * (graph.size - n)\n    graph.tokens = torch.cat((tokens, tokens[[*more]]))\n"
             "    graph.slots = torch.cat((slots, slots[[*more]]))\n"},
    expect="overwritten|hold its token",
)  # fmt: skip
replay_step.mistake(
    "padding left as it was",
    {"        static[n:].fill_(given[0])\n": ""},
    expect="another sequence's|hold its token",
)
replay_step.mistake(
    "padding of zeros",
    {"static[n:].fill_(given[0])": "static[n:].fill_(0)"},
    expect="another sequence's|hold its token",
)
replay_step.mistake("result not copied", {"graph.logits[:n].clone()": "graph.logits[:n]"}, expect="later replay")
replay_step.mistake("always the largest graph", {"min(size for size in graphs if size >= n)": "max(graphs)"},
        expect="takes one replay of size")  # fmt: skip
replay_step.mistake(
    "the first graph that is large enough",
    {"min(size for size in graphs if size >= n)": "next(size for size in graphs if size >= n)"},
    expect="takes one replay of size",
)
replay_step.mistake(
    "sizes taken for powers of two",
    {"min(size for size in graphs if size >= n)": "1 << (n - 1).bit_length()"},
    expect="KeyError",
)
replay_step.mistake("padding and all", {"graph.logits[:n].clone()": "graph.logits.clone()"}, expect="asks for logits")
replay_step.alternative(
    "padding repeats the last sequence", {"static[n:].fill_(given[0])": "static[n:].fill_(given[-1])"}
)


which_kernel_bug = KernelAnswers("which-kernel-bug")

which_kernel_bug.mistake(
    "a width without a tail",
    {
        "torch.ones(3, 77, dtype=torch.float16)": "torch.ones(3, 128, dtype=torch.float16)",
        "torch.full((3, 77), 2.0, dtype=torch.float16)": "torch.full((3, 128), 2.0, dtype=torch.float16)",
        "torch.full((3,), 154.0)": "torch.full((3,), 256.0)",
    },
    says="With a width that 64 divides there is no tail to read past.",
)
which_kernel_bug.mistake(
    "values only",
    {'    if trace.races:\n        return "race"\n': ""},
    says="The interpreter runs one program after the other, so a race has right values: look at the trace, with rows "
    "of more than one tile.",
)
which_kernel_bug.mistake(
    "float16 with a short row",
    {
        "torch.ones(1, 4099, dtype=torch.float16)": "torch.ones(1, 99, dtype=torch.float16)",
        "sums[0] == 4099": "sums[0] == 99",
    },
    says="Float16 sums this row without an error, as it does ones up to 2,048: take a longer one.",
)
which_kernel_bug.mistake(
    "the same numbers twice",
    {
        "torch.full((3, 77), 2.0, dtype=torch.float16)": "torch.ones(3, 77, dtype=torch.float16)",
        "torch.full((3,), 154.0)": "torch.full((3,), 77.0)",
    },
    says="A stale input gives the old answer, which is right as long as the numbers are the old ones.",
)
which_kernel_bug.alternative(
    "another long row",
    {"torch.ones(1, 4099, dtype=torch.float16)": "torch.ones(1, 4096, dtype=torch.float16)",
     "sums[0] == 4099": "sums[0] == 4096"},
)  # fmt: skip
which_kernel_bug.alternative("the races first", {
    '    if trace.outside:\n        return "missing mask"\n    if trace.races:\n        return "race"\n':
    '    if trace.races:\n        return "race"\n    if trace.outside:\n        return "missing mask"\n'})  # fmt: skip
