"""`python -m minillm generate PROMPT` streams one text; `--batch FILE` runs a file of prompts through `LLM` together.

FILE has one prompt per line, or JSON lines such as {"prompt": "def ", "max_tokens": 20, "temperature": 0.8, "n": 2}:
the fields of `SamplingParams`. A field comes from the line, else from the command line, else from the checkpoint's
generation_config.json; without that file the temperature is 0.8. A prompt of a file is taken as it is; a single prompt
that ends in a space is mended by `heal`. With --chat a prompt is the user's message, from which the checkpoint's chat
template makes the text.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from minillm.adapters.store import AdapterStore
from minillm.cli.answers import as_json, show, told, with_summary
from minillm.cli.given import is_given
from minillm.cli.prompts_file import Request, answered, naming, read_requests
from minillm.cli.ranks import check_ranks, hearing, on_ranks
from minillm.comm import is_root
from minillm.data import Tokenizer
from minillm.measure.provenance import JsonFile, provenance, write_json
from minillm.model import Transformer
from minillm.model.generate import device_of, folder_of, generate, heal
from minillm.model.hf.generation_config import read_generation_config
from minillm.quantize.kv import KV_FORMATS
from minillm.serve.engine import LLM
from minillm.serve.load import DTYPES, load_model
from minillm.serve.requests.output import Output
from minillm.serve.requests.params import SamplingParams
from minillm.serve.requests.prompts import prompt_ids
from minillm.serve.run.memory import default_num_blocks, gpu_limits, rows_of_each
from minillm.serve.speculate.registry import PROPOSERS, proposer_named

TEMPERATURE = 0.8  # of a checkpoint that says nothing
BLOCK_SIZE = 16
TEXT, SAMPLING, MODEL = (partial(Option, rich_help_panel=panel) for panel in ("Prompts", "Sampling", "Model"))


def command(
    invocation: typer.Context,
    prompt: Annotated[
        str, Argument(help="Text to go on from. A space at its end joins the next token; in a file it does not.")
    ] = "",
    batch: Annotated[
        Path | None,
        TEXT(
            metavar="FILE",
            help="Many prompts at once: one per line, or JSON lines with fields of SamplingParams, such as "
            '{"prompt": "def ", "top_p": 0.9, "n": 2}.',
        ),
    ] = None,
    chat: Annotated[bool, TEXT("--chat", help="Prompts are messages of a user; apply the chat template.")] = False,
    system: Annotated[str | None, TEXT(metavar="TEXT", help="With --chat: the message before the user's.")] = None,
    max_new_tokens: Annotated[int, SAMPLING(help="Tokens to write at most.", min=1)] = 200,
    temperature: Annotated[
        float | None,
        SAMPLING(
            help="0 always takes the likeliest token, so a small model repeats itself; higher values vary more.",
            min=0.0,
            show_default=f"the checkpoint's generation_config.json's, else {TEMPERATURE}",
        ),
    ] = None,
    seed: Annotated[int, SAMPLING(help="Of the draws: the same seed gives the same text again.")] = 0,
    model: Annotated[
        str,
        MODEL(metavar="NAME|PATH", help="target, draft, or a Hugging Face folder (families: docs/models.md)."),
    ] = "target",
    device: Annotated[str, MODEL(help="cpu, cuda, ...")] = "cpu",
    dtype: Annotated[
        str | None,
        MODEL(help=f"{', '.join(DTYPES)}, auto.", show_default="float32 on the CPU, else auto, the checkpoint's"),
    ] = None,
    max_seq_len: Annotated[
        int | None, MODEL(help="Context to load the model for.", show_default="the checkpoint's", min=1)
    ] = None,
    speculate: Annotated[
        str | None, MODEL(metavar="NAME", help=f"Draft tokens and check several in a pass: {', '.join(PROPOSERS)}.")
    ] = None,
    k: Annotated[
        str, MODEL("--k", help="With --speculate: draft tokens per pass, a number (0: none) or 'adaptive'.")
    ] = "4",
    adapter: Annotated[
        Path | None, MODEL(metavar="DIR", help="An adapter beside the model: a folder of peft's, as train writes it.")
    ] = None,
    kv: Annotated[str | None, MODEL(metavar="NAME", help=f"8-bit keys and values: {', '.join(KV_FORMATS)}.")] = None,
    int8_head: Annotated[bool, MODEL("--int8-head", help="Logits from an int8 copy of the head.")] = False,
    max_num_seqs: Annotated[
        int | None, MODEL(help="With --batch: prompts at once.", min=1, show_default="256 on a GPU, else 64")
    ] = None,
    token_budget: Annotated[
        int | None, MODEL(help="With --batch: tokens of a pass.", min=1, show_default="8192 on a GPU, else 512")
    ] = None,
    compile: Annotated[
        bool, MODEL("--compile", help="Run the model through torch.compile: the first tokens take about a minute.")
    ] = False,
    tp: Annotated[int, MODEL(help="Ranks that share every layer.", min=1)] = 1,
    pp: Annotated[int, MODEL(help="Stages that the layers are divided into, of --tp ranks each.", min=1)] = 1,
    ep: Annotated[
        bool,
        MODEL("--ep", help="With --tp: each rank has some of the experts, not a part of each."),
    ] = False,
    json_file: JsonFile = None,
) -> int:
    """Write on from a prompt, streaming, or from all prompts of a file together."""
    if batch is None and json_file is not None:
        raise ValueError("--json writes the answers and times of a file of prompts: give one with --batch FILE")
    if batch is not None and prompt:
        raise ValueError("there is a prompt and --batch: put the prompt into the file, or leave --batch out")
    prompt, system = _as_utf8("the prompt", prompt), None if system is None else _as_utf8("--system", system)
    if speculate is not None and speculate not in PROPOSERS:
        raise ValueError(f"--speculate: no proposer {speculate!r}: use one of {', '.join(PROPOSERS)}")
    if is_given(invocation, "k") and speculate is None:
        raise ValueError(f"--k {k} is a number of draft tokens: add --speculate NAME, which proposes them")
    speculate = None if k == "0" else speculate  # no draft tokens: plain decoding
    for name, value, known in (("dtype", dtype, (*DTYPES, "auto")), ("kv", kv, KV_FORMATS)):
        if value is not None and value not in known:
            raise ValueError(f"--{name} {value} is unknown: use one of {', '.join(known)}")
    if system is not None and not chat:
        raise ValueError("--system is a message of a chat: add --chat")
    limits = _limits(batch, max_num_seqs, token_budget)
    folder = folder_of(model)
    defaults = {"temperature": TEMPERATURE} | sampling_of(folder) | {"max_tokens": max_new_tokens, "seed": seed}
    defaults |= {} if temperature is None else {"temperature": temperature}
    requests = None if batch is None else list(read_requests(batch, defaults))
    ranks = check_ranks(tp, pp, device, ep)
    if ranks > 1 and int8_head:
        raise ValueError(f"--int8-head on {ranks} ranks: a head that is cut over ranks stays as it is, leave one out")
    where, tokenizer = device_of(device), Tokenizer.load(folder)
    if chat and requests is not None:
        requests = [(number, chat_ids(tokenizer, each, system), params) for number, each, params in requests]
    loading = {"dtype": DTYPES.get(dtype, dtype), "max_seq_len": max_seq_len}
    options = {} if speculate is None else {"proposer": speculate, "k": _guesses(k)}
    options |= {} if kv is None else {"kv_dtype": kv}
    params = SamplingParams(**defaults)
    if requests is None:
        ids, first = (chat_ids(tokenizer, prompt, system), None) if chat else healed(tokenizer, prompt)
        shown = f"{prompt}\n" if chat else tokenizer.decode(ids, skip_special=True)
    if ranks > 1:
        options |= limits | loading | {"pp": pp, "ep": ep, "device": device, "compile": compile}
        if adapter is not None:
            options["adapters"] = partial(AdapterStore.beside, folder, folders={str(adapter): adapter})
        if requests is None:
            params = replace(params, first_tokens=first or ())
            with hearing(show_text) as say:
                on_ranks(ranks, folder, lambda llm: stream_by_engine(llm, ids, params, shown, say), **options)
            return 0
        with hearing(lambda each: show(*each, tokenizer)) as say:
            outputs = on_ranks(ranks, folder, lambda llm: told(answered(llm, batch, requests), say), **options)
        return _reported(with_summary(outputs), json_file) if is_root() else 0
    network = load_model(folder, device=where, int8_head=int8_head, **loading)
    if speculate is not None:
        options["proposer"] = proposer_named(speculate, network)
    if adapter is not None:
        options["adapters"] = AdapterStore.beside(folder, network, {str(adapter): adapter})
    if requests is None:
        plain = SamplingParams(max_new_tokens, params.temperature, seed=seed, stop_tokens=params.stop_tokens)
        if options or params != plain or (compile and where.type != "cpu"):
            llm = LLM(network, tokenizer=tokenizer, compile=compile, **options)
            stream_by_engine(llm, ids, replace(params, first_tokens=first or ()), shown, show_text)
        else:
            stream(network, tokenizer, ids, params, first, shown, compile)
        return 0
    return _reported(run_batch(network, tokenizer, batch, requests, options | limits | {"compile": compile}), json_file)


def _reported(outputs: list[tuple[int, Output]], json_file: Path | None) -> int:
    write_json(json_file, {"provenance": provenance(), **as_json(outputs)})
    return 0 if all(output.error is None for _, output in outputs) else 1


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: list[int],
    params: SamplingParams,
    first: list[int] | None,
    shown: str,
    compiled: bool = False,
) -> None:
    """Streams one text, a token at a time, from the plainest decoder."""
    push = tokenizer.stream()
    push(*ids)
    typer.echo(shown, nl=False)
    stops = {*params.stop_tokens, *([] if tokenizer.eos is None else [tokenizer.eos_id])}
    options = {"temperature": params.temperature, "seed": params.seed, "stop": stops, "first": first}
    options |= {"compiled": compiled}
    for token in generate(model, ids, params.max_tokens, **options):
        typer.echo(push(token), nl=False)
    typer.echo(push(final=True))


def stream_by_engine(
    llm: LLM, ids: list[int], params: SamplingParams, shown: str, say: Callable[[tuple[str, bool]], None]
) -> None:
    """Streams one text through the engine, for what the plain decoder lacks: speculation, top-k and the like, compiled
    blocks, ranks. say: `show_text`, or what has it called in another process."""
    deltas, tokens = llm.stream(ids, params, adapter=llm.adapters and llm.adapters.names[0]), 0
    say((shown, False))
    for delta in deltas:
        say((delta.text, False))
        tokens += len(delta.tokens)
    say(("\n", False))
    if llm.speculation is not None:
        counts, passes = llm.speculation.counts, sum(record.sampled > 0 for record in llm.records)
        guesses = f"{sum(counts.kept):.0f} guesses right, {counts.accepted:.0%} of those looked at"
        say((f"{tokens} tokens in {passes} passes; {guesses}\n", True))


def show_text(said: tuple[str, bool]) -> None:
    """said: a piece of text, and whether it goes to standard error."""
    text, is_aside = said
    typer.echo(text, nl=False, err=is_aside)


def sampling_of(folder: Path) -> dict[str, Any]:
    """What the checkpoint says about sampling, as fields of `SamplingParams`. Says on stderr what is left out."""
    found = read_generation_config(folder)
    if found.unused:
        typer.echo(f"generation_config.json: {', '.join(found.unused)} not supported, left out", err=True)
    sampling = found.sampling if (folder / "generation_config.json").is_file() else {}
    return sampling | {"stop_tokens": found.eos_ids}


def chat_ids(tokenizer: Tokenizer, prompt: str | list[int], system: str | None) -> list[int]:
    """The ids of a conversation in which the user has said `prompt`; ids stay as they are."""
    if not isinstance(prompt, str):
        return prompt
    before = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.chat([*before, {"role": "user", "content": prompt}])


def healed(tokenizer: Tokenizer, prompt: str) -> tuple[list[int], list[int] | None]:
    """The prompt's ids after `heal`, preceded by whatever this tokenizer begins a text with."""
    ids, first = heal(tokenizer, tokenizer.encode(prompt) or [tokenizer.eos_id])
    return ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids], first


def _as_utf8(name: str, given: str) -> str:
    """What was typed, also where the locale of the process is not the terminal's."""
    try:
        return given.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise ValueError(f"{name} is not UTF-8 text: write it in UTF-8") from None


def _limits(batch: Path | None, max_num_seqs: int | None, token_budget: int | None) -> dict[str, int]:
    """Those of the `LLM` that were asked for, and where one was, another that goes with it."""
    given = {"max_num_seqs": max_num_seqs, "token_budget": token_budget}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if batch is None:
            raise ValueError(f"--{name.replace('_', '-')} {value} is of a file of prompts: give one with --batch FILE")
    if len(given) == 2 and max_num_seqs > token_budget:
        raise ValueError(
            f"--token-budget {token_budget} is less than --max-num-seqs {max_num_seqs}: every sequence wants a token"
        )
    if max_num_seqs is not None and max_num_seqs > 512:
        return {"token_budget": max_num_seqs} | given
    return given if token_budget is None or token_budget >= 64 else {"max_num_seqs": token_budget} | given


def _guesses(k: str) -> int | str:
    try:
        return k if k == "adaptive" else int(k)
    except ValueError:
        raise ValueError(f"--k {k} must be a whole number or 'adaptive'") from None


def run_batch(
    model: Transformer, tokenizer: Tokenizer, file: Path, requests: list[Request], options: dict[str, Any]
) -> list[tuple[int, Output]]:
    """Runs all requests of the file. Prints each answer once it and all before it are there, then a summary.

    options: of the `LLM`.
    """
    tokens: dict[int, list[int]] = {}
    for number, prompt, params in requests:
        with naming(file, number):
            tokens[number] = prompt_ids(prompt, params, tokenizer, model.config)
    llm = engine(model, tokenizer, [(len(tokens[number]), params) for number, _, params in requests], **options)
    asked = [(number, tokens[number], params) for number, _, params in requests]
    return with_summary(told(answered(llm, file, asked), lambda each: show(*each, tokenizer)))


def engine(model: Transformer, tokenizer: Tokenizer, requests: list[tuple[int, SamplingParams]], **options) -> LLM:
    """An LLM for requests of (prompt tokens, params): with blocks for all of them, or as many as the memory holds; the
    others then wait in its queue. options: of the `LLM`."""
    longest = model.config.max_seq_len
    lengths = (min(tokens + params.max_tokens, longest) for tokens, params in requests for _ in range(params.n))
    needed = sum(1 + -(-length // BLOCK_SIZE) for length in lengths)
    limits = {name: options[name] for name in ("max_num_seqs", "token_budget") if name in options}
    limits |= gpu_limits(model, limits)
    kv, rows = options.get("kv_dtype"), rows_of_each(options.get("k", 0))
    sizes = {"kv_format": KV_FORMATS[kv] if kv else None, "rows_of_each": rows}
    fits = default_num_blocks(model, BLOCK_SIZE, **sizes, **limits)
    options |= {"num_blocks": min(needed, fits), **limits}
    return LLM(model, tokenizer=tokenizer, block_size=BLOCK_SIZE, **options)
