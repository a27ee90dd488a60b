"""Spoilers of lab 22: the exhibits' own wrong repairs, and other right ones."""

from course.kit.exercises import KnownAnswers
from course.lab22_bug_museum import museum
from course.shared.faults.patches import compiled

for _name in ("slow-with-clipping", "two-gpus-one-run", "utilisation", "never-ends"):
    _exhibit = museum.exhibit(_name)
    for _fix in _exhibit.wrong_fixes:
        _code = tuple(
            fault.replacement() if edits is None else compiled(fault.target, edits)
            for fault, edits in zip(_exhibit.faults, _fix.code, strict=True)
        )
        KnownAnswers(_name).mistake(_fix.label, says=_fix.says)(_code if len(_code) > 1 else _code[0])


utilisation = KnownAnswers("utilisation")
CONTEXT = "causal_context(self.config.seq_len, model.sliding_window)"

utilisation.mistake(
    "half of the positions, rounded down",
    {CONTEXT: "(self.config.seq_len - 1) // 2"},
    says="A token looks at itself, too: on average at (seq_len + 1) / 2 positions.",
)
utilisation.mistake(
    "without the window",
    {CONTEXT: "causal_context(self.config.seq_len)"},
    says="A token looks at no more positions than the sliding window has, however long the sequence is.",
)
utilisation.mistake(
    "the longest sequence",
    {CONTEXT: "causal_context(model.max_seq_len, model.sliding_window)"},
    says="`max_seq_len` is the longest that the model can take; the run's sequences have `config.seq_len` tokens.",
)


slow_with_clipping = KnownAnswers("slow-with-clipping")

slow_with_clipping.mistake(
    "nothing is counted",
    {"            counted.append(weight.detach().double())": "            pass"},
    expect="append what each microbatch counts",
)
slow_with_clipping.mistake(
    "counted as a Python number",
    {"weight.detach().double()": "float(weight)"},
    expect="it must get tensors",
)
slow_with_clipping.mistake(
    "chunks",
    {
        "tokens.tensor_split(count), targets.tensor_split(count)": "tokens.chunk(count), targets.chunk(count)",
        "weights.tensor_split(count)": "weights.chunk(count)",
    },
    expect="7 rows are cut into 4 pieces",
)


never_ends = KnownAnswers("never-ends")
FULL = "(sequence.num_tokens - 1) // self.pool.block_size"

never_ends.mistake(
    "whether there is a prefix cache or not", {" if self.pool.prefix_cache else 0": ""}, expect="without a prefix cache"
)
never_ends.mistake("blocks of eight", {"(full, self.pool.block_size)": "(full, 8)"}, expect="key 0 is not that of")
never_ends.mistake(
    "the longest prefix first",
    {"(full, self.pool.block_size)": "(full, self.pool.block_size)[::-1]"},
    expect="key 0 is not that of the prompt's first",
)


two_gpus_one_run = KnownAnswers("two-gpus-one-run")
CONTEXT_OF_MICROBATCH = "return self.stepped.no_sync() if self.layout.zero in (1, 2) else self.module.no_sync()"

two_gpus_one_run.mistake(
    "shuffled in any case", {"    if not self.shuffle:\n        return offsets\n": ""}, expect="shuffle=False: you read"
)
two_gpus_one_run.mistake(
    "a context for a layout that reduces nothing",
    {" or (self.layout.zero == 0 and self.module is self.model)": ""},
    expect="is one needed",
)
two_gpus_one_run.mistake(
    "left before the backward",
    {
        CONTEXT_OF_MICROBATCH: CONTEXT_OF_MICROBATCH.replace("return", "with")
        + ":\n        return contextlib.nullcontext()"
    },
    expect="nobody was kept from communicating while it ran",
)
two_gpus_one_run.mistake(
    "windows in a float array", {"np.empty_like(offsets)": "np.empty(self.batch_size)"}, expect="array of integers"
)

slow_with_clipping.alternative("divided and multiplied", {"return loss(nll)": "return loss(nll * count) / count"})
slow_with_clipping.alternative("the whole module's dtype", {"next(part.parameters())": "next(self.parameters())"})
two_gpus_one_run.alternative(
    "in another order",
    {"position + self.rank + self.world_size * np.arange": "self.rank + position + self.world_size * np.arange"},
)
two_gpus_one_run.alternative(
    "a generator as context",
    {
        "def accumulating(": "@contextlib.contextmanager\ndef accumulating(",
        "        return contextlib.nullcontext()": "        yield\n        return",
        CONTEXT_OF_MICROBATCH: CONTEXT_OF_MICROBATCH.replace("return", "with") + ":\n        yield",
    },
)
two_gpus_one_run.alternative("whether anything is averaged", {"self.module is self.model": "self.averaged_over == 1"})
utilisation.alternative(
    "the average by hand",
    {
        CONTEXT: "sum(min(i + 1, model.sliding_window or i + 1) for i in range(self.config.seq_len)) "
        "/ self.config.seq_len"
    },
)
never_ends.alternative("rounded up, less one", {FULL: "-(-sequence.num_tokens // self.pool.block_size) - 1"})
never_ends.alternative(
    "the pool's own names",
    {FULL: "self.pool.blocks_for(len(sequence.tokens)) - 1", "(full, self": "(full, block_size=self"},
)
