"""What runs on ranks in these tests, and what one process answers."""

import random
from dataclasses import replace

from minillm.measure import ledger
from minillm.model import ModelConfig, Transformer
from minillm.model.config import MoEConfig
from minillm.model.draw import sample_seed
from minillm.model.generate import generate
from minillm.quantize.formats import Int
from minillm.quantize.in_place import Settings, quantize, quantized_layers
from minillm.quantize.kernels import DEQUANTIZE
from minillm.serve import LLM, SamplingParams, over_ranks

CONFIG = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)  # 61 words, 2 kv heads: both are uneven on 4
VARIANTS = {
    "plain": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True, qk_norm=True, qkv_bias=True, intermediate_size=50),
    "window": replace(CONFIG, sliding_window=5),
    "experts": replace(CONFIG, moe=MoEConfig(4, 2)),
    "quantized": CONFIG,
    "deep": replace(CONFIG, num_layers=5, full_attention_layers=(4,), sliding_window=6),
}
TIGHT = {"block_size": 4, "num_blocks": 20, "token_budget": 32, "max_num_seqs": 8, "reserve": 0}
CASES = {  # name -> (variant of the model, options of the engine)
    "plain": ("plain", {}),
    "no-prefix-cache": ("plain", {**TIGHT, "prefix_cache": False}),
    "chunks": ("plain", {**TIGHT, "chunk": 3}),
    "recomputed": ("plain", TIGHT),
    "swapped": ("plain", {**TIGHT, "preemption": "swap"}),
    "ahead": ("plain", {**TIGHT, "async_scheduling": True}),
    "ahead-swapped": ("plain", {**TIGHT, "async_scheduling": True, "preemption": "swap"}),
    "drafts": ("plain", {**TIGHT, "proposer": "ngram", "k": 3}),
    "replayed": ("plain", {**TIGHT, "graphs": True}),
    "quantized": ("quantized", TIGHT),
    "tied": ("tied", TIGHT),
    "window": ("window", TIGHT),
    "experts": ("experts", TIGHT),
}
OF_STAGES = [name for name, (_, options) in CASES.items() if not options.keys() & {"async_scheduling", "graphs"}]
CASES |= {"deep": ("deep", TIGHT), "deep-drafts": ("deep", {**TIGHT, "proposer": "ngram", "preemption": "swap"})}


def model_of(variant):
    model = Transformer(VARIANTS[variant], seed=2)
    if variant == "quantized":
        quantize(model, Settings(Int(bits=4, group=8)))
        for layer in quantized_layers(model).values():
            layer.use(DEQUANTIZE)  # in float32: the packed kernel rounds its inputs, and so would each rank's share
    return model


def requests_of(seed, count, longest=20):
    """(prompt, params): shared prefixes, forks, penalties, stops, first tokens."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(61) for _ in range(length)] for length in (24, 33)]
    requests = []
    for number in range(count):
        own = [rng.randrange(61) for _ in range(rng.randrange(1, 14))]
        prompt = rng.choice(prefixes)[: rng.choice([8, 24, 33])] + own if number % 3 else own
        how = {}
        if number % 4 == 1:
            how = {"temperature": 0.8, "seed": number, "top_k": rng.choice([None, 9]), "top_p": rng.choice([1, 0.9])}
        if number % 8 == 3:
            how = {"repetition_penalty": 1.2, "logprobs": 2, "seed": 1}
        if number % 8 == 4:
            how |= {"first_tokens": [3, 5, 8]}
        n = 3 if number % 8 in (1, 6) else 1
        params = SamplingParams(
            rng.randrange(1, longest), n=n, stop_tokens=[rng.randrange(61)], **{"seed": number} | how
        )
        requests.append((prompt, params))
    return requests


def naive(model, prompt, params):
    """Answers of the naive loop, for greedy requests."""
    answers = []
    for index in range(params.n):
        how = {"temperature": params.temperature, "seed": sample_seed(params.seed or 0, index)}
        how |= {"stop": params.stop_tokens, "first": list(params.first_tokens) or None}
        answers.append(list(generate(model, prompt, params.max_tokens, **how)))
    return answers


def alone(model, requests):
    """Answers of one process, each request by itself."""
    llm = LLM(model, num_blocks=64)
    return [[answer.ids for answer in llm.generate([prompt], params)[0].answers] for prompt, params in requests]


def drive(llm, requests, seed, cancels=0.0):
    """(answers by request; whether it was cancelled): requests arrive a few a step, in any order, and some are
    cancelled."""
    rng = random.Random(seed)
    waiting = rng.sample(range(len(requests)), len(requests))
    outputs, end_at = {}, {}
    for step in range(3000):
        for _ in range(rng.randrange(4)):
            if waiting:
                number = waiting.pop()
                llm.add(*requests[number], request_id=str(number), priority=rng.randrange(-1, 2))
                if rng.random() < cancels:
                    end_at.setdefault(step + rng.randrange(1, 30), []).append(str(number))
        for name in end_at.pop(step, ()):
            if name not in outputs:
                llm.cancel(name)
        outputs |= {output.request_id: output for output in llm.step()}
        if len(outputs) == len(requests):
            break
    pool = llm.pool
    assert pool.used == 0 and pool.references == [0] * pool.total and pool.free_host == pool.num_host_blocks
    assert llm.unfinished == 0 and not llm.scheduler.running
    found = []
    for number in range(len(requests)):
        output = outputs[str(number)]
        assert output.error is None, output.error
        found.append([(answer.ids, answer.reason) for answer in output.answers])
    return found, sum(output.preemptions for output in outputs.values())


def mixed(group, names, count, seed, pp=1):
    """For each case: the answers to mixed requests, and how often one was preempted."""
    found = {}
    for name in names:
        variant, options = CASES[name]
        requests, options = requests_of(seed, count), {"pp": pp, **options}
        found[name] = over_ranks(group, model_of(variant), lambda llm, r=requests: drive(llm, r, seed), **options)
    return found


def random_sequences(group, seeds, options, requests):
    """Arrivals and cancellations by each seed, one after the other, on one engine."""
    return over_ranks(
        group, model_of("plain"), lambda llm: [drive(llm, requests, seed, 0.3)[0] for seed in seeds], **options
    )


def traffic(group, prompts, params, options):
    """(op -> calls and bytes of this rank; on rank 0 each step's inputs, the engine's records and its answers)."""
    steps = []

    def use(llm):
        execute = llm.runner.execute
        llm.runner.execute = lambda step: (steps.append(step), execute(step))[1]
        answers = [[answer.ids for answer in output.answers] for output in llm.generate(prompts, params)]
        return steps, list(llm.records), answers

    with ledger() as book:
        found = over_ranks(group, model_of("plain"), use, num_blocks=64, block_size=4, **options)
    ops = ("all_reduce", "all_gather", "send", "recv")
    return {op: (sum(event.op == op for event in book.events), book.bytes(op=op)) for op in ops}, found
