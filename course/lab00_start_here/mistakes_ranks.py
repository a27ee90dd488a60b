"""Spoilers of lab 00: wrong and right ways to average over ranks and to read a ledger."""

from course.kit.exercises import KnownAnswers

# The first rank program

first_rank_program = KnownAnswers("first-rank-program")

first_rank_program.mistake(
    "sum-not-mean", {" / group.world_size": ""}, says="This is the sum over the ranks: divide it by group.world_size."
)
first_rank_program.mistake(
    "own-x",
    {"group.all_reduce(mean)": "", " / group.world_size": ""},
    says="This is the rank's own x: nothing came from the other ranks.",
)
first_rank_program.mistake(
    "divides-by-4",
    {"group.world_size": "4"},
    says="You divided by 4 on every group; group.world_size is the number of ranks, and the check runs 3 as well.",
)
first_rank_program.mistake(
    "mean-over-elements", {"x.clone()": "x.mean()"}, expect=r"\[\] float32, but the exercise asks for the mean, as many"
)
first_rank_program.mistake(
    "returns-nothing",
    {"return mean / group.world_size": "mean /= group.world_size"},
    expect=r"nothing \(None\): is there a return",
)
first_rank_program.mistake(
    "never-waits",
    {
        "group.all_reduce(mean)\n    return mean / group.world_size": (
            "return group.all_reduce(mean / group.world_size, async_op=True)"
        )
    },
    expect="goes on before it is over: call wait",
)
first_rank_program.mistake(
    "does-not-wait", {"(mean)": "(mean, async_op=True)"}, expect="goes on before it is over: call wait"
)
first_rank_program.mistake(
    "one-axis-more", {"/ group.world_size": "[None] / group.world_size"}, expect="asks for a tensor"
)
first_rank_program.mistake("float32", {"x.clone()": "x.float().clone()"}, expect="here .7. float64")
first_rank_program.mistake("destroys-input", {"x.clone()": "x"}, expect=r"changed its input .x.*clone")
first_rank_program.mistake(
    "only-rank-0",
    {"group.all_reduce(mean)": "if group.rank == 0:\n        group.all_reduce(mean)"},
    expect="wait for each other for ever",
)
first_rank_program.mistake(
    "gathers",
    {"x.clone()": "group.all_gather(x).view(group.world_size, -1).sum(0)", "group.all_reduce(mean)": ""},
    expect="1 × all_gather: one all_reduce",
)
first_rank_program.mistake(
    "divides-own-x",
    {"group.all_reduce(mean)": ""},
    says="This is the rank's own x divided by the number of ranks: the other ranks' x are missing.",
)
first_rank_program.mistake(
    "divides-twice", {"(mean)": '(mean, op="avg")'}, says="The mean was divided by the number of ranks once more."
)
first_rank_program.mistake(
    "element-by-element",
    {"group.all_reduce(mean)": "for piece in mean.split(4):\n        group.all_reduce(piece)"},
    expect="\\d+ × all_reduce: one all_reduce of the whole tensor",
)
first_rank_program.mistake(
    "torch-distributed",
    {"group.all_reduce(mean)": "torch.distributed.all_reduce(mean, group=group.process_group)"},
    expect="recorded no operation of `group`",
)
first_rank_program.alternative("op-avg", {"(mean)": '(mean, op="avg")', " / group.world_size": ""})


@first_rank_program.alternative("divide-first")
def divides_first(group, x):
    handle = group.all_reduce(x / group.world_size, async_op=True)
    return handle.wait()


# Reading a receipt

read_a_receipt = KnownAnswers("read-a-receipt")


@read_a_receipt.mistake("trusts-values", expect="you call it 'fine', but it is '(silent|chatty|wasteful)'")
def trusts_values(led, num_bytes, world_size):
    return "fine"


read_a_receipt.mistake(
    "expects-one-copy",
    {"2 * num_bytes * (world_size - 1) / world_size": "num_bytes"},
    expect="you call it 'wasteful', but it is '(fine|chatty)'",
)
read_a_receipt.mistake(
    "counts-messages", {"led.calls.total()": "led.messages"}, expect=r"'chatty', but it is 'fine'(.*)in \d messages"
)
read_a_receipt.mistake(
    "all-ranks-together", {" / world_size": ""}, expect="you call it '(fine|chatty)', but it is 'wasteful'"
)
read_a_receipt.mistake(
    "bytes-only",
    {'"chatty" if led.calls.total() > 1 else "fine"': '"fine"'},
    expect="you call it 'fine', but it is 'chatty'",
)
read_a_receipt.mistake(
    "four-ranks-always",
    {"2 * num_bytes * (world_size - 1) / world_size": "1.5 * num_bytes"},
    expect="but it is '(fine|chatty)': 5|but it is 'wasteful': [23] ranks",
)
read_a_receipt.mistake(
    "one-limit-for-all",
    {"2 * num_bytes * (world_size - 1) / world_size": "1.75 * num_bytes"},
    expect="but it is 'wasteful': [235] ranks",
)


@read_a_receipt.mistake("calls-before-bytes", expect="you call it 'chatty', but it is 'wasteful'")
def asks_for_calls_first(led, num_bytes, world_size):
    if led.calls.total() != 1:
        return "chatty" if led.calls else "silent"
    return "wasteful" if led.bytes() > 2 * num_bytes * (world_size - 1) / world_size else "fine"


@read_a_receipt.mistake("by-name", expect="you call it '(fine|chatty)', but it is 'wasteful'")
def asks_for_names(led, num_bytes, world_size):
    verdicts = {(): "silent", ("all_gather",): "wasteful", ("all_reduce",): "fine"}
    return "chatty" if led.calls["all_reduce"] > 1 else verdicts[tuple(led.calls)]


read_a_receipt.mistake("own-words", {'"fine"\n': '"ok"\n'}, expect="the answer is one of fine, silent")


read_a_receipt.mistake(
    "limits-by-table",
    {"2 * num_bytes * (world_size - 1) / world_size": "num_bytes * (1.6 if world_size == 5 else 4 / 3)"},
    expect="but it is 'wasteful': 2 ranks",
)
read_a_receipt.mistake(
    "ten-percent-more-is-fine", {"> 2 * num_bytes": "> 2.2 * num_bytes"}, expect="'(fine|chatty)', but it is 'wasteful'"
)


@read_a_receipt.alternative("beside-the-fewest-bytes")
def in_parts_of_the_fewest_bytes(led, num_bytes, world_size):
    share = led.bytes() * world_size / (2 * num_bytes * (world_size - 1))
    return "silent" if not share else "wasteful" if share > 1.01 else ("fine", "chatty")[sum(led.calls.values()) > 1]
