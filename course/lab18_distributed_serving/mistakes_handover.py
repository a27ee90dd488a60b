"""Spoilers of lab 18: hand-overs that wait with half of their blocks or believe late messages, and splits."""

from course.kit.exercises import KnownAnswers

hand_over = KnownAnswers("hand-over")

hand_over.mistake(
    "as many as there are",
    {
        "if count > len(self.free):\n            return None\n        blocks = [self.free.pop() for _ in range(count)]":
        "blocks = [self.free.pop() for _ in range(min(count, len(self.free)))]",
    },
    expect="two such requests wait for ever",
)  # fmt: skip
hand_over.mistake(
    "held while it waits",
    {"return None": "self.held[request] = [self.free.pop() for _ in range(len(self.free))]\n            return None"},
    expect="two such requests wait for ever",
)
hand_over.mistake(
    "any attempt will do",
    {"if expected != attempt or index not in missing:": "if index not in missing:"},
    expect="a message of the first comes",
)
hand_over.mistake(
    "written before it is looked at",
    {
        "expected, missing = self.missing.get(request, (None, ()))":
        "expected, missing = self.missing.get(request, (None, ()))\n"
        "        if request in self.held and index < len(self.held[request]):\n"
        "            self.cache[self.held[request][index]] = content",
    },
    expect="a message of the first comes",
)  # fmt: skip
hand_over.mistake(
    "a count of messages",
    {
        "if expected != attempt or index not in missing:": "if expected != attempt:",
        "missing.remove(index)": "missing.pop()",
    },
    expect="is not whole|is whole|arrived last",
)
hand_over.mistake(
    "an older attempt's blocks are lost", {"self.give_up(request)\n        if count": "if count"}, expect="free"
)
hand_over.mistake(
    "given up, but not freed",
    {"            self.release(request)\n": "            self.held.pop(request)\n"},
    expect="a was given up, and 0 of 1 blocks is free",
)
hand_over.mistake("its own list handed out", {"return list(blocks)": "return blocks"}, expect="a list of its own")
hand_over.mistake(
    "a whole request is given up as well",
    {
        "if request in self.missing:\n            del self.missing[request]":
        "if request in self.held:\n            self.missing.pop(request, None)",
    },
    expect="a is whole and decodes",
)  # fmt: skip
hand_over.mistake(
    "gives up what it never held",
    {
        "if request in self.missing:\n            del self.missing[request]":
        "if request in self.missing or request not in self.held:\n            self.missing.pop(request, None)",
    },
    expect="KeyError",
)  # fmt: skip


hand_over.mistake(
    "written again when it comes again",
    {
        "if expected != attempt or index not in missing:\n            return False\n":
        "if request not in self.held or expected not in (None, attempt):\n            return False\n",
        "missing.remove(index)":
        "if index not in missing:\n            return False\n        missing.remove(index)",
    },
    expect="comes a second time",
)  # fmt: skip
hand_over.mistake(
    "known by its content",
    {"index not in missing:": "self.cache.get(self.held[request][index]) == content:"},
    expect="b's only message arrived",
)
hand_over.mistake(
    "an older attempt keeps its blocks if there are too few",
    {
        "self.give_up(request)\n        if count > len(self.free):":
        "older = self.held[request] if request in self.missing else ()\n"
        "        if count > len(self.free) + len(older):",
        "blocks = [self": "self.give_up(request)\n        blocks = [self",
    },
    expect="its second asks for 5",
)  # fmt: skip

hand_over.alternative(
    "a free block is empty",
    {
        "self.free += self.held.pop(request)":
        "for block in self.held.pop(request):\n"
        "            self.cache.pop(block, None)\n            self.free.append(block)",
    },
)  # fmt: skip
hand_over.alternative(
    "blocks are emptied when they are set aside",
    {"return list(blocks)": "self.cache.update(dict.fromkeys(blocks))\n        return list(blocks)"},
)


@hand_over.alternative("a record for each request")
class Records:
    def __init__(self, num_blocks):
        self.free, self.cache, self.records = list(range(num_blocks)), {}, {}

    def allocate(self, request, attempt, count):
        self.give_up(request)
        if len(self.free) < count:
            return None
        blocks, self.free = self.free[:count], self.free[count:]
        self.records[request] = {"attempt": attempt, "blocks": blocks, "arrived": [False] * count}
        return blocks[:]

    def arrive(self, request, attempt, index, content):
        record = self.records.get(request)
        if record is None or record["attempt"] != attempt or record["arrived"][index]:
            return False
        record["arrived"][index] = True
        self.cache[record["blocks"][index]] = content
        return all(record["arrived"])

    def give_up(self, request):
        if request in self.records and not all(self.records[request]["arrived"]):
            self.release(request)

    def release(self, request):
        self.free.extend(self.records.pop(request)["blocks"])


# Cards divided.

BEST = "best = max(range(1, cards), key=sustained)"
RATE = "prompts = 2 * spare / (prompt_s**2 + 2 * prompt_s * spare)"


choose_split = KnownAnswers("choose-split")

choose_split.mistake(
    "no wait",
    {RATE: "prompts = 1 / prompt_s"},
    says="At one prompt every prompt_s seconds the queue grows without end: leave time for the wait.",
)
choose_split.mistake(
    "exponential services",
    {RATE: "prompts = spare / (prompt_s * (prompt_s + spare))"},
    says="Prompts that take equally long wait half as long as those of an M/M/1 server.",
)
choose_split.mistake(
    "the limit is the wait",
    {"spare = ttft - prompt_s": "spare = ttft"},
    says="The prompt itself takes prompt_s of the limit; only the rest may be spent waiting.",
)
choose_split.mistake(
    "all that fit",
    {"if step_s(b) <= tpot)": "if b <= most)"},
    says="All sequences that fit run at once, and their step takes longer than the limit on TPOT.",
)
choose_split.mistake(
    "tokens per second",
    {"answers = running / (output * step_s(running))": "answers = running / step_s(running)"},
    says="This is tokens per second: an answer has `output` of them.",
)
choose_split.mistake(
    "a step below the limit",
    {"step_s(b) <= tpot": "step_s(b) < tpot or b == 1"},
    says="A step that takes exactly the limit is within it: compare with <=.",
)
choose_split.mistake(
    "one sequence less than fit",
    {"range(1, most + 1)": "range(1, most)"},
    says="`most` sequences fit, and so may run: range ends one before its end.",
)
choose_split.mistake("half of the cards", {BEST: "best = cards // 2"}, expect="so the best division sustains")
choose_split.mistake(
    "a fraction of the cards",
    {BEST: "best = max(1, min(cards - 1, int(cards * answers / (prompts + answers))))"},
    expect="so the best division sustains",
)


choose_split.mistake(
    "the balance rounded to the nearest",
    {BEST: "best = max(1, min(cards - 1, round(cards * answers / (prompts + answers))))"},
    expect="so the best division sustains",
)
choose_split.mistake(
    "a step that grows by a line",
    {
        "running = max(b for b in range(1, most + 1) if step_s(b) <= tpot)":
        "first, slope = step_s(1), step_s(2) - step_s(1)\n"
        "    running = max(1, min(most, int(1 + (tpot - first) / slope + 1e-9)))",
    },
    expect="ms more for each beyond",
)  # fmt: skip


@choose_split.alternative("both roundings of the balance")
def by_balance(cards, prompt_s, step_s, most, output, ttft, tpot):
    wait = ttft - prompt_s
    prompts = 1 / (prompt_s + prompt_s**2 / (2 * wait))
    running = 1
    while running < most and step_s(running + 1) <= tpot:
        running += 1
    answers = running / output / step_s(running)
    balance = cards * answers / (prompts + answers)
    counts = [min(cards - 1, max(1, int(balance) + more)) for more in (0, 1)]
    rate, count = max((min(n * prompts, (cards - n) * answers), n) for n in counts)
    return count, rate
