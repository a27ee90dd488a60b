"""Exhibits of speculation: drafts that were not sampled, numbers that are drawn twice, and a bug that is not one."""

from course.lab22_bug_museum import serving_distributions as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.serving_runs import runs
from course.shared.faults import serving as faults

_SURE = "return torch.where(q.amax(-1) > 0.3, q.argmax(-1), draw_from(q, draws)), q"

NOT_ATTENTION = Suspect(
    "attention",
    "draft tokens see keys of draft tokens that were rejected",
    "Then greedy answers would be wrong as well, and every one of them is the naive loop's.",
)
NOT_SAMPLER = Suspect(
    "sampler",
    "temperature is applied twice",
    "The first token of an answer comes from the same sampler, and its distribution is the target's.",
)

LIKELIEST = Exhibit(
    name="all-alike",
    title="Creative answers, all alike",
    kind="serving",
    symptom=(
        "With speculation switched on, the greedy regression suite passes to the last token, latency is good, and no "
        "request fails. Product reports that answers at temperature 1 have become duller: the same few turns of phrase "
        "come up in all of them."
    ),
    faults=(faults.LIKELIEST_DRAFT,),
    run=runs(seen.sampled),
    looks=lambda served: [*seen.dashboard(served), seen.greedy_wrong(served), seen.first_tokens_follow(served)],
    trace=lambda served: [seen.follows(served)],
    measurements=seen.USUAL,
    innocents=(
        NOT_ATTENTION,
        NOT_SAMPLER,
        Suspect(
            "draft model",
            "it is too small and knows only a few phrases",
            "A bad draft costs time and never changes the distribution. With the target itself as draft it is worse.",
        ),
        Suspect(
            "verification",
            "after a rejection it samples from p and not from what is left of it",
            "With the target as its own draft nothing is ever rejected, and the answers are further off than before.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "likeliest where the draft is sure",
            "Half sampled and half likeliest is still not sampled from q. The rule divides by the probability with "
            "which the token was chosen, whatever that is.",
            ({"return draw_from(q, draws), q": _SURE},),
        ),
        WrongFix(
            "a flatter q",
            "The token is still the likeliest one, chosen with probability 1, and q still says less. Flattening q "
            "changes how wrong it is.",
            ({"return draw_from(q, draws), q": "return q.argmax(-1), (q + 1 / q.shape[-1]) / 2"},),
        ),
        WrongFix(
            "sampled at a lower temperature",
            "Now it is sampled, and not from the q that is reported: temperature, top-k and top-p belong to both or to "
            "neither.",
            ({"return draw_from(q, draws), q": "return draw_from(q**6, draws), q"},),
        ),
    ),
    investigation=(
        Clue(
            "target-drafts",
            "With p = q every draft token is accepted, so an answer is what the draft says between two tokens of the "
            "target. Hundreds of answers become some twenty texts: the draft does not sample.",
        ),
    ),
    misleading=Clue(
        "greedy-answers",
        "At temperature 0 a likeliest draft is the right draft, so the whole greedy suite passes. It proves the "
        "bookkeeping of speculation and nothing about its rule.",
    ),
    lesson=(
        "q has to be the probability with which the draft token was really chosen. Test exactness where it can fail: "
        "at temperature 1, on a vocabulary small enough to count, with the target as its own draft."
    ),
)

TWICE = Exhibit(
    name="far-off-mean",
    title="An average that more samples do not mend",
    kind="serving",
    symptom=(
        "Speculation is on; each first token is as likely as it should be, greedy answers are right, and the "
        "acceptance rate is believable. A researcher who estimates an expectation from ten thousand samples finds it "
        "far off, and more samples do not help."
    ),
    faults=(faults.SAME_NUMBERS,),
    run=runs(seen.sampled),
    looks=lambda served: [*seen.dashboard(served), seen.greedy_wrong(served), seen.first_tokens_follow(served)],
    trace=lambda served: [seen.follows(served)],
    measurements=seen.USUAL,
    innocents=(
        NOT_ATTENTION,
        NOT_SAMPLER,
        Suspect(
            "drafts",
            "a draft takes its likeliest token and is verified as if it had been sampled",
            "With the target as its own draft the answers would then be a handful of texts; they are many.",
        ),
        Suspect(
            "requests",
            "several requests have the same seed",
            "Every request has a seed of its own, and without drafts the same seeds give the right distribution.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "one for each accepted token",
            "A rejection takes one number to reject and one to sample anew, so the next pass still begins with numbers "
            "that were used.",
            ({"sample.draw.count += numbers": "sample.draw.count += len(ids) - 1"},),
        ),
        WrongFix(
            "back to the first number",
            "A generator that is seeded anew in each pass gives each pass the same numbers: the same fault in a purer "
            "form.",
            ({"sample.draw.count += numbers": "sample.draw.count = 0"},),
        ),
    ),
    investigation=(
        Clue(
            "without-drafts",
            "The same seeds without speculation follow the distribution: requests, seeds and sampler are right.",
        ),
        Clue(
            "pairs-of-tokens",
            "The second token depends on the first more than the model says. Tokens one by one are right and together "
            "they are not, so what is wrong is what links them: their random numbers.",
        ),
    ),
    misleading=Clue(
        "first-tokens",
        "The first token is exact, and so is any single draw. A histogram of one token cannot show that two draws are "
        "not independent.",
    ),
    lesson=(
        "Randomness has a book to keep: which numbers were used, by whom. Test pairs and not only marginals; counters "
        "instead of generator states make the book visible."
    ),
)

AS_IF_CERTAIN = Exhibit(
    name="the-review",
    title="The review that found a bias",
    kind="serving",
    symptom=(
        "A reviewer writes: the drafts are sampled, but verification treats them as if their probability were 1. It "
        "accepts with p(x) where min(1, p(x)/q(x)) is right, so the output must be biased, and the low acceptance rate "
        "proves it. Find the bias, or answer the review."
    ),
    faults=(faults.AS_IF_CERTAIN,),
    verdict="accepting x with p(x), and else sampling from p without x, gives p: it only accepts less",
    run=runs(seen.sampled),
    looks=lambda served: [*seen.dashboard(served), seen.greedy_wrong(served), seen.first_tokens_follow(served)],
    trace=lambda served: [seen.follows(served), seen.greedy_wrong(served)],
    measurements=seen.USUAL,
    innocents=(
        Suspect(
            "verification",
            "the output is biased towards the draft's favourite tokens",
            "Pairs of tokens follow the target's distribution within the noise of the sample.",
        ),
        Suspect(
            "verification",
            "what is left after a rejection has to be p - q",
            "It has to fit the rule of acceptance. With q = 1 at x, max(p - q, 0) is p without x, which is what is "
            "sampled.",
        ),
        Suspect(
            "drafts",
            "the draft is so bad that the target corrects it all the time",
            "The overlap of the two distributions is several times the rate at which tokens are accepted: the rule is "
            "wasteful, and the draft is not bad.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "q of one for all tokens",
            "The ratio is p(x) as before, but what is left is now max(p - 1, 0), nothing, and the code falls back on "
            "p: x gets a second chance after it was rejected. This is biased.",
            ({"drafts.append(Draft(guesses, q))": "drafts.append(Draft(guesses, None if q is None else q * 0 + 1))"},),
        ),
        WrongFix(
            "half of q",
            "More is accepted, and too much: tokens come out more often than the target says.",
            ({"drafts.append(Draft(guesses, q))": "drafts.append(Draft(guesses, None if q is None else q / 2))"},),
        ),
    ),
    investigation=(
        Clue(
            "pairs-of-tokens",
            "The counts are the target's. A claim about a distribution is decided by counting, and here it is decided.",
        ),
        Clue(
            "acceptance",
            "Far fewer draft tokens are accepted than an exact rule could accept. That is the price, and it is paid in "
            "time only.",
        ),
    ),
    misleading=Clue(
        "target-drafts",
        "With p = q an exact rule accepts everything and this one does not, which looks like proof of the bias. It "
        "proves that the rule does not know q.",
    ),
    lesson=(
        "Lossless and efficient are two questions. Any rule of acceptance with its own residual is exact; min(1, p/q) "
        "is the one that accepts most. Passing q would make it faster, and not one token more right."
    ),
)

EXHIBITS = (LIKELIEST, TWICE, AS_IF_CERTAIN)
