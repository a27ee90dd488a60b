"""Spoilers of lab 08, on one rank: wrong routers and permutations, and right ones that look different."""

import torch
import torch.nn.functional as F

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("08_expert_parallel")

# The router.


def _ranked(ranked, scores, k, *, descending=True, normalize=True):
    experts = ranked.sort(dim=-1, descending=descending, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    return experts, weights / weights.sum(1, keepdim=True) if normalize else weights


def _scores(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)


@mistake(
    "top-k-router",
    "weights that do not sum to 1",
    says="The weights of a token's experts do not sum to 1: divide the chosen scores by their sum.",
)
def not_normalised(logits, k, bias=None):
    scores = _scores(logits)
    return _ranked(scores if bias is None else scores + bias, scores, k, normalize=False)


@mistake(
    "top-k-router",
    "the bias in the weights",
    says="The bias is in the weights, too. It moves the choice and nothing else: gather the weights from the scores "
    "without it.",
)
def biased_weights(logits, k, bias=None):
    scores = _scores(logits) if bias is None else _scores(logits) + bias
    return _ranked(scores, scores, k)


@mistake(
    "top-k-router",
    "the bias on the logits",
    says="The bias was added to the logits. It belongs to the scores, after the softmax: there a step of it means the "
    "same for every token.",
)
def bias_on_logits(logits, k, bias=None):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _ranked(wide if bias is None else wide + bias, _scores(logits), k)


@mistake(
    "top-k-router", "ignores the bias", says="The bias does not reach the choice: rank the experts by score + bias."
)
def no_bias(logits, k, bias=None):
    scores = _scores(logits)
    return _ranked(scores, scores, k)


@mistake("top-k-router", "the lowest scores", says="These are the experts with the lowest scores: sort descending.")
def lowest(logits, k, bias=None):
    scores = _scores(logits)
    return _ranked(scores if bias is None else scores + bias, scores, k, descending=False)


@mistake("top-k-router", "softmax over tokens", says="The softmax runs over tokens; each token's scores sum to 1.")
def over_tokens(logits, k, bias=None):
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(0)
    return _ranked(scores if bias is None else scores + bias, scores, k)


@mistake(
    "top-k-router",
    "a sigmoid of each logit",
    says="These are weights from sigmoids, each expert scored alone, as DeepSeek-V3 does. Here scores are a softmax "
    "over all experts.",
)
def sigmoids(logits, k, bias=None):
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
    return _ranked(scores if bias is None else scores + bias, scores, k)


@mistake("top-k-router", "weights first", expect="first their numbers")
def swapped(logits, k, bias=None):
    return right.choose(logits, k, bias)[::-1]


@mistake("top-k-router", "ties to the last expert", expect="a tie with")
def last_of_ties(logits, k, bias=None):
    scores = _scores(logits)
    ranked = (scores if bias is None else scores + bias).flip(1)
    experts = logits.shape[1] - 1 - ranked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    return experts, weights / weights.sum(1, keepdim=True)


@mistake("top-k-router", "scores in bfloat16", expect="bfloat16")
def in_sixteen_bits(logits, k, bias=None):
    scores = logits.softmax(-1)
    return _ranked(scores if bias is None else scores + bias, scores, k)


@alternative("top-k-router", "softmax over the chosen logits")
def softmax_of_chosen(logits, k, bias=None):
    """What Mixtral's code does: normalised over the chosen, a softmax over all is one over them."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1)
    experts = (scores if bias is None else scores + bias).argsort(dim=-1, descending=True, stable=True)[:, :k]
    return experts, wide.gather(1, experts).softmax(-1)


@alternative("top-k-router", "k times the largest that is left")
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


def _dispatch(x, experts, num_experts, order):
    return x[order // experts.shape[1]], order, torch.bincount(experts.flatten(), minlength=num_experts)


def _combine(rows, order, weights):
    pairs = rows.new_zeros(rows.shape).index_copy(0, order, rows)
    return (pairs.unflatten(0, weights.shape) * weights[..., None]).sum(1)


def _last_token_first(x, experts, num_experts):
    flat = experts.flatten()
    order = len(flat) - 1 - flat.flip(0).argsort(stable=True)
    return _dispatch(x, experts, num_experts, order)


def _inverse(x, experts, num_experts):
    order = experts.flatten().argsort(stable=True)
    return x[order // experts.shape[1]], order.argsort(), torch.bincount(experts.flatten(), minlength=num_experts)


def _tokens_not_pairs(x, experts, num_experts):
    order = experts.flatten().argsort(stable=True)
    return x[order % len(x)], order, torch.bincount(experts.flatten(), minlength=num_experts)


def _choice_by_choice(x, experts, num_experts):
    """As if pair i were choice i // tokens of token i % tokens."""
    order = experts.T.flatten().argsort(stable=True)
    return x[order % len(x)], order, torch.bincount(experts.flatten(), minlength=num_experts)


def _counts_of_used(x, experts, num_experts):
    order = experts.flatten().argsort(stable=True)
    return x[order // experts.shape[1]], order, experts.unique(return_counts=True)[1]


def _detached(x, experts, num_experts):
    rows, order, counts = right.dispatch(x, experts, num_experts)
    return rows.detach(), order, counts


mistake("sort-by-expert", "an order that is not stable", expect="sort stably")((_last_token_first, _combine))
mistake(
    "sort-by-expert",
    "the inverse permutation as order",
    says="This is where each pair went. order says the opposite, which pair stands in each row; one is the argsort of "
    "the other.",
)((_inverse, _combine))
mistake("sort-by-expert", "the pair taken for a token", expect="not those of its tokens")((_tokens_not_pairs, _combine))
mistake(
    "sort-by-expert",
    "pairs counted choice by choice",
    says="You numbered all first choices before all second ones. Pair t·k + j is choice j of token t: flatten experts "
    "as it is.",
)((_choice_by_choice, _combine))
mistake("sort-by-expert", "no count for an expert without rows", expect="without rows")((_counts_of_used, _combine))
mistake("sort-by-expert", "detached on the way", expect="gradient")((_detached, _combine))


def _gathers_back(rows, order, weights):
    return (rows[order].unflatten(0, weights.shape) * weights[..., None]).sum(1)


def _not_sorted_back(rows, order, weights):
    return (rows.unflatten(0, weights.shape) * weights[..., None]).sum(1)


def _unweighted(rows, order, weights):
    return _combine(rows, order, torch.ones_like(weights))


def _mean(rows, order, weights):
    return _combine(rows, order, torch.full_like(weights, 1 / weights.shape[1]))


def _overwrites(rows, order, weights):
    out = rows.new_zeros(len(weights), rows.shape[1])
    out[order // weights.shape[1]] = rows * weights.flatten()[order, None]
    return out


def _weights_in_token_order(rows, order, weights):
    out = rows.new_zeros(len(weights), rows.shape[1])
    return out.index_add(0, order // weights.shape[1], rows * weights.flatten()[:, None])


mistake(
    "sort-by-expert",
    "rows[order] on the way back",
    says="rows[order] sorts a second time. Row i belongs to pair order[i]: write it there (index_copy), or read by the "
    "inverse, order.argsort().",
)((right.dispatch, _gathers_back))
mistake(
    "sort-by-expert",
    "never sorted back",
    says="The rows still stand by expert when they are summed: bring them back to the order of the pairs first.",
)((right.dispatch, _not_sorted_back))
mistake("sort-by-expert", "without weights", says="The experts' answers were added up without their weights.")(
    (right.dispatch, _unweighted)
)
mistake(
    "sort-by-expert", "the mean of the experts", says="This is the plain mean of a token's experts; the weights differ."
)((right.dispatch, _mean))
mistake(
    "sort-by-expert",
    "one row of each token survives",
    says="A token has k rows, and assigning by index keeps one of them; += by index does, too. Use index_add, or put "
    "the rows of a token side by side and sum.",
)((right.dispatch, _overwrites))
mistake(
    "sort-by-expert",
    "weights in the order of the tokens",
    says="Rows stand by expert, the weights by token: row i needs the weight of pair order[i].",
)((right.dispatch, _weights_in_token_order))


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


alternative("sort-by-expert", "expert by expert, added by index")((_expert_by_expert, _index_add))
alternative("sort-by-expert", "repeated rows, the inverse permutation")((_repeated, _by_inverse))
