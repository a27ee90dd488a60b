"""Lab 05, tensor parallelism: the embedding and the loss, cut along the vocabulary."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, row
from course.lab05_tensor_parallel import rank_programs
from course.lab05_tensor_parallel.checks import say_gradient
from course.lab05_tensor_parallel.rank_programs import Passed, Vocabulary, close, shown
from course.shared.diagnose import say_rounded
from minillm.predict import comms

# What they are held to.


@exercise(
    "vocabulary-embedding",
    minutes=12,
    difficulty=2,
    hints=(
        "Every token's row lies on exactly one rank. What must the others add to the sum?",
        "Subtract where this rank's rows begin; ids outside 0 .. len(rows)-1 are somebody else's. Look up any row for "
        "those, put zeros in its place, and let Leave add the ranks up.",
    ),
)
def check_embedding(learner: Callable) -> Receipt:
    cases = rank_programs.draw_cases(_draw_embedding)
    cases.append(_of_one_rank(cases[-1]))
    by_case = rank_programs.try_cases(rank_programs.run_vocabulary, learner, cases)
    rows: list[Row] = []
    for case, ranks in zip(cases, by_case, strict=True):
        for rank, passed in enumerate(ranks):
            _judge_embedding(case, rank, passed)
        n, numbers = case.world_size, case.output_gradient.numel()
        cost = comms.ring_all_reduce(numbers, case.table.element_size(), n).sent_per_rank[0]
        found = [
            row(f"{n} ranks: bytes of the table per rank, 1/{n}", case.table.nbytes // n, ranks[0].held, "B"),
            row(f"    forward, bytes sent: {ranks[0].forward}", cost, ranks[0].forward.bytes, "B"),
            row(f"    backward, bytes sent: {ranks[0].backward}", 0, ranks[0].backward.bytes, "B"),
        ]
        if ranks[0].forward.bytes > cost or ranks[0].backward.calls:
            raise CheckFailed(
                f"right embeddings, but forward called {ranks[0].forward} and backward {ranks[0].backward}: one "
                f"all-reduce of the {numbers} looked-up numbers is enough, and the rows' gradients stay where the rows "
                "are",
                [*rows, *found],
            )
        _judge_row_gradients(case, ranks)
        rows += shown(case, found)
    return Receipt("an embedding cut by rows", tuple(rows))


def _draw_embedding(world: int) -> Vocabulary:
    vocab, hidden, tokens = world * random.randint(20, 30), random.randint(3, 6), 2 * world + random.randint(2, 5)
    ids = torch.randint(vocab, (tokens,))
    ids[:world] = torch.arange(world) * (vocab // world)  # the first row of every rank
    ids[world : 2 * world] = ids[:world] + vocab // world - 1  # and the last
    ids[-1] = ids[0]  # one of them twice
    return Vocabulary(rank_programs.randn(vocab, hidden), ids, rank_programs.randn(tokens, hidden), world)


def _of_one_rank(case: Vocabulary) -> Vocabulary:
    """The same, but one rank holds the rows of all tokens."""
    share = len(case.table) // case.world_size
    return replace(case, ids=case.ids % share + share * random.randrange(case.world_size))


def _refuse_changes(passed: Passed, who: str) -> None:
    if passed.results["changed"]:
        raise CheckFailed(
            f"{who}: your function changed the {passed.results['changed'][0]} that it was given: work on a copy"
        )


def _judge_embedding(case: Vocabulary, rank: int, passed: Passed) -> None:
    _refuse_changes(passed, f"rank {rank} of {case.world_size}")
    n, who, found = case.world_size, f"rank {rank} of {case.world_size}", passed.results["output"]
    right, share = case.table[case.ids], len(case.table) // case.world_size
    if not close(found, right):
        place = next(i for i in range(len(right)) if not close(found[i], right[i]))
        token = f"token {int(case.ids[place])}, which rank {int(case.ids[place]) // share} holds"
        alone = [case.part(r)[torch.clamp(case.ids[place] - r * share, 0, share - 1)] for r in range(n)]
        if close(found[place], torch.stack(alone).sum(0)):
            said = "it is the sum of a row of every rank: those that do not hold the token must add zeros"
        elif close(found[place], torch.zeros_like(right[0])):
            said = "it is zero: nobody's row was added"
        elif close(found[place], right[place] / n):
            said = "it is divided by the ranks; one row and zeros are to be added"
        else:
            strangers = torch.isclose(case.table, found[place], rtol=1e-9).all(1).nonzero()
            if len(strangers):
                said = f"it is row {int(strangers[0])}: where do this rank's rows begin?"
            else:
                said = "it is no row of the table: do ranks without the token add something, or does nobody sum?"
        raise CheckFailed(f"{who}: the embedding of {token}, is wrong: {said}")


def _judge_row_gradients(case: Vocabulary, ranks: Sequence[Passed]) -> None:
    table, n = rank_programs.leaf(case.table), case.world_size
    F.embedding(case.ids, table).backward(case.output_gradient)
    for rank, (passed, wanted) in enumerate(zip(ranks, table.grad.chunk(n), strict=True)):
        if not close(passed.results["d0"], wanted):
            raise CheckFailed(
                f"rank {rank} of {n}: the embeddings are right, but the gradient of its rows is "
                f"{say_gradient(passed.results['d0'], wanted, n)}: a row gets the sum over the tokens that used it"
            )


@exercise(
    "vocabulary-cross-entropy",
    minutes=20,
    difficulty=4,
    hints=(
        "-log p(target) = log Σ exp(logit) - logit[target]. Both are sums over the vocabulary, so each rank has a "
        "share. exp must not overflow: subtract the same number on every rank.",
        "The largest logit over all ranks (all_reduce with op='max', on detached values: it cancels). Then Σ exp over "
        "this rank's part, and the target's logit or zero; Leave sums both, and its backward is what you need.",
    ),
)
def check_loss(learner: Callable) -> Receipt:
    cases = rank_programs.draw_cases(_draw_loss)
    by_case = rank_programs.try_cases(rank_programs.run_vocabulary, learner, cases)
    rows: list[Row] = []
    for case, ranks in zip(cases, by_case, strict=True):
        logits, n, tokens = rank_programs.leaf(case.table), case.world_size, len(case.ids)
        right = F.cross_entropy(logits, case.ids, reduction="none")
        right.backward(case.output_gradient)
        for rank, passed in enumerate(ranks):
            _judge_loss(case, rank, passed, right.detach(), logits.grad)
        sent, largest = max(p.forward.bytes for p in ranks), max(p.forward.largest for p in ranks)
        itemsize = case.table.element_size()
        most, gathered = 3 * itemsize * tokens * (n - 1), comms.ring_all_gather(case.table.numel(), itemsize, n)
        found = [
            row(
                f"{n} ranks, {case.table.shape[1] // n} logits each: at most 3 numbers a token sent to each rank",
                True,
                sent <= most,
            ),
            row("    bytes sent by rank 0", None, ranks[0].forward.bytes, "B"),
            row("    for gathering the logits it would be", None, gathered.sent_per_rank[0], "B"),
            row("    backward, bytes sent", 0, ranks[0].backward.bytes, "B"),
        ]
        if sent > most:
            raise CheckFailed(
                f"right values, but a rank sends {sent:,} bytes for {tokens} tokens, in tensors of up to {largest} "
                "numbers: the logits stay where they are, three numbers per token travel",
                [*rows, *found],
            )
        if ranks[0].backward.calls:
            raise CheckFailed(
                f"right values, but backward called {ranks[0].backward}: softmax minus one-hot is local",
                [*rows, *found],
            )
        rows += shown(case, found)
    return Receipt("a loss without the logits in one place", tuple(rows))


def _draw_loss(world: int) -> Vocabulary:
    share, tokens = random.randint(20, 30), random.randint(6, 12)
    logits = 3 * rank_programs.randn(tokens, world * share)
    logits[0] += 900.0  # exp of it is infinite
    logits[1] -= 900.0  # the sum of exp is zero
    logits[2, :share] += 4000.0  # one rank's logits tower over the others', and over their mean
    ids = torch.randint(world * share, (tokens,))
    ids[3:5] = torch.tensor([share - 1, share])  # the last of one rank, the first of the next
    return Vocabulary(logits, ids, rank_programs.randn(tokens), world, columns=True)


def _judge_loss(case: Vocabulary, rank: int, passed: Passed, right: Tensor, gradient: Tensor) -> None:
    _refuse_changes(passed, f"rank {rank} of {case.world_size}")
    n, who, found = case.world_size, f"rank {rank} of {case.world_size}", passed.results["output"]
    share = case.table.shape[1] // n
    if not close(found, right):
        place = next(i for i in range(len(right)) if not close(found[i], right[i]))
        own = F.cross_entropy(case.part(rank), (case.ids - rank * share).clamp(0, share - 1), reduction="none")
        said = f"{found[place]:.4g} instead of {right[place]:.4g}"
        if not torch.isfinite(found[place]):
            said = f"it is {found[place]:g}: exp ran over or under. Subtract the largest logit of all ranks first"
        elif rounded := say_rounded(found, right):
            said = rounded
        elif close(found, own):
            said = "it is a loss over this rank's part of the vocabulary alone"
        elif torch.isclose(found[place], _with_own_maxima(case)[place], rtol=1e-9):
            said += ": is the same number subtracted on every rank?"
        else:
            said += ": does the target's logit come from the one rank that has it?"
        raise CheckFailed(f"{who}: the loss of token {place} is wrong: {said}")
    if not close(passed.results["d0"], gradient.chunk(n, dim=1)[rank]):
        raise CheckFailed(
            f"{who}: the loss is right, but its gradient is not softmax minus one-hot: "
            f"it is {say_loss_gradient(passed.results['d0'], gradient.chunk(n, dim=1)[rank], n)}"
        )


def _with_own_maxima(case: Vocabulary) -> Tensor:
    """The losses if every rank subtracted the largest logit of its own part."""
    shares = [case.part(rank) for rank in range(case.world_size)]
    shifted = torch.cat([share - share.amax(dim=1, keepdim=True) for share in shares], dim=1)
    return shifted.exp().sum(dim=1).log() - shifted.gather(1, case.ids[:, None])[:, 0]


def say_loss_gradient(found: Tensor | None, wanted: Tensor, n: int) -> str:
    if found is None:
        return "None"
    if close(found, n * wanted):
        return f"{n} times too large: the sum's backward sums nothing"
    return "something else: does each sum have the gradient of its share, and the maximum none?"
