# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 25 · Kernels and compilation
#
# **A kernel that is not limited by arithmetic takes as long as its bytes or as its launch, and fusing two kernels saves
# both.**
# Stands on lab 00 (the roofline) and lab 12 (decode is memory); lab 13 for the paged cache.
#
# The core path, exercises 1, 2, 4, 5, 7 and 9, takes two hours; all nine take three and a quarter, with the questions
# at the end four. Running the notebook from top to bottom takes about a minute. At the end you can answer:
#
# 1. How many bytes does a kernel move, and what does fusing two of them save?
# 2. What does a compiler make of a block, what stops it, and what makes it start again?
# 3. Why does a decode step want a recorded graph, and what must hold for a replay to be right?
#
# > **Common claims**
# >
# > - *"Fusing bias and ReLU saves 40 % of the time."* Two of five passes over memory, if the bias is as large as its
# >   input. A row of biases stays in a cache, and then it is two of four (section 1).
# > - *"Softmax needs three passes."* Maximum, sum and quotient; but the first two fit into one
# >   ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867); section 2).
# > - *"Compiled code is faster."* After the first call, and as long as no guard fails (section 5).
#
# Kernels are written in [Triton](https://triton-lang.org/main/getting-started/tutorials/index.html) and run in its
# interpreter, on any Linux machine. It gives right values and no times; times come from torch's compiler on the CPU.
# Where Triton or a C++ compiler is missing, a cell says so and goes on.

# %%
import inspect

import torch
from torch import nn

from course.kit import check, finish, hint, show, sliders
from course.lab25_kernels import experiments, figures, receipts
from course.shared.kernels import INSTALLED, left_out
from minillm.model.kernels import tl  # triton.language; None where Triton is not installed
from minillm.serve.run.decode_graphs import DecodeGraphs

# %% [markdown]
# ## Predict
#
# Write down four guesses; they come back beside the answers.

# %%
guess_same = 2.0  # times faster: relu(x + b) as one kernel instead of two, b as large as x
guess_launches = 12  # kernels of one decoding layer in plain torch
guess_matmul = 1.0  # times fewer bytes: tiles of 128 x 128 instead of 32 x 32
# Sequences of 1,024 tokens from which an 8B decode step in plain torch on an H100 waits for
# no launch, at 15 µs a launch:
guess_full_graph = 64

# %% [markdown]
# ## 1 · Bytes
#
# A GPU's numbers lie on a ladder. Between two kernels what does not fit into the L2 cache goes down to HBM and back;
# inside a kernel it can stay in registers.

# %%
show(figures.ladder)

# %% [markdown]
# `torch.relu(x + b)` is two kernels. The first reads x and b and writes a temporary array, the second reads that and
# writes the result: five passes over memory. Fused, it is three. If b is one row that all rows of x share, it stays in
# a cache: four passes and two.
#
# Measured on one thread of this machine, 64 MB an array, everything written into arrays that exist already. The roof is
# `torch.add` on the same arrays, and the compiler is torch's own (Inductor, which writes C++ here).

# %%
measured_fusion = experiments.fusion()
receipts.fusion(measured_fusion, guess_same)

# %% [markdown]
# A CPU fetches a line before it overwrites it, so a write may cost a read as well. Of the two kernels only the first
# pays that: the second overwrites its input in place, whose lines are already fetched. So the ratios of time are 6/4
# and 5/3 instead of 5/3 and 2. A GPU writes whole sectors without reading them.


# %%
def two_kernels_or_one():
    """Times of relu(x + b) as two kernels and as one, beside the roof."""
    return figures.draw_fusion(measured_fusion)


show(two_kernels_or_one)

# %% [markdown]
# ### Exercise 1 · bias and ReLU in one kernel (15 minutes)
#
# A launch starts many *programs*, each of which computes a tile. A program sees no tensors but addresses: `tl.load(x +
# offsets, mask=..., other=0.0)` reads the numbers at these offsets from the first one. Where the mask is false it reads
# nothing and gives `other`; without `other` it may give anything. Offsets are made of `tl.program_id(0)` and
# `tl.arange(0, BLOCK)`. Names in capitals are compile-time constants.
#
# n is rarely a multiple of BLOCK, and what lies behind the end belongs to somebody else.


# %%
def bias_relu(x, bias, y, n, width, BLOCK):
    """Program p: y[i] = max(0, x[i] + bias[i % width]) for BLOCK numbers from p · BLOCK on, as far
    as there are any. x, y: n numbers; bias: `width` numbers. BLOCK is a power of two."""
    # BEGIN SOLUTION
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    shifted = (
        tl.load(x + place, mask=inside, other=0.0)
        + tl.load(bias + place % width, mask=inside, other=0.0)  # the same row again and again
    )
    tl.store(y + place, tl.maximum(shifted, 0.0), mask=inside)
    # END SOLUTION


bias_relu = check("bias-relu", bias_relu) if INSTALLED else left_out()

# %% [markdown]
# In its own file such a kernel carries `@triton.jit`, and BLOCK the annotation `tl.constexpr`; the check adds both. It
# also traces every load and store, which gives the bytes that it moves:

# %%
receipts.traced_bias(bias_relu)

# %% [markdown]
# How long should it take? A kernel of n numbers takes its bytes divided by the bandwidth, and no less than its launch.

# %%
show(figures.time_by_size)

# %%
sliders(figures.time_by_size, launch_us=(1.0, 10.0), passes=(2, 8))

# %% [markdown]
# ## 2 · Rows
#
# ### Exercise 2 · softmax of rows of any width (20 minutes)
#
# One program per row, in tiles of BLOCK, because a row may be wider than what a program can hold. Read each number
# twice at most: once for the maximum and the sum *together*, once for the result. When a tile brings a higher maximum,
# what was summed so far shrinks by exp(old - new). Compute in float32, whatever x holds.


# %%
def softmax_rows(x, y, x_row, width, BLOCK):
    """Program r: y[r] = softmax of row r. x: rows of `width` numbers, x_row numbers from one row's
    start to the next's; y: [rows, width], contiguous, x's dtype. x may hold -inf, but no row of
    nothing else."""
    # BEGIN SOLUTION
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        value = tl.load(
            x + row * x_row + start + lane,
            mask=inside,
            other=float("-inf"),
        ).to(tl.float32)
        higher = tl.maximum(largest, value)
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - pivot) + tl.exp(value - pivot)
        largest = higher
    top = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - top), 0)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        value = tl.load(
            x + row * x_row + start + lane,
            mask=inside,
            other=float("-inf"),
        ).to(tl.float32)
        tl.store(y + row * width + start + lane, tl.exp(value - top) / total, mask=inside)
    # END SOLUTION


softmax_rows = check("softmax-rows", softmax_rows) if INSTALLED else left_out()

# %% [markdown]
# ### Exercise 3 · RMSNorm, forward and backward (30 minutes, skip on a first reading)
#
# y = w · x · r with r = 1 / √(mean(x²) + eps) of each row. With x̂ = x · r and g = dy · w, all computed in float32 and
# rounded to x's dtype once, by the store:
#
#     dx = r · (g - x̂ · mean(g · x̂))          dw = Σ over rows of dy · x̂
#
# The sum for dw crosses rows, so it crosses programs. Two programs that add to the same address lose one of the two
# additions now and then. So program p adds up its own ROWS rows and writes row p of `partial`; summing these rows is a
# second, small kernel.


# %%
def norm_forward(x, weight, y, r, width, eps, BLOCK):
    """Program i: row i of y and r[i], float32. x, y: [rows, width]; weight: [width]; BLOCK is at
    least width."""
    # BEGIN SOLUTION
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    inside = lane < width
    value = tl.load(x + row * width + lane, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    factor = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + lane, value * scale * factor, mask=inside)
    tl.store(r + row, scale)
    # END SOLUTION


def norm_backward(dy, x, weight, r, dx, partial, rows, width, ROWS, BLOCK):
    """Program p: dx of rows p · ROWS up to (p + 1) · ROWS, as far as there are any, and row p of
    partial, [programs, width], float32: the sum of dy · x̂ over these rows."""
    # BEGIN SOLUTION
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    inside = lane < width
    factor = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(ROWS):
        row = program * ROWS + step
        there = inside & (row < rows)
        scale = tl.load(r + row, mask=row < rows, other=0.0)
        normed = tl.load(x + row * width + lane, mask=there, other=0.0).to(tl.float32) * scale
        given = tl.load(dy + row * width + lane, mask=there, other=0.0).to(tl.float32)
        mean = tl.sum(given * factor * normed, 0) / width
        tl.store(dx + row * width + lane, scale * (given * factor - normed * mean), mask=there)
        total += given * normed
    tl.store(partial + program * width + lane, total, mask=inside)
    # END SOLUTION


norm_forward, norm_backward = (
    # one check for both
    check("norm-kernels", (norm_forward, norm_backward)) if INSTALLED else left_out(2)
)

# %% [markdown]
# ## 3 · Products
#
# ### Exercise 4 · a product in tiles (20 minutes)
#
# Program (i, j) computes a tile of C: it walks along k, loads a tile of A and one of B, and adds `tl.dot(a, b)`. The
# sum stays in float32 until the end, even if A and B are float16. Strides say where element (row, column) lies, so a
# transposed matrix needs no copy. For one tile, read no number twice: mask rows and columns past the end, too.


# %%
def matmul_tiles(a, b, c, m, n, k, a_row, a_column, b_row, b_column, M, N, K):
    """Program (i, j): tile (i, j), M x N, of C = A B. A: [m, k], B: [k, n], at any strides; C:
    [m, n], contiguous, of A's dtype. Tiles of A are M x K, those of B K x N."""
    # BEGIN SOLUTION
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        a_inside = (row[:, None] < m) & (inner[None, :] < k)
        b_inside = (inner[:, None] < k) & (column[None, :] < n)
        left = tl.load(
            a + row[:, None] * a_row + inner[None, :] * a_column,
            mask=a_inside,
            other=0.0,
        )
        right = tl.load(
            b + inner[:, None] * b_row + column[None, :] * b_column,
            mask=b_inside,
            other=0.0,
        )
        total += tl.dot(left, right)
    inside = (row[:, None] < m) & (column[None, :] < n)
    tl.store(c + row[:, None] * n + column[None, :], total, mask=inside)
    # END SOLUTION


matmul_tiles = check("matmul-tiles", matmul_tiles) if INSTALLED else left_out()

# %% [markdown]
# Which tile is best? First a model: A is read once for each *column* of tiles, B once for each *row* of them. Larger
# tiles read less, and leave fewer programs to share among 132 units. *Autotuning* measures a few candidates and keeps
# the quickest for each shape. The trace has the bytes; times appear where a GPU is.

# %%
receipts.tiles(matmul_tiles, guess_matmul)

# %% [markdown]
# ## 4 · Launches
#
# The kernels of one decoding layer, before and after minillm's fusing. Products are joined where they share an input,
# and what lies between them becomes one kernel each.

# %%
receipts.layer(guess_launches)

# %%
receipts.layer_table()

# %% [markdown]
# With few sequences a layer's bytes are its weights, and fusing leaves them as they are. What it saves is launches.
#
# ### Exercise 5 · what lies between the products (20 minutes)
#
# The rotary embedding turns dimension d of a head together with d + half: with cos and sin of this token,
#
#     y[d] = x[d] · cos[d] - x[d + half] · sin[d]         y[d + half] = x[d + half] · cos[d] + x[d] · sin[d]
#
# The gate is silu(gate) · up with silu(z) = z / (1 + exp(-z)). Both read views of one fused product, so rows lie apart
# by more than their width. Read every number once and compute in float32: only the store rounds.


# %%
def rotate(x, cos, sin, y, x_row, heads, half, BLOCK):
    """Program (token, head). x: a token's heads one after the other, 2 · half numbers each, and
    x_row numbers from token to token; cos, sin: [tokens, half]; y: [tokens, heads, 2 · half],
    contiguous; BLOCK >= half."""
    # BEGIN SOLUTION
    token, head, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    inside = lane < half
    source, target = x + token * x_row + head * 2 * half, y + (token * heads + head) * 2 * half
    first = tl.load(source + lane, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + lane, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + lane, mask=inside, other=0.0)
    s = tl.load(sin + token * half + lane, mask=inside, other=0.0)
    tl.store(target + lane, first * c - second * s, mask=inside)
    tl.store(target + half + lane, second * c + first * s, mask=inside)
    # END SOLUTION


def gate(both, y, width, BLOCK):
    """Program (row, tile). both: [rows, 2 · width], a row's gates and then its ups; y:
    [rows, width], contiguous: silu(gate) · up."""
    # BEGIN SOLUTION
    row, lane = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    z = tl.load(both + row * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + lane, z * tl.sigmoid(z) * up, mask=inside)
    # END SOLUTION


rotate, gate = check("between-products", (rotate, gate)) if INSTALLED else left_out(2)

# %% [markdown]
# ### Exercise 6 · a paged decode step (30 minutes, skip on a first reading)
#
# One program per sequence and *key-value head*. Its GROUP query heads read the same keys, so load each key once, for
# all of them: scores are a tile [GROUP, SIZE]. Block b of a sequence's table holds SIZE keys; only the first
# `lengths[s]` places of sequence s are its own. Scores may be far from 0, all of them and to either side.


# %%
def paged_decode(q, keys, values, table, lengths, y, scale, most, GROUP, KV_HEADS, SIZE, DIM):
    """Program (s, h): attention of query heads h · GROUP up to (h + 1) · GROUP of sequence s over
    its lengths[s] keys (1 or more). q, y: [sequences, KV_HEADS · GROUP, DIM]; keys, values:
    [blocks, SIZE, KV_HEADS, DIM]; table: [sequences, most], int64. Float32, contiguous; GROUP, SIZE
    and DIM are powers of two; scores are multiplied by `scale`."""
    # BEGIN SOLUTION
    sequence, head = tl.program_id(0), tl.program_id(1)
    context, dim, place = tl.load(lengths + sequence), tl.arange(0, DIM), tl.arange(0, SIZE)
    rows = (sequence * KV_HEADS + head) * GROUP + tl.arange(0, GROUP)
    query = tl.load(q + rows[:, None] * DIM + dim[None, :]) * scale
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total, weighted = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP, DIM], tl.float32)
    for block in range(0, tl.cdiv(context, SIZE)):
        filled = block * SIZE + place < context
        slot = tl.load(table + sequence * most + block) * SIZE + place
        at = (slot * KV_HEADS + head)[:, None] * DIM + dim[None, :]
        key = tl.load(keys + at, mask=filled[:, None], other=0.0)
        value = tl.load(values + at, mask=filled[:, None], other=0.0)
        scores = tl.sum(query[:, None, :] * key[None, :, :], 2)
        scores = tl.where(filled[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + tl.sum(weights[:, :, None] * value[None, :, :], 1)
        largest = higher
    tl.store(y + rows[:, None] * DIM + dim[None, :], weighted / total[:, None])
    # END SOLUTION


paged_decode = check("paged-decode", paged_decode) if INSTALLED else left_out()

# %% [markdown]
# ## 5 · What a compiler does
#
# `torch.compile` runs your Python once with tensors that only record (Dynamo), which gives a *graph* of operations, and
# *guards*: everything that it took for constant, such as dtypes, sizes and attributes. The graph is simplified: what
# nobody reads is dropped, what is computed twice is shared. Then it is cut into fused kernels, and each is written as
# C++ or Triton (Inductor), which also chooses the layout of what lies between them and their order. Types of inputs and
# results stay as you wrote them, and large products go to the vendor's library. Later calls check the guards and run
# what is there. Where Python needs a value that only the data knows, the graph *breaks*; where a guard fails, it is
# compiled *again*.


# %%
def block(x, weight, bias):
    """A norm, a gate and a residual."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    return x + torch.sigmoid(normed + bias) * normed


compiled_block = experiments.compile_and_read(block)
receipts.compiled(compiled_block)

# %% [markdown]
# The first call here is that of a machine that has compiled nothing yet. torch keeps what it compiled on disk, so a
# second start is quicker, where that folder survives (`TORCHINDUCTOR_CACHE_DIR`). A new replica in a container often
# begins with an empty one: warm it up before it takes requests. The guards on the arguments:

# %%
print("\n".join(compiled_block.guards[:6]))

# %% [markdown]
# ### Exercise 7 · one graph, compiled once (20 minutes)
#
# This block breaks the graph at each call, and is compiled again at each call until torch gives up (after
# `torch._dynamo.config.recompile_limit` times) and runs it uncompiled. Why, in each case?


# %%
class Slow(nn.Module):
    """Linear; halves the result if some |number| of it is above `limit`; counts its calls."""

    def __init__(self, width, limit):
        super().__init__()
        self.linear, self.limit, self.calls = nn.Linear(width, width), limit, 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        if y.abs().max().item() > self.limit:
            y = y / 2
        return y


receipts.graphs_of(Slow)

# %% [markdown]
# The first call gives two graphs, before and after the break. Each later call compiles the first part anew, and call 3,
# the first to take the other branch, also the second.
#
# Write the same block so that torch.compile makes one graph of it, once and without a break (`fullgraph=True`), for any
# number of rows from 2 on. The check compiles with `torch.compile(module, dynamic=True)`, so sizes are symbols from the
# first call; by default a second size costs one more graph. Even so a size of 1 is a constant, and two sizes that are
# equal in the first call are one symbol, so the check begins with no square.


# %%
class Steady(nn.Module):
    """As `Slow`: int(module.calls) is the number of this block's calls, and the parameters keep
    their names."""

    def __init__(self, width, limit):
        super().__init__()
        # BEGIN SOLUTION
        self.linear, self.limit = nn.Linear(width, width), limit
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        # END SOLUTION

    def forward(self, x):
        # BEGIN SOLUTION
        self.calls += 1
        y = self.linear(x)
        return torch.where(y.abs().max() > self.limit, y / 2, y)
        # END SOLUTION


Steady = check("one-graph", Steady)

# %% [markdown]
# ## 6 · A recorded step
#
# The host needs some microseconds for each launch: the driver 3 to 5, Python and torch's dispatcher more. A *CUDA
# graph* records the launches of a whole step once and replays them with one call. By formula, with 15 µs assumed for a
# launch:

# %%
show(figures.step_by_batch)

# %%
sliders(figures.step_by_batch, launch_us=(1.0, 20.0), context=[128, 1024, 4096])

# %%
receipts.graph_pays(guess_full_graph)

# %% [markdown]
# A replay repeats the very kernels with the very addresses. So inputs are *copied into* the arrays that were recorded;
# sizes are fixed, so a step is padded to a recorded size; and the next replay overwrites the result. Nothing recorded
# may wait for the host, allocate outside the graph's memory, or depend on a value that the host looks up.
#
# ### Exercise 8 · replay a decode step (20 minutes, skip on a first reading)
#
# `graphs[size]` has `tokens` and `slots`, [size] each, `logits`, [size, vocabulary], and `replay()`. Replaying writes
# the key of every token to its slot of the cache, padding included. What can padding hold, so that no other sequence's
# key is overwritten?


# %%
def replay_step(graphs, tokens, slots):
    """graphs: recorded steps by size, any sizes in any order; tokens, slots: [n], int64, one for
    each sequence, n >= 1 and at most the largest size -> logits, [n, vocabulary], which stay as
    they are when the next step runs. Replays the smallest graph that is large enough, once."""
    # BEGIN SOLUTION
    n = len(tokens)
    graph = graphs[min(size for size in graphs if size >= n)]
    for static, given in ((graph.tokens, tokens), (graph.slots, slots)):
        static[:n].copy_(given)
        static[n:].fill_(given[0])
    graph.replay()
    return graph.logits[:n].clone()
    # END SOLUTION


replay_step = check("replay-step", replay_step)

# %% [markdown]
# ## Break it
#
# ### Exercise 9 · which test finds which bug? (20 minutes)
#
# Six programs A to F each sum the rows of a matrix, which is cut into tiles of 64 numbers: `program(x)` returns (sums,
# trace). x is float16, [rows, width], of any size that you like; sums are float32; `trace.outside` and `trace.races`
# list what the launch did wrong, if anything. Four contain a bug:
#
# - missing mask: the tail of a row is read past its end
# - race: programs add to one number without an atomic operation
# - stale input: a recorded step that reads the tensor it was recorded with
# - float16 sum: the sum is kept in float16
#
# In the interpreter most of them give right values on most inputs. Write the tests that tell them apart.


# %%
def verdict(program):
    """-> "right", "missing mask", "race", "stale input" or "float16 sum"."""
    # BEGIN SOLUTION
    _, trace = program(torch.ones(3, 77, dtype=torch.float16))
    if trace.outside:
        return "missing mask"
    if trace.races:
        return "race"
    sums, _ = program(torch.full((3, 77), 2.0, dtype=torch.float16))
    if not torch.equal(sums, torch.full((3,), 154.0)):
        return "stale input"
    sums, _ = program(torch.ones(1, 4099, dtype=torch.float16))
    return "right" if sums[0] == 4099 else "float16 sum"
    # END SOLUTION


verdict = check("which-kernel-bug", verdict) if INSTALLED else left_out()

# %%
receipts.programs(verdict)

# %% [markdown]
# <details><summary>Answer</summary>
#
# - **A: missing mask.** Its sums are right at every width, since it drops what it read too much. The last row reads
#   past the end of the array, which on a GPU may be memory that belongs to nobody. Only `trace.outside` tells, and only
#   if 64 does not divide the width.
# - **B** is right: each program sums a row of its own, in float32.
# - **C: race.** The interpreter runs programs one after the other, so its sums are right. On a GPU additions get lost,
#   more often the more programs run. Only the trace tells, and only if a row has more than one tile.
# - **D: stale input.** Its first answer is right, and so is every later one for the same values.
# - **E: float16 sum.** From 2,048 on float16 cannot add 1. Rows whose partial sums float16 holds, such as up to 2,048
#   ones, hide it; the rows of the table, of random numbers, show it.
# - **F** is right: `tl.atomic_add` in place of the racing store. Its order changes from run to run on a GPU, and with
#   it the last bits.
# </details>
#
# ## Where it loses
#
# Fusing and compiling gain where memory or launches were the limit. They gain nothing on large products, which are
# limited by arithmetic. They lose on tiny tensors, where entering compiled code costs more than the work, and on the
# first call.

# %%
receipts.where_it_loses(experiments.losing())

# %% [markdown]
# ## The same in production
#
# | here | elsewhere |
# |---|---|
# | a kernel, `@triton.jit` | the same; CUDA C++ where Triton's tiles do not fit; vendor libraries for plain products |
# | `torch.compile(block)` | `torch.compile(model)`; vLLM 0.13 compiles by default (`--enforce-eager` turns it off) |
# | recorded sizes 1, 2, 4, 8, 16, 32, 48 ... | vLLM 0.13 `--cudagraph-capture-sizes`, `--max-cudagraph-capture-size`; SGLang `--cuda-graph-max-bs-decode` (`--cuda-graph-max-bs` until June 2026) |
# | three tile sizes, measured on a GPU | `@triton.autotune`, `torch.compile(mode="max-autotune")` |
# | `trace.outside` | `compute-sanitizer --tool memcheck` |
# | `trace.races` | none: `racecheck` sees shared memory only. Run twice and compare bits; look for stores without `tl.atomic_*` |
#
# Sources: [vLLM's compilation settings](https://docs.vllm.ai/en/v0.13.0/api/vllm/config/compilation/) and
# [the change of their flags](https://github.com/vllm-project/vllm/pull/26016),
# [SGLang's change of name](https://github.com/sgl-project/sglang/pull/29591),
# [Compute Sanitizer](https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer).
#
# minillm's own kernels are in `minillm/model/elementwise_triton.py` (exercise 5), `minillm/model/paged/triton.py`
# (exercise 6, with the keys split) and `minillm/serve/run/decode_graphs.py` (exercise 8):

# %%
print(inspect.getsource(DecodeGraphs._fill))

# %% [markdown]
# ## On a GPU
#
# This lab has no ranks, so there is nothing for `torchrun`. `python -m minillm bench kernels` puts each kernel beside
# torch and torch.compile: on a CPU those that compile there, on a GPU all of them with device time.
#
# ## Interview corner
#
# Say your answer aloud before you open one.
#
# **1. relu(x + b) on an H100, 2²⁶ numbers in bfloat16. How long, fused and not?**
# <details><summary>Answer</summary>
#
# An array is 134 MB. Two kernels move five of them, 671 MB, 0.20 ms at 3.35 TB/s; one kernel moves three, 0.12 ms. If b
# is a row: four and two arrays, 0.16 and 0.08 ms. Its 134 million operations in 0.12 ms are a sixtieth of the 67
# TFLOP/s in float32 that the card can do without tensor cores.
# </details>
#
# **2. When is it not worth fusing?**
# <details><summary>Answer</summary>
#
# Where what lies between two kernels costs little beside their arithmetic, and fusing would recompute it or keep so
# much per program that fewer programs fit on a unit: two large products in a row. A product's bias is worth it: the
# library adds it to a tile that is still in registers.
# </details>
#
# **3. Your compiled model is slow in production and fast in the benchmark. What do you look at?**
# <details><summary>Answer</summary>
#
# Recompilations: `TORCH_LOGS=recompiles` names the guard that failed, most often a size or a number in Python that
# changes. Then graph breaks (`TORCH_LOGS=graph_breaks`), and the first calls after a start. *Follow-up:* mark sizes as
# dynamic, keep counters in tensors, warm up before the replica is ready.
# </details>
#
# **4. A replayed graph returns last step's tokens. Why?**
# <details><summary>Answer</summary>
#
# The new input was bound to the name, not copied into the recorded array. (A result that is not copied goes wrong the
# other way: it becomes the next step's.)
# </details>
#
# **5. Why does flash attention count as fusing?**
# <details><summary>Answer</summary>
#
# Product, softmax and product become one kernel, and the [n, n] scores are never written. Online softmax (exercise 2)
# is what makes it possible: a tile needs no maximum of the whole row.
# </details>
#
# ### Design questions
#
# **D1. A replica of the 8B model decodes 8 sequences of 1,024 tokens on an H100 in plain torch. Give the bound by bytes
# and by launches, and say what you would change first.**
#
# **D2. An element-wise kernel reaches 40 % of the bandwidth. Name four causes, and the measurement that tells them
# apart.**

# %%
receipts.design()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: weights and caches are read in 4.8 ms. Plain torch launches 25 kernels a layer, 801 with the head alone, 12 ms at
# 15 µs: the host is the limit. Fusing brings that to 6.7 ms, which is still above. A recorded graph takes the host out
# of the step, with or without fusing, so it comes first. After that only fewer bytes a token help: 8-bit weights, or
# more sequences per step.
#
# D2: too few numbers (time by size: is it the launch?); accesses that lie apart (sectors per request in the profiler);
# too few programs or loads in flight (occupancy); more bytes than counted (DRAM bytes in the profiler beside the
# formula).
# </details>
#
# ### Capstone (open)
#
# Write the whole MLP of a decoding layer (product, gate, product) as two kernels that never write gate and up to
# memory. Which tile sizes does it allow, how many bytes does it save at 1 and at 64 sequences, and where does it lose
# against two library products? Predict first, and defend the numbers in half a page.
#
# ## Can you answer them now?
#
# 1. How many bytes does a kernel move, and what does fusing two of them save?
# 2. What does a compiler make of a block, what stops it, and what makes it start again?
# 3. Why does a decode step want a recorded graph, and what must hold for a replay to be right?
#
# This was the last lab. `python -m minillm progress` shows which exercises are left, and the [course map](../README.md)
# what each lab is about.

# %%
finish("25_kernels")
