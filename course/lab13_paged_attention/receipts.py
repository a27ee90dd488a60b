"""What lab 13 claims: where tokens lie, what blocks waste, what a prefix, a fork and an eviction cost, what bugs leave.

Each function takes what a cell measured; those in CLAIMS measure for themselves when called without.
"""

from course.kit.receipts import Receipt, format_value, formula, receipt, row
from course.lab13_paged_attention import (
    experiments,
    experiments_breaks,
    experiments_sizes,
    experiments_stale,
    experiments_window,
    figures,
)
from course.lab13_paged_attention import experiments_sharing as sharing
from course.lab13_paged_attention import formulas as predict
from course.shared.table import Table, seconds, table
from minillm.predict.model import kv_bytes_per_token

PREFIX, OWN, REQUESTS, SIZE = 100, 20, 6, 16


def same_tokens_elsewhere(elsewhere=None) -> Receipt:
    """Keys and values of the same tokens after another beginning and at a later position."""
    elsewhere = elsewhere or sharing.same_tokens_elsewhere()
    return receipt(
        "the same tokens elsewhere",
        [
            row("wrong block used: next token's probabilities that move", None, elsewhere["moved"]),
            row("layer 0, other beginning: keys and values equal", True, elsewhere["keys, there"][0] < 1e-5),
            row("    later position: keys differ (rotated by position)", True, elsewhere["keys, later"][0] > 0.01),
            row("last layer, other beginning: values differ", True, elsewhere["values, there"][-1] > 0.01),
        ],
        open_rows=1,
    )


def by_layer(elsewhere=None) -> Table:
    """How far keys and values of the same tokens are apart, layer by layer."""
    elsewhere = elsewhere or sharing.same_tokens_elsewhere()
    where = {"there": "other beginning", "later": "later position"}
    kinds = [f"{what}, {place}" for place in where for what in ("keys", "values")]
    names = [f"{kind.split(', ')[0]}, {where[kind.split(', ')[1]]}" for kind in kinds]
    lines = [(name, *(f"{each:.3f}" for each in elsewhere[kind])) for name, kind in zip(names, kinds, strict=True)]
    layers = (f"layer {layer}" for layer in range(len(elsewhere[kinds[0]])))
    return table("the same 32 tokens: relative difference, measured", ("", *layers), lines)


def your_engine(parts) -> Receipt:
    """A small engine of the reader's parts, beside the plain loop with its cache in one piece."""
    from course.lab13_paged_attention.experiments_engine import three_requests

    engine, prompt, sibling, first_block, found, expected = three_requests(parts)
    hit = predict.cacheable_tokens(18, len(sibling), 8)
    right = [found[name] == expected[name] for name in found]
    return receipt(
        "your engine, beside the plain loop",
        [
            row(f"tokens of {', '.join(found)}: the plain loop's", [True] * len(found), right),
            row("tokens computed for the sibling's prompt", len(sibling) - hit, engine.passes[-4]),
            row("blocks copied for the fork", predict.fork_copies(len(prompt), 2, 8), len(engine.copies)),
            row("holders of the first block: three tables", 3, engine.pool.references[first_block]),
        ],
    )


def waste(wasted=None, guess_reserved=None, guess_blocks=None) -> Receipt:
    """Requests of code in blocks of 16 and in reservations of the whole context."""
    wasted = wasted or experiments.waste(SIZE, count=12)
    unused, lengths, context = wasted["unused"], wasted["lengths"], experiments.target().config.max_seq_len
    written, wanted = experiments.reserve(context)
    reserved = predict.reserved_waste(wanted, context)
    at_once = wasted["blocks"] * SIZE // context
    unused_share = predict.reserved_waste(lengths, context)
    return receipt(
        f"{len(lengths)} requests, blocks of {SIZE}",
        [
            row("most unused slots of a sequence, at any time: below 16", True, max(unused) < SIZE),
            row("    on average: (block - 1) / 2", predict.mean_unused_slots(SIZE), sum(unused) / len(unused), "", 0.2),
            row("unused share of four real caches of 512", reserved, 1 - sum(written) / (4 * context), "", 1e-9),
            formula("unused share of reservations, all requests: 1 - mean / 512", unused_share, guess=guess_reserved),
            row("unused share of blocks, all steps", None, 1 - wasted["filled"] / wasted["held"], guess=guess_blocks),
            row("sequences at once: in blocks, in reservations", None, (wasted["running"], at_once)),
            row("    more in blocks", True, wasted["running"] > at_once),
        ],
        open_rows=1,
        show="all requests|all steps|at once",
    )


def shared_prefix(with_cache=None, without=None) -> Receipt:
    """Requests that share a beginning, with and without a prefix cache."""
    with_cache = with_cache or sharing.share(PREFIX, OWN, REQUESTS)
    without = without or sharing.share(PREFIX, OWN, REQUESTS, cache=False)
    covered, saved = predict.cacheable_tokens(PREFIX, PREFIX + OWN, SIZE), predict.saved_blocks(PREFIX, REQUESTS, SIZE)
    passed = predict.computed_tokens(PREFIX, OWN, REQUESTS, SIZE)
    blocks = (
        REQUESTS * predict.blocks_for(PREFIX + OWN, SIZE),
        predict.shared_blocks(PREFIX, OWN, REQUESTS, SIZE),
    )
    return receipt(
        f"{REQUESTS} requests, {PREFIX} tokens shared, {OWN} own, blocks of {SIZE}",
        [
            row("prompt tokens computed: without a cache, with one", (REQUESTS * (PREFIX + OWN), passed),
                (without["passed"], with_cache["passed"])),
            row("    the difference is exactly the hits", with_cache["hit"], without["passed"] - with_cache["passed"]),
            row("    of each: full blocks only", covered, with_cache["hit"] / (REQUESTS - 1)),
            row("blocks: without a cache, with one", blocks, (without["blocks"], with_cache["blocks"])),
            row("    saved: (R - 1) · floor(P / b)", saved, without["blocks"] - with_cache["blocks"]),
            row("most holders of a block", REQUESTS, with_cache["holders"]),
            row("with and without a cache: the plain loop's tokens", True, with_cache["equal"] and without["equal"]),
            row("time to first token: without a cache, with one", None, (seconds(without["ttft"]),
                seconds(with_cache["ttft"]))),
        ],
        open_rows=1,
        show="saved|time to first token",
    )  # fmt: skip


def saved_shares() -> Table:
    """What sharing saves of the tokens held."""
    cases = ((100, 400, 2), (500, 500, 4), (1000, 500, 10), (1000, 200, 40))
    lines = [(str(r), str(p), str(u), f"{predict.saved_share(p, u, r):.0%}") for p, u, r in cases]
    return table("of the tokens held, by formula", ("requests", "shared", "own", "saved: (R-1)·P / (R·(P+U))"), lines)


def forks(forked=None) -> Receipt:
    """Three samples of one prompt: what is computed, copied and held."""
    forked = forked or figures.forks()
    answers = 3 * 13  # each sample's last token is drawn, and never goes in
    return receipt(
        "three samples of 22 + 14 tokens, blocks of 4",
        [
            row("tokens computed: the prompt once", 22 + answers, forked["computed"]),
            row("blocks copied: all samples but one", predict.fork_copies(22, 3, 4), forked["copied"]),
            row("blocks at the end", predict.fork_blocks(22, 13, 3, 4), forked["blocks"]),
            formula("    without sharing", 3 * predict.blocks_for(35, 4)),
            row("tokens equal to three requests of one sample each", True, forked["equal"]),
            row("blocks free or cached afterwards: all", *reversed(forked["left"])),
        ],
        open_rows=1,
    )


def chats(roomy=None, tight=None) -> Receipt:
    """Three users take four turns each, in a pool that holds their contexts and in one that does not."""
    roomy, tight = roomy or figures.chats(40), tight or figures.chats(20)
    said_before = roomy["prompts"][-4] + 9 - 1  # the last token drawn has no key yet
    findable = predict.cacheable_tokens(said_before, roomy["prompts"][-1], 8)
    prompts = sum(roomy["prompts"])  # of either pool
    shares = tuple(sum(chat["hits"]) / prompts for chat in (roomy, tight))
    by_turn = [tuple(sum(chat["hits"][first : first + 3]) for first in (0, 3, 6, 9)) for chat in (roomy, tight)]
    return receipt(
        "three users, four turns, blocks of 8",
        [
            row("share of the prompt tokens from the cache: 40 blocks, 20 blocks", None, shares),
            row("blocks evicted: 40 blocks, 20 blocks", None, (roomy["evicted"], tight["evicted"])),
            row("prompt tokens from the cache by turn, 40 blocks", None, by_turn[0]),
            row("    20 blocks", None, by_turn[1]),
            row("last turn, 40 blocks: full blocks of all said before", findable, roomy["hits"][-1]),
            row("free + cached + used = total", 20, sum(tight["free"])),
        ],
        open_rows=1,
    )


def broken_engines(findings: dict) -> Table:
    """What each engine has left behind, for the reader to diagnose."""
    names = ("wrong", "hit", "hit_expected", "uncounted", "empty_steps", "unfinished")
    lines = [(engine, *(getattr(found, name) for name in names)) for engine, found in findings.items()]
    return table(
        "seven requests through each engine, counted", ("engine", *(n.replace("_", " ") for n in names)), lines
    )


def traces_of_bugs(findings=None, diagnosis=None) -> Receipt:
    """What a sound engine and four broken ones leave."""
    findings = findings or experiments_breaks.findings()
    rows = [
        row(f"engine {name} has the bug", None, experiments_breaks.ENGINES[name], guess=bug)
        for name, bug in (diagnosis or {}).items()
    ]
    sound, byte, salt, shared, whole = findings.values()
    clean = (sound.wrong, sound.uncounted, sound.empty_steps, sound.unfinished)
    more = [found.hit > found.hit_expected for found in (byte, salt)]
    rows += [
        row("sound: wrong, uncounted, empty, unfinished", (0, 0, 0, 0), clean),
        row("    hits", sound.hit_expected, sound.hit),
        row("one byte per token: hits too many, answers wrong", (True, True), (more[0], byte.wrong > 0)),
        row("no salt: hits too many, every answer right", (True, 0), (more[1], salt.wrong)),
        row("frees shared blocks: hits right", shared.hit_expected, shared.hit),
        row("    counts wrong", True, shared.uncounted > 0),
        row("whole prompt: never ends, nothing computed", (True, True), (whole.unfinished > 0, whole.empty_steps > 0)),
    ]
    return receipt("what the receipts say", rows, open_rows=max(1, len(diagnosis or ())))


def stale_and_raced() -> Receipt:
    """New weights under a warm cache, a flipped bit in it, and two threads in a pool."""
    found, flipped = experiments_stale.new_weights(), experiments_stale.flipped_bits()
    prefix = 2000 * _per_token_and_room()[0]  # bytes of an 8B model's cache
    return receipt(
        "what neither a key nor a count sees",
        [
            row("new weights: the answer of a fresh engine, without and with a salt", (False, True), found["equal"]),
            row("two threads share a block of one holder: its count, without and with a lock", (2, 3),
                (experiments_stale.holders(lock=False), experiments_stale.holders(lock=True))),
            row(f"one bit of a cached key flipped, {flipped['of']} times: blocks that a checksum names", flipped["of"],
                flipped["named"]),
            row("    answers that become others", None, flipped["changed"]),
            row("    right again once the cache is empty", flipped["of"], flipped["repaired"]),
            formula("    8B model, prefix of 2,000 tokens: reading it once more, at 3.35 TB/s", prefix / 3.35e12, "s"),
            formula("    computing it, at 989 TFLOP/s", 2 * 8e9 * 2000 / 989e12, "s"),
            row("prompt tokens from the cache after the change", None, found["hit"]),
        ],
        open_rows=2,
        show="checksum|become others",
    )  # fmt: skip


def windows() -> Table:
    """A sequence of 140 tokens in a model whose layers all have a sliding window."""
    found = map(experiments_window.most_held, (None, 64, 32))
    lines = [(each.window or "none", each.expected, each.held, "yes" if each.equal else "no") for each in found]
    columns = ("sliding window of", "blocks held at most, formula", "measured", "tokens of the plain loop")
    return table(f"one sequence of 140 tokens, blocks of {SIZE}", columns, lines)


def block_sizes(swept=None) -> Table:
    """Five block sizes: what a hit covers, what is wasted, what attention costs."""
    lines = [
        (f"blocks of {found['block_size']}", found["hit_predicted"], found["hit"], found["unused"], found["blocks"],
         seconds(found["attention_s"]["copied together"]), seconds(found["attention_s"]["block by block"]))
        for found in swept or experiments_sizes.sweep()
    ]  # fmt: skip
    lines.append(("keys in one piece, no table", *[None] * 4, seconds(experiments_sizes.one_piece_seconds()), None))
    return table(
        "2 requests that share 200 tokens; 8 others that share none; a query over 480 keys (CPU time)",
        ("", "found of the 200, formula", "measured", "unused slots of each of the 8", "blocks they hold",
         "attention, copied together", "block by block"),
        lines,
    )  # fmt: skip


def transformers_pages() -> Receipt:
    """Hugging Face's paged cache on four requests with 70 shared tokens, where it is installed."""
    from course.lab13_paged_attention import experiments_peer as peer

    try:
        theirs = peer.transformers_pages()
    except ImportError:
        return receipt("transformers is not installed here: pip install 'transformers>=5.18,<6'", [])
    default = theirs["default_page"]
    return receipt(
        "transformers' paged cache, pages of 16",
        [
            row("its answers: the plain loop's tokens", True, theirs["equal"]),
            row("tokens found by the later three", tuple(theirs["expected"]), tuple(theirs["hits"])),
            row("pages it keeps for later: 4 shared, and 1 of each", 4 + 4, theirs["kept"]),
            row("its default page", None, default, "tokens"),
            row("    unused slots of these requests with it", None, theirs["unused"][default]),
            row("    with pages of 16", None, theirs["unused"][16]),
        ],
    )


def interview_numbers() -> Table:
    """The numbers behind the answers: 80 GB, 8 billion parameters in 16 bits, 32 layers, 8 kv heads of 128."""
    per_token, room = _per_token_and_room()
    lines = [
        ("1. KV bytes per token", format_value(per_token, "B")),
        ("1. tokens in 90 % of 80 GB less the weights", room),
        ("1. requests of 8,192 reserved", predict.requests_in_pool(room, 600, 8192)),
        ("1. requests of 600 tokens in blocks of 16", predict.requests_in_pool(room, 600, 16)),
        ("2. 64-bit keys, a billion blocks: chance that two are alike", predict.collision_chance(10**9, 64)),
        ("2. 32-bit keys, 100,000 blocks", predict.collision_chance(100_000, 32)),
    ]
    return table("numbers for the answers, by formula", ("", "computed"), lines)


def design_numbers() -> Table:
    """The numbers behind the design questions: the same model, blocks of 16 and of 128."""
    per_token, room = _per_token_and_room()
    blocks, each = room // 16, predict.blocks_for(2000, 16)
    shared = predict.cacheable_tokens(1500, 1800, 16) // 16
    lines = [
        ("A. tokens that fit", room),
        ("A. requests at once, nothing shared", blocks // each),
        ("    the prefix once", (blocks - shared) // (each - shared)),
        ("    prompt tokens computed per request, then", 1800 - 16 * shared),
        ("B. chats of 600 tokens, blocks of 16", predict.requests_in_pool(room, 600, 16)),
        ("    blocks of 128", predict.requests_in_pool(room, 600, 128)),
        ("    a block of 128", format_value(128 * per_token, "B")),
    ]
    return table("numbers for the design questions, by formula", ("", "computed"), lines)


def _per_token_and_room() -> tuple[int, int]:
    """Bytes of keys and values per token, and how many tokens fit beside the weights."""

    class Model8B:
        num_layers, num_kv_heads, head_dim = 32, 8, 128

    per_token = kv_bytes_per_token(Model8B)
    return per_token, int((0.9 * 80e9 - 16e9) / per_token)


CLAIMS = (same_tokens_elsewhere, waste, shared_prefix, forks, chats, traces_of_bugs, stale_and_raced)
