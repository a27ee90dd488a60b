"""Lab 17's claims and tables, each a function that the notebook calls in one line; CLAIMS need no learner."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, Row, formula, receipt, row, titled
from course.lab17_adapters import experiments, formulas, rank_programs
from course.lab17_adapters import experiments_breaks as breaks
from course.lab17_adapters import experiments_serving as serving
from course.lab17_adapters.checks_batch import count_products
from course.lab17_adapters.experiments import FAR, NEAR, BatchCost, StepBytes, Tuned
from course.shared.table import Table, seconds, table
from minillm.adapters import LoraConfig, attach
from minillm.adapters.attach import adapter_parameters
from minillm.comm import launch
from minillm.predict.model import forward_flops
from minillm.predict.training import adapters as predict
from minillm.predict.training.adapters import LAYERS, Adapters

ANSWERS = answers_of("17_adapters")
SEQ = 32  # tokens of the counted steps

# Numbers and FLOPs.


@titled("adapters of rank 16: numbers and FLOPs", open_rows=1, show="over those")
def numbers(guess_numbers: float | None = None, guess_share: float | None = None) -> Iterator[Row]:
    """r (d + k) by formula and in the target; FLOPs of its training step by formula and as torch counts them."""
    yield formula("a matrix of 4,096 x 4,096: r (d + k)", 16 * 8192, guess=guess_numbers)
    config, full = experiments.target().config, experiments.step_flops(None)
    yield row("the target, all weights: FLOPs of a step", 3 * SEQ * forward_flops(config, SEQ).total, full, "FLOP")
    everywhere, model = Adapters(config, 16, LAYERS), experiments.target()
    attach(model, LoraConfig(16, LAYERS))
    trained = sum(each.numel() for each in adapter_parameters(model).values())
    yield row("    numbers of adapters on all layers", everywhere.parameters, trained)
    for name, adapters in (("all layers", everywhere), ("q and v", Adapters(config, 16))):
        counted = experiments.step_flops(adapters.layers)
        guess = guess_share if adapters is everywhere else None
        share, said = formulas.step_share(adapters, SEQ), f"adapters on {name}: FLOPs of a step"
        yield row(f"{said} over those of training all weights", share, counted / full, "", 1e-9, guess=guess)
        yield row(said, SEQ * adapters.training_flops(SEQ).total, counted, "FLOP")


# Stages of training.


def stages() -> Receipt:
    """What counts in the three losses, and that preference training begins at ln 2."""
    found = experiments.stages()
    first, last = found.likelihoods[0], found.likelihoods[-1]
    return receipt(
        "one conversation and one pair of answers",
        [
            row("fine-tuning: tokens that count, those of the answer", found.answer, found.counted),
            row("preference: loss of a pair before training, ln 2", math.log(2), found.losses[0], "nats", 1e-6),
            row("    log-likelihood of the preferred answer, before and after", None, (first[0], last[0]), "nats"),
            row("    log-likelihood of the other", None, (first[1], last[1]), "nats"),
            row("adapters switched off: the base's logits, bit for bit", True, found.equal),
            formula("pre-training: tokens of the conversation that count, all but the first", found.tokens - 1),
            row(f"preference: loss after {len(found.losses) - 1} steps", None, found.losses[-1], "nats"),
        ],
        open_rows=4,
    )


# Memory.


def step_memory(found: tuple[StepBytes, ...] | None = None, guess_less: float | None = None) -> Receipt:
    """The three ways beside their formulas. guess_less: how many times fewer bytes a LoRA step takes."""
    found = found or experiments.step_bytes()
    plain, lora, qlora = found
    shares = [each.predicted["activations"] / each.total for each in (lora, qlora)]
    rows = [
        formula("LoRA: times fewer bytes", plain.total / lora.total, guess=guess_less),
        formula("QLoRA: times fewer bytes", plain.total / qlora.total),
        formula("activations, share of a step: LoRA, QLoRA", tuple(shares)),
        formula("    at the loss, over those of all weights: all layers, q and v", experiments.activation_shares()),
    ]
    rows += [row(f"{each.name}: a step at its fullest", each.total, each.measured, "B", 0.05) for each in found]
    return receipt("a model of 3.4 million parameters, 128 tokens a step", rows, open_rows=4)


# Many adapters.


def products(grouped: Callable | None = None) -> Receipt:
    """Matrix products and bytes of a decode step of 16 requests through one layer."""
    grouped = grouped or ANSWERS.grouped
    rows = []
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        weight, x = torch.randn(96, 64), torch.randn(16, 64)
        pairs = [(torch.randn(4, 64), torch.randn(96, 4), 0.5) for _ in range(16)]
    for different in (16, 4, 1):
        which = torch.arange(16) % different
        found = count_products(lambda: grouped(x, weight, pairs, which))  # noqa: B023
        rows.append(row(f"16 requests, {different} adapters: matrix products", 1 + 2 * different, found))
    base, adapter = 2 * formulas.of_model("llama-3-8b", 16).base_bytes(1), formulas.of_model("llama-3-8b", 16).nbytes(2)
    for different in (1, 16):
        read = predict.batch_bytes_read(base, [adapter] * different)
        rows.append(formula(f"Llama 3 8B, {different} of rank 16: bytes read, over the base's", read / base))
    rows.append(
        formula("Llama 3 8B, 16 merged models: bytes read, over the base's", predict.merged_bytes_read(base, 16) / base)
    )
    return receipt("a step of 16 requests", rows, open_rows=1, show="16 of rank|16 merged")


def fits(guess_fit: float | None = None) -> Receipt:
    """Bytes of adapters: by formula, and of a folder that was written."""
    adapter = formulas.of_model("llama-3-8b", 16).nbytes(2)
    config = experiments.target().config
    with serving.folders() as folders:
        sizes = {name: (folder / "adapter_model.safetensors").stat().st_size for name, folder in folders.items()}
    rows = [
        formula(
            "Llama 3 8B, rank 16: that fit into 10 GB", predict.adapters_that_fit(10**10, adapter), guess=guess_fit
        ),
        formula("    bytes of one, all layers, 16 bits", adapter, "B"),
    ]
    for name, rank in serving.RANKS.items():
        predicted = Adapters(config, rank, LAYERS).nbytes(4)
        rows.append(row(f"the target, rank {rank}, float32: bytes of its file", predicted, sizes[name], "B", 0.05))
    return receipt("how many fit", rows, open_rows=1)


def served() -> Receipt:
    """Three adapters and the base in one engine, beside merged models and a cache that knows adapters."""
    answers, held, different = serving.served()
    half = len(answers) // 2
    config = experiments.target().config
    nbytes = sum(Adapters(config, rank, LAYERS).nbytes(4) for rank in serving.RANKS.values())
    shared = len(serving.BEGINNING) // serving.BLOCK * serving.BLOCK
    return receipt(
        f"{len(answers)} requests, {different} adapters and none, in one engine",
        [
            row("requests with the tokens of their merged model", len(answers), sum(each.right for each in answers)),
            row("first round: tokens of the common beginning from the cache", 0, sum(e.hit for e in answers[:half])),
            row(
                "second round: each finds what its own adapter left", half * shared, sum(e.hit for e in answers[half:])
            ),
            row("bytes of the adapters on the device", nbytes, held, "B"),
        ],
    )


# Break it.


def forgotten_key() -> Receipt:
    """The same requests, with the adapter missing in the keys."""
    (known, _, _), (answers, _, _) = (serving.served(forgets) for forgets in (False, True))
    wrong = sum(not each.right for each in answers)
    before, now = (sum(each.hit for each in some) for some in (known, answers))
    return receipt(
        "the adapter is missing in the keys",
        [
            row(f"tokens from the cache, {before} with the adapter in the keys", None, now),
            row(f"requests with wrong tokens, of {len(answers)}", None, wrong),
            row("    more tokens from the cache, and some are wrong", True, now > before and wrong > 0),
        ],
        open_rows=2,
    )


@cache
def _trained() -> dict[str, dict[str, list[float]]]:
    ranks = launch(rank_programs.train_twice, 2, ANSWERS.finish_gradients, device="cpu")
    return ranks[0]


def reduced_twice(found: dict[str, dict[str, list[float]]] | None = None) -> Receipt:
    """An adapter trained on two ranks, with its gradients finished once and twice."""
    found = found or _trained()
    once, twice = found["once"], found["twice"]
    return receipt(
        f"{rank_programs.STEPS} steps of AdamW on 2 ranks",
        [
            row("loss of the last step, twice beside once, relative difference: below 1e-6", True,
                abs(twice["losses"][-1] / once["losses"][-1] - 1) < 1e-6),
            row("norm of A's gradient in the second step, twice over once: the number of ranks", 2.0,
                twice["norms"][1] / once["norms"][1], "", 1e-3),
            row("loss of the last step, finished once", None, once["losses"][-1]),
        ],
        open_rows=2,
    )  # fmt: skip


def programs(verdict: Callable) -> Table:
    """The six programs: the learner's verdict beside what their logs say."""
    lines = []
    for name, seen in breaks.all_programs().items():
        eps = torch.finfo(seen.dtype).eps
        start, merged = (
            float((one.double() - other.double()).norm() / other.double().norm()) / eps
            for one, other in ((seen.first, seen.base), (seen.merged, seen.adapted))
        )
        hits = " ".join(str(hit) for _, _, hit in seen.requests)
        a, b = (ranks / alone for alone, ranks in seen.norms.values())
        lines.append((name, verdict(seen), f"{start:.1f}", f"{merged:.1f}", hits, f"{a:.2f}", f"{b:.2f}"))
    columns = ("program", "your verdict", "start, eps", "merged, eps", "hits", "norm of A", "norm of B")
    return table("six programs in bfloat16, norms on 4 ranks over those of one process", columns, lines)


def verdicts() -> Receipt:
    """The six programs, judged."""
    found = breaks.all_programs()
    return receipt(
        "which bug",
        [row(f"program {name}", breaks.BUGS[name], ANSWERS.verdict(seen)) for name, seen in found.items()],
    )


# Where it loses.


def rank_against_loss(found: list[Tuned]) -> Table:
    """What the figure shows, in numbers."""
    lines = []
    for each in found:
        full = next(f for f in found if f.task == each.task and f.rank is None)
        share = (each.before - each.after) / (each.before - full.after)
        rank = "all weights" if each.rank is None else f"rank {each.rank}"
        lines.append((each.task, rank, f"{each.numbers:,}", f"{each.before:.2f}", f"{each.after:.2f}", f"{share:.0%}"))
    columns = ("text", "trained", "numbers", "loss before", "after", "of the gain of all weights")
    return table(f"the target after {experiments.STEPS} steps on text that is new to it", columns, lines)


def last_ranks(found: list[Tuned]) -> Receipt:
    """What the step from rank 8 to rank 64 is worth, near the base and far from it."""
    loss = {(each.task, each.rank): each.after for each in found}
    gains = {task: loss[task, 8] - loss[task, 64] for task in (NEAR, FAR)}
    rows = [row(f"{task}: nats gained", None, gain) for task, gain in gains.items()]
    rows.append(row("    more far from the base than near it", True, gains[FAR] > gains[NEAR]))
    return receipt("from rank 8 to rank 64", rows, open_rows=1, show="nats")


def batch_costs(found: list[BatchCost]) -> Table:
    """Times of the figure, and how many times longer than the base alone."""
    lines = []
    for each in found:
        times = (each.grouped, each.merged)
        lines.append((each.different, *map(seconds, times), each.grouped / each.base, each.merged / each.base))
    columns = (
        "different adapters",
        "grouped",
        "merged weights",
        "grouped / base",
        "merged / base",
    )
    return table(f"{experiments.TOKENS} requests through a layer of {experiments.LAYER}, one thread", columns, lines)


# Production.


def peer() -> Receipt:
    """Our adapter beside peft's, where it is installed: a folder of ours in a mixed batch of theirs."""
    if find_spec("peft") is None:
        return receipt("peft is not installed here: pip install peft", [])
    from course.lab17_adapters.experiments_peer import mixed_batch

    found = mixed_batch()
    return receipt(
        f"peft {version('peft')} loads three folders of ours and runs a mixed batch",
        [row("logits of the three merged models of ours: relative difference below 1e-4", True, found < 1e-4)],
    )


CLAIMS = (numbers, stages, step_memory, products, fits, served, forgotten_key, reduced_twice, verdicts)
