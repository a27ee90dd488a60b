"""Faults of serving. A text that a repair has to find stands beside the fault, under a name of its own."""

from course.shared.faults.patches import Fault

SCHEDULER = "minillm.serve.schedule.scheduler:Scheduler"

# The key of a block.

TOKENS = "tuple(self.tokens[start : start + block_size])"
ONE_BYTE = Fault(
    "minillm.serve.schedule.sequence:Sequence.prefixes",
    {TOKENS: "tuple(token & 0xFF for token in self.tokens[start : start + block_size])"},
    place="prefix cache, the key of a block",
    mechanism="the key keeps only a part of each token, so other tokens match",
    shipped=("waybarrios/vllm-mlx#444", "openvinotoolkit/openvino.genai#3722"),
)
NAMESPACE, OWNERS = "minillm.serve.schedule.blocks:cache_namespace", "repr((adapter, salt))"
NO_SALT = Fault(
    NAMESPACE,
    {OWNERS: "repr((adapter,))"},
    ("minillm.serve.requests.request:cache_namespace",),
    place="prefix cache, the namespace",
    mechanism="a tenant's salt does not reach the key, so tenants share blocks",
    shipped=("vllm-project/vllm#44701",),
)
NO_ADAPTER = Fault(
    NAMESPACE,
    {OWNERS: "repr((salt,))"},
    ("minillm.serve.requests.request:cache_namespace",),
    place="prefix cache, the namespace",
    mechanism="the adapter does not reach the key, so a prompt goes on from keys that another adapter computed",
    shipped=("vllm-project/vllm#3264", "vllm-project/vllm#30931"),
)
KEPT_APART = "cache_namespace(adapter and adapter.cache_key, salt)"
PARAMS_IN_KEY = Fault(
    "minillm.serve.requests.request:new_request",
    {KEPT_APART: "cache_namespace(adapter and adapter.cache_key, repr((salt, params)))"},
    ("minillm.serve.requests.table:new_request",),
    place="prefix cache, the namespace",
    mechanism="what a request asks of the sampler is part of the key of its blocks",
    shipped=("NVIDIA/TensorRT-LLM#18156",),
)
WHOLE_PROMPT = Fault(
    f"{SCHEDULER}._prefixes",
    {"(sequence.num_tokens - 1) // self.pool.block_size": "sequence.num_tokens // self.pool.block_size"},
    place="prefix cache, lookup",
    mechanism="a hit covers the whole prompt, so that there is no query left to compute",
    shipped=("GeeeekExplorer/nano-vllm#199", "GeeeekExplorer/nano-vllm#144"),
)

# Blocks and what is read from them.

REACHABLE = "reachable(keys - queries, queries"
MASK_FROM_ZERO = Fault(
    "minillm.model.paged.gather:Gathered.prepare",
    {REACHABLE: "reachable(0, queries"},
    place="attention, the mask",
    mechanism="it counts queries from the first key, not from the place where they stand",
    shipped=("meta-pytorch/gpt-fast#233",),
)
RELEASED_TWICE = 'raise ValueError(f"block {block} is released twice: nobody holds it.")'
FREED_WHILE_SHARED = Fault(
    "minillm.serve.schedule.blocks:BlockPool.release",
    {RELEASED_TWICE: "continue", "self.references[block] -= 1": "self.references[block] = 0"},
    place="block pool, release",
    mechanism="a released block is free, even if other tables hold it",
    shipped=("sgl-project/mini-sglang#142",),
)
OWN_BLOCK = "elif (computed % size and references[sequence.blocks[-1]] == 1) or self._grow(sequence, plan):"
LATE_COPY = Fault(
    f"{SCHEDULER}.schedule",
    {OWN_BLOCK: OWN_BLOCK.replace("elif", "elif 0 < computed % size < size - 1 or")},
    place="scheduler, decoding within a block",
    mechanism="a shared block is written without being copied first",
    shipped=("xLLM-AI/xllm#1984",),
)
MOVE, PASS = "    self._move_blocks(step.moves)\n", "    outputs = self._forward(step, before)\n"
MOVES_ALONE = "    if not len(step.tokens):\n        self._sampled = before\n        return StepOutputs()\n"
MOVED_AFTER = Fault(
    "minillm.serve.run.model_runner:Runner.execute",
    {MOVE + MOVES_ALONE + PASS: MOVES_ALONE + PASS + MOVE},
    place="runner, the order of a step",
    mechanism="blocks move after the pass, which has written into them by then",
    shipped=("vllm-project/vllm#52360",),
)

# The plan of a step.

BUDGET, PLANNED = "    budget = self.token_budget - len(batch)\n", "    if drafts:\n"
PROMPTS_FIRST = Fault(
    f"{SCHEDULER}.schedule",
    {
        BUDGET: "    if prompts:\n        batch.clear()\n" + BUDGET,
        PLANNED: "    if plan.admitted:\n"
        "        batch[:] = [each for each in batch if each[0] in plan.admitted or each[0] in prompts]\n" + PLANNED,
    },
    place="scheduler, the plan of a step",
    mechanism="a step computes pieces of prompts or decodes, and never both",
    shipped=("GeeeekExplorer/nano-vllm#73", "sgl-project/sglang#32549", "arxiv.org/abs/2308.16369"),
)
BACK_OF_THE_QUEUE = Fault(
    f"{SCHEDULER}._preempt",
    {"self._wait(sequence)": "self.enqueue(sequence)"},
    place="scheduler, preemption",
    mechanism="a preempted sequence queues up again as if it had just arrived",
    shipped=("sgl-project/sglang#37260",),
)
WANTED = "self.pool.blocks_for(sequence.wanted(self.piece, skipped))"
RESERVED = Fault(
    f"{SCHEDULER}._admit",
    {WANTED: "self.pool.blocks_for(sequence.limit)"},
    place="scheduler, admission",
    mechanism="a sequence is given blocks for its whole answer before it has begun",
    shipped=("arxiv.org/abs/2309.06180",),
)
BEGUN = "    plan, prompts, drafts = Plan(), [], 0\n"
LIVELOCK = Fault(
    f"{SCHEDULER}.schedule",
    {
        BEGUN: BEGUN + "    thrown, fits = [], lambda sequence: (\n"
        "        self.pool.blocks_for(sequence.num_tokens)\n"
        "        <= self.pool.available - self.reserve * len(self.running)\n"
        "    )\n"
        "    while (first := self._first_waiting()) and self.running and not fits(first):\n"
        "        thrown.append(self.running[-1])\n"
        "        self._preempt(thrown[-1])\n",
        PLANNED: "    plan.preempted += thrown\n" + PLANNED,
    },
    place="scheduler, admission",
    mechanism="a request that does not fit preempts a running one, earlier or later, and tries again",
    shipped=("GeeeekExplorer/nano-vllm#274", "GeeeekExplorer/nano-vllm#277"),
)
GIVEN = "    size, computed = self.pool.block_size, sequence.num_computed\n"
COUNTED_TOO_EARLY = Fault(
    f"{SCHEDULER}._give",
    {
        GIVEN: "    if sequence.preemptions and plan.admitted and plan.admitted[-1] is sequence:\n"
        "        tokens = min(sequence.num_tokens, budget, self.chunk)\n"
        "        plan.batch.append((sequence, tokens))\n"
        "        return tokens\n" + GIVEN
    },
    place="scheduler, admission",
    mechanism="what a returning sequence lacks is counted before it is known which of its blocks are still cached",
    shipped=("GeeeekExplorer/nano-vllm#211",),
)
SEATS = "self.num_seqs -= sequence.num_seqs"
ONE_SEAT_BACK = Fault(
    f"{SCHEDULER}._stop_running",
    {SEATS: "self.num_seqs -= 1"},
    place="scheduler, seats",
    mechanism="a request that is cancelled within its prompt gives back one of its n seats",
    shipped=("raullenchai/Rapid-MLX#1759",),
)

# Drafts, and numbers.

DRAWN = "return draw_from(q, draws), q"
LIKELIEST_DRAFT = Fault(
    "minillm.serve.speculate.on_device:next_guesses",
    {DRAWN: "return q.argmax(-1), q"},
    tuple(f"minillm.serve.speculate.proposers.{name}:next_guesses" for name in ("draft_model", "medusa", "eagle")),
    place="drafts",
    mechanism="a draft takes its likeliest token and is verified as if it had been sampled from q",
    shipped=("huggingface/transformers#32867",),
)
USED = "sample.draw.count += numbers"
SAME_NUMBERS = Fault(
    "minillm.serve.speculate.speculation:Speculation.check",
    {USED: "sample.draw.count += 0"},
    place="verification",
    mechanism="it forgets how many random numbers it used, and the next pass draws them again",
    shipped=("github.com/feifeibear/LLMSpeculativeSampling",),
)
WITH_Q = "drafts.append(Draft(guesses, q))"
AS_IF_CERTAIN = Fault(
    "minillm.serve.speculate.proposers.draft_model:DraftModel._draft",
    {WITH_Q: "drafts.append(Draft(guesses))"},
    place="drafts",
    mechanism="a sampled draft token is verified as if its probability had been 1, which is exact and accepts less",
    shipped=("SafeAILab/EAGLE#329",),
)
HOLDER = "if holder is not sequence or known > len(tokens):"
STALE_ROW = Fault(
    "minillm.serve.run.penalties:SeenOnHost.penalties",
    {HOLDER: "if known > len(tokens):"},
    place="sampler, tokens seen",
    mechanism="the row that a sequence gets still holds the tokens of the one before it",
    shipped=("vllm-project/vllm#5639",),
)
OTHER_GROUPS = Fault(
    "minillm.model.paged.gather:Gathered.prepare",
    {"room = (GROUP_BYTES if": "room = (0 if"},
    place="attention, groups",
    mechanism="sums in another order round otherwise, which is no defect",
    shipped=("vllm-project/vllm#9567", "vllm-project/vllm#11658"),
)
