"""Spoilers of lab 05: kv heads on the wrong ranks, all-reduces that hide nothing."""

from course.kit.exercises import KnownAnswers

# Attention

parallel_attention = KnownAnswers("parallel-attention")

parallel_attention.mistake(
    "kv-cut-like-queries",
    {
        "range(queries.start // served, (queries.stop - 1) // served + 1)": (
            "range(rank * num_kv_heads // world_size, (rank + 1) * num_kv_heads // world_size)"
        )
    },
    expect=r"kv head \d is not on that rank",
)
parallel_attention.mistake(
    "all-kv-heads-everywhere",
    {"range(queries.start // served, (queries.stop - 1) // served + 1)": "range(num_kv_heads)"},
    expect="memory for nothing",
)
parallel_attention.mistake(
    "one-enter-each",
    {
        "x = Enter.apply(x, group)": "",
        "attend(x @ q.T, x @ k.T, x @ v.T)": "attend(*(Enter.apply(x, group) @ w.T for w in (q, k, v)))",
    },
    expect="backward called 3 all_reduce",
)
parallel_attention.mistake(
    "v-without-enter",
    {"x = Enter": "inside = Enter", "x @ q.T, x @ k.T": "inside @ q.T, inside @ k.T"},
    expect="gradient of x is wrong",
)
parallel_attention.mistake(
    "leaves-twice",
    {
        "return Leave.apply(attend(x @ q.T, x @ k.T, x @ v.T) @ o.T, group)": (
            "out = Leave.apply(attend(x @ q.T, x @ k.T, x @ v.T) @ o.T, group)\n    return Leave.apply(out, group)"
        )
    },
    expect="the output is wrong",
)
parallel_attention.alternative(
    "qkv-in-one",
    {
        "attend(x @ q.T, x @ k.T, x @ v.T)": (
            "attend(*(x @ torch.cat((q, k, v)).T).split([len(q), len(k), len(v)], dim=1))"
        )
    },
)

# The overlapped input gradient

overlapped_input_gradient = KnownAnswers("overlapped-input-gradient")

overlapped_input_gradient.mistake(
    "blocks",
    {
        "handle = ctx.group.all_reduce(x_gradient, async_op=True)": "ctx.group.all_reduce(x_gradient)",
        "handle.wait()": "",
    },
    expect="async_op=True returns a handle at once",
)
overlapped_input_gradient.mistake(
    "weight-first",
    {
        "        weight_gradient = gradient.T @ x\n": "",
        "x_gradient = gradient @ weight": "weight_gradient = gradient.T @ x\n        x_gradient = gradient @ weight",
    },
    expect="nothing left to compute beside it",
)
overlapped_input_gradient.mistake(
    "waits-at-once",
    {"async_op=True)": "async_op=True).wait()", "        handle.wait()\n": ""},
    expect="compute dW before the wait",
)
overlapped_input_gradient.mistake(
    "reduces-the-weight",
    {"gradient.T @ x": "ctx.group.all_reduce(gradient.T @ x)"},
    expect="it stays on this rank, unreduced",
)
overlapped_input_gradient.mistake(
    "no-reduction",
    {"handle = ctx.group.all_reduce(x_gradient, async_op=True)": "", "handle.wait()": ""},
    expect="this rank's share alone",
)
overlapped_input_gradient.mistake(
    "gathers-the-output",
    {"return x @ weight.T": "group.all_gather(x @ weight.T)\n        return x @ weight.T"},
    expect="which stay here",
)
overlapped_input_gradient.mistake(
    "computes-dw-again",
    {
        "weight_gradient = gradient.T @ x": "gradient.T @ x  # hides the all-reduce and is thrown away",
        "handle.wait()": "handle.wait()\n        weight_gradient = gradient.T @ x",
    },
    expect="is computed 2 times",
)
overlapped_input_gradient.mistake(
    "saved-in-the-class",
    {"ctx.save_for_backward(x, weight)": "ColumnLinear.saved = x, weight", "ctx.saved_tensors": "ColumnLinear.saved"},
    expect="keep x, weight and group in ctx",
)
overlapped_input_gradient.alternative(
    "dx-in-two-halves",
    {
        "x_gradient = gradient @ weight": (
            "middle = len(gradient) // 2\n"
            "        x_gradient = torch.cat([gradient[:middle] @ weight, gradient[middle:] @ "
            "weight])"
        )
    },
)
