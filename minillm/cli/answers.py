"""What `generate --batch` says of the answers: as text, in JSON, and in one line for all."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import typer

from minillm.data import Tokenizer
from minillm.serve.requests.output import Output
from minillm.serve.requests.summary import Summary, summary

Numbered = tuple[int, Output]  # by the line of its file


def show(number: int, output: Output, tokenizer: Tokenizer) -> None:
    for index, answer in enumerate(output.answers):
        name = f"{number}" if len(output.answers) == 1 else f"{number}, answer {index + 1}"
        why = f"failed: {output.error}" if output.error else f"{len(answer.tokens)} tokens, {answer.reason}"
        typer.echo(f"--- line {name} ({why})\n{tokenizer.decode(output.prompt, skip_special=True)}{answer.text}")


def told(outputs: Iterable[Numbered], say: Callable[[Numbered], None]) -> list[Numbered]:
    """All of them; `say` is called with each as it comes."""
    found = []
    for each in outputs:
        found.append(each)
        say(each)
    return found


def with_summary(outputs: list[Numbered]) -> list[Numbered]:
    """The outputs; says what they took together."""
    if any(output.error is None for _, output in outputs):
        typer.echo(took_line(summary([output for _, output in outputs])), err=True)
    return outputs


def as_json(outputs: list[tuple[int, Output]]) -> dict[str, Any]:
    """Rows in the order of the file, times in seconds; the summary only if an answer has a token."""
    rows = []
    for number, output in outputs:
        timing, longest = output.timing, max(len(answer.tokens) for answer in output.answers)
        times = {"queue_s": timing.queue, "ttft_s": timing.ttft, "tpot_s": timing.tpot(longest)}
        answers = [{"text": answer.text, "ids": answer.ids, "reason": answer.reason} for answer in output.answers]
        for found, answer in zip(answers, output.answers, strict=True):
            if any(token.logprob is not None for token in answer.tokens):
                found["logprobs"] = [{"logprob": token.logprob, "top": token.top} for token in answer.tokens]
        counts = {name: getattr(output, name) for name in ("computed", "hit", "preemptions", "error")}
        row = {"line": number, "prompt": output.prompt, "seed": output.seed, "answers": answers, **times}
        rows.append({**row, "end_to_end_s": timing.end_to_end, **counts})
    if all(output.error is not None for _, output in outputs):
        return {"rows": rows}
    took = summary([output for _, output in outputs])
    return {"summary": _finite({**asdict(took), "tokens_per_s": took.tokens_per_s}), "rows": rows}


def took_line(it: Summary) -> str:
    return (
        f"{it.requests} prompts, {it.tokens} tokens in {it.seconds:.2f} s: {it.tokens_per_s:.0f} tokens/s; first token "
        f"after {it.ttft.p50:.3f} s (p50), {it.ttft.p99:.3f} s (p99); {it.hit} prompt tokens from the prefix cache"
    )


def _finite(value: Any) -> Any:
    """nan, of which JSON knows nothing, becomes None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
