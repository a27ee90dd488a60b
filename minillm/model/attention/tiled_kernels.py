"""The Triton kernels of `tiled_triton`, which describes them: forward, backward by keys and backward by queries.

ADD: begin with what is there already, of other keys (the output and its log-sum-exp, or the gradient of the queries).
"""

from minillm.model.kernels import kernel, tl

_kernel = kernel("window", "queries", "keys")


@_kernel
def _load(x, row, size, head_dim, dim, FACTORS: tl.constexpr):
    """[rows, DIMS] of a [size, head_dim] matrix, zeros outside."""
    mask = (row < size)[:, None] & (dim < head_dim)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * head_dim + dim[None, :], mask=mask, other=0.0).to(FACTORS)


@_kernel
def _at(places, batch, size, tile):
    """[rows]: of a [batch, size] array of positions or of documents, what those of a tile have."""
    return tl.load(places + batch * size + tile, mask=tile < size, other=0)


@_kernel
def _queries(
    q, positions, documents, queries, heads, head_dim, DIMS: tl.constexpr, ROWS: tl.constexpr, FACTORS: tl.constexpr
):
    """The tile of queries of a program: its head and rows, their queries and where these stand, and where in a
    [batch, heads, queries, head_dim] array a result for them goes."""
    head = tl.program_id(1).to(tl.int64)
    row, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    some = _load(q + head * queries * head_dim, row, queries, head_dim, dim, FACTORS)
    q_at, q_document = _at(positions, head // heads, queries, row), _at(documents, head // heads, queries, row)
    place = (head * queries + row)[:, None] * head_dim + dim[None, :]
    inside = (row < queries)[:, None] & (dim < head_dim)[None, :]
    return head, row, dim, some, q_at, q_document, place, inside


@_kernel
def _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys):
    """[rows, columns]: which queries of a tile see which keys."""
    distance = q_at[:, None] - k_at[None, :]
    same = q_document[:, None] == k_document[None, :]
    return (distance >= 0) & (distance < window) & same & (row < queries)[:, None] & (column < keys)[None, :]


@_kernel
def _touch(q_at, k_at, row, queries, column, keys, window):
    """Whether some query of a tile may see some key of another, by the ends of both."""
    last = tl.max(tl.where(row < queries, q_at, -1))
    first = tl.min(tl.where(row < queries, q_at, 2147483647))
    key_first = tl.min(tl.where(column < keys, k_at, 2147483647))
    key_last = tl.max(tl.where(column < keys, k_at, -1))
    return (key_first <= last) & (first - key_last < window)


@_kernel
def forward(
    q,  # [batch, heads, queries, head_dim], contiguous, as all below
    k,  # [batch, kv_heads, keys, head_dim]
    v,
    out,
    lse,  # [batch, heads, queries]
    positions,  # [batch, queries], int32
    key_positions,  # [batch, keys]
    documents,  # [batch, queries]
    key_documents,  # [batch, keys]
    scale,
    window,
    queries,
    keys,
    heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
    ADD: tl.constexpr,
):
    head, row, dim, some, q_at, q_document, place, inside = _queries(
        q, positions, documents, queries, heads, HEAD_DIM, DIMS, ROWS, FACTORS
    )
    batch, kv_head = head // heads, head // GROUP
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total, values = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIMS), tl.float32)
    if ADD:  # the result over other keys counts as one key with that log-sum-exp as its score
        top = tl.load(lse + head * queries + row, mask=row < queries, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        values = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k_at = _at(key_positions, batch, keys, column)
        if _touch(q_at, k_at, row, queries, column, keys, window):
            k_document = _at(key_documents, batch, keys, column)
            block = _load(k + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            scores = tl.dot(some, tl.trans(block), input_precision="ieee") * scale
            seen = _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            pivot = tl.where(higher == float("-inf"), 0.0, higher)
            p, shrink = tl.exp(scores - pivot[:, None]), tl.exp(top - pivot)
            total = total * shrink + tl.sum(p, 1)
            block = _load(v + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            values = values * shrink[:, None] + tl.dot(p.to(FACTORS), block, input_precision="ieee")
            top = higher
    total = tl.where(total == 0.0, 1.0, total)  # a query that sees nothing: output 0, lse -inf
    tl.store(out + place, values / total[:, None], mask=inside)
    tl.store(lse + head * queries + row, top + tl.log(total), mask=row < queries)


@_kernel
def _probabilities(some, block, seen, own, scale):
    """exp(score - lse), 0 where a key is not seen. own: [rows], lse."""
    scores = tl.dot(some, tl.trans(block), input_precision="ieee") * scale
    return tl.where(seen, tl.exp(scores - tl.where(own == float("-inf"), 0.0, own)[:, None]), 0.0)


@_kernel
def backward_keys(
    q,
    k,
    v,
    d_out,
    lse,
    delta,  # [batch, heads, queries]: Σ d_out · out
    dk,
    dv,
    positions,
    key_positions,
    documents,
    key_documents,
    scale,
    window,
    queries,
    keys,
    heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    batch = kv_head // (heads // GROUP)
    column, dim = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DIMS)
    k_at, k_document = _at(key_positions, batch, keys, column), _at(key_documents, batch, keys, column)
    block = _load(k + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
    value = _load(v + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
    sum_k, sum_v = tl.zeros((COLUMNS, DIMS), tl.float32), tl.zeros((COLUMNS, DIMS), tl.float32)
    for start in range(0, queries, ROWS):
        row = start + tl.arange(0, ROWS)
        q_at = _at(positions, batch, queries, row)
        if _touch(q_at, k_at, row, queries, column, keys, window):
            q_document = _at(documents, batch, queries, row)
            seen = _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys)
            for member in range(GROUP):
                head = kv_head * GROUP + member
                some = _load(q + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
                d_rows = _load(d_out + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
                own = tl.load(lse + head * queries + row, mask=row < queries, other=0.0)
                p = _probabilities(some, block, seen, own, scale)
                sum_v += tl.dot(tl.trans(p.to(FACTORS)), d_rows, input_precision="ieee")
                dp = tl.dot(d_rows, tl.trans(value), input_precision="ieee")
                of_row = tl.load(delta + head * queries + row, mask=row < queries, other=0.0)
                ds = p * (dp - of_row[:, None]) * scale
                sum_k += tl.dot(tl.trans(ds.to(FACTORS)), some, input_precision="ieee")
    place = (kv_head * keys + column)[:, None] * HEAD_DIM + dim[None, :]
    mask = (column < keys)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(dk + place, sum_k, mask=mask)
    tl.store(dv + place, sum_v, mask=mask)


@_kernel
def backward_queries(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    dq,
    positions,
    key_positions,
    documents,
    key_documents,
    scale,
    window,
    queries,
    keys,
    heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
    ADD: tl.constexpr,
):
    head, row, dim, some, q_at, q_document, place, inside = _queries(
        q, positions, documents, queries, heads, HEAD_DIM, DIMS, ROWS, FACTORS
    )
    batch, kv_head = head // heads, head // GROUP
    d_rows = _load(d_out + head * queries * HEAD_DIM, row, queries, HEAD_DIM, dim, FACTORS)
    own = tl.load(lse + head * queries + row, mask=row < queries, other=0.0)
    of_row = tl.load(delta + head * queries + row, mask=row < queries, other=0.0)
    total = tl.zeros((ROWS, DIMS), tl.float32)
    if ADD:
        total = tl.load(dq + place, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k_at = _at(key_positions, batch, keys, column)
        if _touch(q_at, k_at, row, queries, column, keys, window):
            k_document = _at(key_documents, batch, keys, column)
            seen = _seen(q_at, k_at, q_document, k_document, window, row, queries, column, keys)
            block = _load(k + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            value = _load(v + kv_head * keys * HEAD_DIM, column, keys, HEAD_DIM, dim, FACTORS)
            p = _probabilities(some, block, seen, own, scale)
            dp = tl.dot(d_rows, tl.trans(value), input_precision="ieee")
            ds = p * (dp - of_row[:, None]) * scale
            total += tl.dot(ds.to(FACTORS), block, input_precision="ieee")
    tl.store(dq + place, total, mask=inside)
