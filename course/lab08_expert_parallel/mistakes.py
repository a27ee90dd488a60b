"""Spoilers of lab 08, on one rank: wrong routers and permutations, and right ones that look different."""

import torch
import torch.nn.functional as F

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("08_expert_parallel")

# The router.

top_k_router = KnownAnswers("top-k-router")

top_k_router.mistake(
    "weights that do not sum to 1",
    {" / weights.sum(1, keepdim=True)": ""},
    says="The weights of a token's experts do not sum to 1: divide the chosen scores by their sum.",
)
top_k_router.mistake(
    "the bias in the weights",
    {"scores.gather": "ranked.gather"},
    says="The bias is in the weights, too. It moves the choice and nothing else: gather the weights from the scores "
    "without it.",
)
top_k_router.mistake(
    "the bias on the logits",
    {"else scores + bias": "else logits + bias"},
    says="The bias was added to the logits. It belongs to the scores, after the softmax: there a step of it means the "
    "same for every token.",
)
top_k_router.mistake(
    "ignores the bias",
    {" if bias is None else scores + bias": ""},
    says="The bias does not reach the choice: rank the experts by score + bias.",
)
top_k_router.mistake(
    "the lowest scores",
    {"descending=True": "descending=False"},
    says="These are the experts with the lowest scores: sort descending.",
)
top_k_router.mistake(
    "softmax over tokens",
    {".softmax(-1)": ".softmax(0)"},
    says="The softmax runs over tokens; each token's scores sum to 1.",
)
top_k_router.mistake(
    "a sigmoid of each logit",
    {".softmax(-1)": ".sigmoid()"},
    says="These are weights from sigmoids, each expert scored alone, as DeepSeek-V3 does. Here scores are a softmax "
    "over all experts.",
)
top_k_router.mistake(
    "weights first",
    {
        "return experts, weights / weights.sum(1, keepdim=True)": (
            "weights /= weights.sum(1, keepdim=True)\n    return weights, experts"
        )
    },
    expect="first their numbers",
)
top_k_router.mistake(
    "ties to the last expert", {"ranked.sort(": "logits.shape[1] - 1 - ranked.flip(1).sort("}, expect="a tie with"
)
top_k_router.mistake(
    "scores in bfloat16", {".to(torch.promote_types(logits.dtype, torch.float32))": ""}, expect="bfloat16"
)
top_k_router.mistake(
    "weights without a gradient",
    {"weights = scores.gather(1, experts)": "weights = scores.detach().gather(1, experts)"},
    expect="the router learns through its weights alone",
)
top_k_router.mistake(
    "the sum detached",
    {"weights / weights.sum(1, keepdim=True)": "weights / weights.sum(1, keepdim=True).detach()"},
    expect="is the sum below them detached",
)
top_k_router.mistake(
    "ties by a small difference",
    {"ranked.sort(": "(ranked - 1e-6 * torch.arange(logits.shape[1])).sort("},
    expect="goes to experts .* instead of",
)
top_k_router.mistake(
    "softmax without a maximum",
    {
        "scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)": (
            "scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).exp()\n"
            "    scores = scores / scores.sum(-1, keepdim=True)"
        )
    },
    expect="logits of hundreds",
)
top_k_router.mistake(
    "bfloat16 alone is widened",
    {
        "logits.to(torch.promote_types(logits.dtype, torch.float32))": (
            "(logits.float() if logits.dtype == torch.bfloat16 else logits)"
        )
    },
    expect="float16 logits",
)
top_k_router.mistake(
    "ranked in the logits' dtype",
    {"ranked.sort(": "ranked.to(logits.dtype).sort("},
    says="The scores were rounded to the logits' 16 bits before they were ranked: rank them in float32 at least.",
)
top_k_router.mistake(
    "the bias in the logits' dtype",
    {"else scores + bias": "else scores + bias.to(logits.dtype)"},
    says="The bias was rounded to the logits' 16 bits, in which its small steps are lost: add it as it is.",
)
top_k_router.mistake(
    "stable without a bias only", {"stable=True": "stable=bias is None"}, expect="with a bias: .* a tie"
)
top_k_router.mistake("scores of six digits", {"ranked.sort(": "ranked.round(decimals=6).sort("}, expect="of 256")


top_k_router.alternative(
    "float32 whatever comes", {"logits.to(torch.promote_types(logits.dtype, torch.float32))": "logits.float()"}
)


@top_k_router.alternative("softmax over the chosen logits")
def softmax_of_chosen(logits, k, bias=None):
    """What Mixtral's code does: normalised over the chosen, a softmax over all is one over them."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1)
    experts = (scores if bias is None else scores + bias).argsort(dim=-1, descending=True, stable=True)[:, :k]
    return experts, wide.gather(1, experts).softmax(-1)


@top_k_router.alternative("k times the largest that is left")
def one_at_a_time(logits, k, bias=None):
    scores = logits.double().softmax(-1)
    left = scores.clone() if bias is None else scores + bias
    chosen = []
    for _ in range(k):
        best = (left == left.amax(1, keepdim=True)).int().argmax(1, keepdim=True)  # argmax gives the first of equals
        chosen.append(best)
        left = left.scatter(1, best, float("-inf"))
    experts = torch.cat(chosen, 1)
    weights = scores.gather(1, experts)
    return experts, (weights / weights.sum(1, keepdim=True)).float()


# There and back on one rank.

sort_by_expert = KnownAnswers("sort-by-expert")

sort_by_expert.mistake(
    "an order that is not stable",
    {"flat.argsort(stable=True)": "len(flat) - 1 - flat.flip(0).argsort(stable=True)"},
    expect="sort stably",
)
sort_by_expert.mistake(
    "the inverse permutation as order",
    {"], order, torch": "], order.argsort(), torch"},
    says="This is where each pair went. order says the opposite, which pair stands in each row; one is the argsort of "
    "the other.",
)
sort_by_expert.mistake(
    "the pair taken for a token", {"order // experts.shape[1]": "order % len(x)"}, expect="not those of its tokens"
)
sort_by_expert.mistake(
    "pairs counted choice by choice",
    {"experts.flatten()": "experts.T.flatten()", "order // experts.shape[1]": "order % len(x)"},
    says="You numbered all first choices before all second ones. Pair t·k + j is choice j of token t: flatten experts "
    "as it is.",
)
sort_by_expert.mistake(
    "no count for an expert without rows",
    {"torch.bincount(flat, minlength=num_experts)": "flat.unique(return_counts=True)[1]"},
    expect="without rows",
)
sort_by_expert.mistake(
    "detached on the way", {"experts.shape[1]], order": "experts.shape[1]].detach(), order"}, expect="gradient"
)


def _overwrites(rows, order, weights):
    out = rows.new_zeros(len(weights), rows.shape[1])
    out[order // weights.shape[1]] = rows * weights.flatten()[order, None]
    return out


sort_by_expert.mistake(
    "rows[order] on the way back",
    {"torch.zeros_like(rows).index_copy(0, order, rows)": "rows[order]"},
    says="rows[order] sorts a second time. Row i belongs to pair order[i]: write it there (index_copy), or read by the "
    "inverse, order.argsort().",
)
sort_by_expert.mistake(
    "never sorted back",
    {"torch.zeros_like(rows).index_copy(0, order, rows)": "rows"},
    says="The rows still stand by expert when they are summed: bring them back to the order of the pairs first.",
)
sort_by_expert.mistake(
    "without weights", {" * weights[..., None]": ""}, says="The experts' answers were added up without their weights."
)
sort_by_expert.mistake(
    "one row of each token survives",
    says="A token has k rows, and assigning by index keeps one of them; += by index does, too. Use index_add, or put "
    "the rows of a token side by side and sum.",
)((right.dispatch, _overwrites))
sort_by_expert.mistake(
    "weights in the order of the tokens",
    {"(0, order, rows)": "(0, order, rows * weights.flatten()[:, None])", " * weights[..., None]": ""},
    says="Rows stand by expert, the weights by token: row i needs the weight of pair order[i].",
)


def _expert_by_expert(x, experts, num_experts):
    token, choice = [], []
    for expert in range(num_experts):
        tokens, choices = (experts == expert).nonzero(as_tuple=True)
        token.append(tokens)
        choice.append(choices)
    order = torch.cat(token) * experts.shape[1] + torch.cat(choice)
    return x[torch.cat(token)], order, [len(tokens) for tokens in token]


def _index_add(rows, order, weights):
    out = torch.zeros(len(weights), rows.shape[1], dtype=rows.dtype)
    return out.index_add(0, order // weights.shape[1], rows * weights.flatten()[order, None])


def _repeated(x, experts, num_experts):
    order = experts.flatten().sort(stable=True).indices
    pairs = x.repeat_interleave(experts.shape[1], 0)
    return pairs.index_select(0, order), order, F.one_hot(experts.flatten(), num_experts).sum(0)


def _by_inverse(rows, order, weights):
    return torch.einsum("tkh,tk->th", rows[order.argsort()].view(*weights.shape, -1), weights)


sort_by_expert.mistake("counts without the last experts", {", minlength=num_experts": ""}, expect="one per expert")
sort_by_expert.mistake(
    "counts as floats",
    {"torch.bincount(flat, minlength=num_experts)": "torch.bincount(flat, minlength=num_experts).double()"},
    expect="the exercise asks for whole numbers",
)
sort_by_expert.mistake(
    "the order of the last call",
    {
        "order = flat.argsort(stable=True)": "dispatch.order = order = flat.argsort(stable=True)",
        "(0, order, rows)": "(0, dispatch.order, rows)",
    },
    says="combine took the order of the last dispatch. Several microbatches are on their way at a time: use the order "
    "that is handed in.",
)
sort_by_expert.mistake(
    "hidden as a number", {".unflatten(0, weights.shape)": ".view(*weights.shape, 3)"}, expect="invalid for input"
)


def _scales_rows(rows, order, weights):
    rows *= weights.flatten()[order, None]
    return rows.new_zeros(len(weights), rows.shape[1]).index_add(0, order // weights.shape[1], rows)


sort_by_expert.mistake("scales the rows in place", expect="changed its input `rows`")((right.dispatch, _scales_rows))
sort_by_expert.mistake(
    "for contiguous experts only", {"experts.flatten()": "experts.view(-1)"}, expect="view size is not compatible"
)
sort_by_expert.mistake("sorted as bytes", {"flat.argsort(": "flat.to(torch.int8).argsort("}, expect="not sorted")
sort_by_expert.mistake(
    "the pair behind the decimal point",
    {"flat.argsort(stable=True)": "(flat.float() + torch.arange(len(flat)) / len(flat)).argsort()"},
    expect="sort stably",
)
sort_by_expert.mistake(
    "sums in float64",
    {"zeros_like(rows).index_copy(0, order, rows)": "zeros_like(rows).index_copy(0, order, rows).double()"},
    expect="keep its dtype",
)
sort_by_expert.alternative("expert by expert, added by index")((_expert_by_expert, _index_add))
sort_by_expert.alternative("repeated rows, the inverse permutation")((_repeated, _by_inverse))
