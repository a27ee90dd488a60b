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

utilisation.mistake(
    "half of the positions, rounded down",
    {"causal_context(self.config.seq_len, model.sliding_window)": "(self.config.seq_len - 1) // 2"},
    says="A token looks at itself, too: on average at (seq_len + 1) / 2 positions.",
)


slow_with_clipping = KnownAnswers("slow-with-clipping")

slow_with_clipping.mistake(
    "nothing is counted",
    {"            counted.append(weight.detach().double())": "            pass"},
    expect="append what each microbatch counts",
)


never_ends = KnownAnswers("never-ends")

never_ends.mistake(
    "whether there is a prefix cache or not", {" if self.pool.prefix_cache else 0": ""}, expect="without a prefix cache"
)


two_gpus_one_run = KnownAnswers("two-gpus-one-run")

two_gpus_one_run.mistake(
    "shuffled in any case", {"    if not self.shuffle:\n        return offsets\n": ""}, expect="shuffle=False: you read"
)
two_gpus_one_run.mistake(
    "a context for a layout that reduces nothing",
    {" or (self.layout.zero == 0 and self.module is self.model)": ""},
    expect="is one needed",
)

slow_with_clipping.alternative("divided and multiplied", {"return loss(nll)": "return loss(nll * count) / count"})
two_gpus_one_run.alternative(
    "in another order",
    {"position + self.rank + self.world_size * np.arange": "self.rank + position + self.world_size * np.arange"},
)
utilisation.alternative(
    "the average by hand",
    {"causal_context(self.config.seq_len, model.sliding_window)": "(self.config.seq_len + 1) / 2"},
)
never_ends.alternative(
    "rounded up, less one",
    {"(sequence.num_tokens - 1) // self.pool.block_size": "-(-sequence.num_tokens // self.pool.block_size) - 1"},
)
