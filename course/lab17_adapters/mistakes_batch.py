"""Spoilers of lab 17, many adapters: rows that do not go back, products that are too many, keys that are too short."""

import hashlib

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("17_adapters")

# One batch.

grouped_adapters = KnownAnswers("grouped-adapters")

grouped_adapters.mistake("none is the last adapter", {"if number >= 0:": "if True:"}, expect="number -1, no adapter")
grouped_adapters.mistake(
    "sorted rows are not put back",
    {"return y\n": "return y[order]\n"},
    expect="have to go back to where they came from",
)
grouped_adapters.mistake(
    "no scale",
    {"y[rows] += scale * ((x[rows] @ A.T) @ B.T)": "y[rows] += (x[rows] @ A.T) @ B.T"},
    says="The adapters' scales are missing.",
)
grouped_adapters.mistake(
    "numbers of groups instead of adapters",
    {"for number, rows in zip(numbers.tolist(), order": "for number, rows in zip(range(len(numbers)), order"},
    says="Groups were numbered in their order; which adapter a group has is what `which` says.",
)
grouped_adapters.mistake(
    "the last group is lost",
    {"zip(numbers.tolist(), order.split(counts.tolist()), strict=True)":
     "list(zip(numbers.tolist(), order.split(counts.tolist()), strict=True))[:-1]"},
    expect="the base's, without adapter",
)  # fmt: skip
grouped_adapters.mistake(
    "the update in place of the base's output",
    {"y[rows] += scale * ((x[rows] @ A.T) @ B.T)": "y[rows] = scale * ((x[rows] @ A.T) @ B.T)"},
    says="The base's output was overwritten: the update is added to it.",
)


@grouped_adapters.mistake("token by token", expect="in .* matrix products")
def token_by_token(x, weight, adapters, which):
    rows = []
    for row, number in zip(x.split(1), which.tolist(), strict=True):
        y = row @ weight.T
        if number >= 0:
            a, b, scale = adapters[number]
            y = y + scale * (row @ a.T) @ b.T
        rows.append(y)
    return torch.cat(rows)


@grouped_adapters.mistake("the base for each adapter", expect="in .* matrix products")
def base_for_each(x, weight, adapters, which):
    y = torch.empty(len(x), len(weight))
    for number in which.unique().tolist():
        rows = which == number
        y[rows] = x[rows] @ weight.T
        if number >= 0:
            a, b, scale = adapters[number]
            y[rows] += scale * (x[rows] @ a.T) @ b.T
    return y


@grouped_adapters.mistake("merged weights", expect="matrix products|FLOPs instead")
def merged_weights(x, weight, adapters, which):
    y = x @ weight.T
    for number in which.unique().tolist():
        if number >= 0:
            a, b, scale = adapters[number]
            rows = which == number
            y[rows] = x[rows] @ (weight + scale * b @ a).T
    return y


@grouped_adapters.mistake("every adapter over all tokens", expect="matrix products|FLOPs instead")
def masked(x, weight, adapters, which):
    y = x @ weight.T
    for number, (a, b, scale) in enumerate(adapters):
        y = y + (which == number)[:, None] * (scale * (x @ a.T) @ b.T)
    return y


@grouped_adapters.mistake("those that are there over all tokens", expect="FLOPs instead")
def masked_used(x, weight, adapters, which):
    y = x @ weight.T
    for number in which.unique().tolist():
        if number >= 0:
            a, b, scale = adapters[number]
            y = y + (which == number)[:, None] * (scale * (x @ a.T) @ b.T)
    return y


@grouped_adapters.mistake("padded to the largest rank", expect="matrix products|FLOPs instead")
def padded(x, weight, adapters, which):
    y, rank = x @ weight.T, max(len(a) for a, _, _ in adapters)
    for number in which.unique().tolist():
        if number >= 0:
            a, b, scale = adapters[number]
            wide_a, wide_b = torch.zeros(rank, a.shape[1]), torch.zeros(len(b), rank)
            wide_a[: len(a)], wide_b[:, : len(a)] = a, b
            rows = which == number
            y[rows] += scale * (x[rows] @ wide_a.T) @ wide_b.T
    return y


@grouped_adapters.mistake("number by number", expect="number by number")
def by_numbers(x, weight, adapters, which):
    y = x @ weight.T
    for token, number in enumerate(which.tolist()):
        if number >= 0:
            a, b, scale = adapters[number]
            y[token] += scale * (b * (a * x[token]).sum(1)).sum(1)
    return y


@grouped_adapters.alternative("einsum, and mv where a group has one row")
def by_einsum(x, weight, adapters, which):
    y = torch.einsum("ti,oi->to", x, weight)
    for number in set(which.tolist()) - {-1}:
        a, b, scale = adapters[number]
        rows = (which == number).nonzero()[:, 0]
        if len(rows) == 1:
            y[rows[0]] += scale * torch.mv(b, torch.mv(a, x[rows[0]]))
        else:
            y[rows] += scale * torch.einsum("tr,or->to", torch.einsum("ti,ri->tr", x[rows], a), b)
    return y


@grouped_adapters.alternative("a mask for each")
def by_mask(x, weight, adapters, which):
    y = torch.nn.functional.linear(x, weight)
    for number in set(which.tolist()) - {-1}:
        a, b, scale = adapters[number]
        rows = (which == number).nonzero()[:, 0]
        y.index_add_(0, rows, (x[rows] @ a.T) @ b.T, alpha=scale)
    return y


# Keys.

adapter_key = KnownAnswers("adapter-key")

adapter_key.mistake(
    "the matrices alone",
    {"digest = hashlib.sha256(repr(float(scale)).encode())": "digest = hashlib.sha256()"},
    expect="the scale changes the update",
)
adapter_key.mistake(
    "names of layers left out",
    {"(name, tuple(matrix.shape), matrix.dtype)": "(tuple(matrix.shape), matrix.dtype)"},
    expect="names of layers belong in the key",
)
adapter_key.mistake(
    "shapes left out", {"(name, tuple(matrix.shape), matrix.dtype)": "(name, matrix.dtype)"}, expect="hash shapes, too"
)
adapter_key.mistake(
    "dtypes left out",
    {"(name, tuple(matrix.shape), matrix.dtype)": "(name, tuple(matrix.shape))"},
    expect="hash dtypes, too",
)
adapter_key.mistake(
    "in the order of the dict",
    {"for name in sorted(layers):": "for name in layers:"},
    expect="the order in which layers are listed",
)
adapter_key.mistake(
    "A alone",
    {"for matrix in layers[name]:": "for matrix in layers[name][:1]:"},
    expect="B of .* differs in one number",
)
adapter_key.mistake(
    "printed numbers",
    {"digest.update(matrix.contiguous().view(torch.uint8).numpy().tobytes())": "digest.update(str(matrix).encode())"},
    expect="differs in one number",
)
adapter_key.mistake(
    "sums",
    {"digest.update(matrix.contiguous().view(torch.uint8).numpy().tobytes())":
     "digest.update(repr(round(float(matrix.sum()), 3)).encode())"},
    expect="differs in one number",
)  # fmt: skip
adapter_key.mistake(
    "the base has a hash, too",
    {'return b""': 'return hashlib.sha256(b"").digest()'},
    expect="without an adapter the key is",
)
adapter_key.mistake(
    "the scale in six digits", {"repr(float(scale))": 'f"{scale:g}"'}, expect="the scale changes the update"
)
adapter_key.mistake(
    "layers without the number of their block",
    {"repr((name,": 'repr((name.split(".")[1],'},
    expect="whole names of layers",
)
adapter_key.mistake(
    "the whole storage",
    {"matrix.contiguous().view(torch.uint8).numpy().tobytes()": "bytes(matrix.contiguous().untyped_storage())"},
    expect="what else is in its storage",
)
adapter_key.mistake(
    "values in float32", {"matrix.contiguous()": "matrix.float().contiguous()"}, expect="in their own dtype"
)
adapter_key.mistake(
    "Python's hash",
    {"matrix.contiguous().view(torch.uint8).numpy().tobytes()":
     "str(hash(tuple(matrix.flatten().tolist()))).encode()"},
    expect=r"hash\(\) of both",
)  # fmt: skip
adapter_key.mistake(
    "the product of both",
    {"matrix.contiguous()": "(layers[name][1].contiguous().double() @ layers[name][0].contiguous().double())"},
    expect="not their product",
)
adapter_key.mistake("as text", {"return digest.digest()": "return digest.hexdigest()"}, expect="asks for bytes")
adapter_key.mistake("four bytes", {"return digest.digest()": "return digest.digest()[:4]"}, expect="64 bits at least")


@adapter_key.mistake("a checksum of the whole", expect="64 bits at least")
def checksum(adapter):
    if adapter is None:
        return b""
    scale, layers = adapter
    total = sum(float(m.double().sum()) for pair in layers.values() for m in pair) + scale
    return int(total * 1e6).to_bytes(4, "little", signed=True)


@adapter_key.mistake("remembered by where the values are", expect="in place")
def remembered(adapter, keys={}):  # noqa: B006
    if adapter is None:
        return b""
    layers = sorted(adapter[1].items())
    places = [(name, m.data_ptr(), m.shape, m.dtype, m.stride()) for name, pair in layers for m in pair]
    return keys.setdefault(repr((adapter[0], places)), (right.adapter_key(adapter), adapter))[0]


@adapter_key.alternative("a hash of hashes")
def of_hashes(adapter):
    if adapter is None:
        return b""
    scale, layers = adapter
    parts = [scale.hex() if isinstance(scale, float) else str(scale)]
    for name, pair in sorted(layers.items()):
        for matrix in pair:
            values = bytes(matrix.clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten().tolist())
            parts.append(repr((name, list(matrix.shape), str(matrix.dtype), hashlib.sha256(values).hexdigest())))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()
