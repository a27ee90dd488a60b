"""A file of prompts: one per line, or JSON lines with the fields of `SamplingParams`."""

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from minillm.files import opened
from minillm.serve.engine import LLM
from minillm.serve.requests.output import Output
from minillm.serve.requests.params import SamplingParams

LARGEST_BATCH = 256 << 20  # bytes of a file of prompts
FIELDS = ("prompt", *(field.name for field in fields(SamplingParams)))

Request = tuple[int, str | list[int], SamplingParams]  # the line's number in the file, its prompt, what it wants


def read_requests(file: Path, defaults: dict[str, Any]) -> Iterator[Request]:
    """One request per line. ValueError names the first bad line and says what is wrong with it."""
    try:
        with opened(file, "rb") as source:
            text = source.read(LARGEST_BATCH + 1)
        if len(text) > LARGEST_BATCH:  # a device such as /dev/zero has no end
            raise ValueError(f"--batch {file} is larger than {LARGEST_BATCH >> 20} MiB: cut it into several files")
        lines = text.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except OSError as error:
        raise ValueError(f"--batch {file} cannot be read ({error.strerror}): name a file of prompts") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--batch {file} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    if lines == [""]:
        raise ValueError(f"--batch {file} is empty: write one prompt per line")
    as_objects = file.suffix in (".json", ".jsonl", ".ndjson") or _object(lines[0]).keys() >= {"prompt"}
    for number, line in enumerate(lines, start=1):
        with naming(file, number):
            if not line.strip():
                raise ValueError("it is empty: write a prompt or delete the line")
            wanted = _fields(line) if as_objects else {"prompt": line}
            prompt, params = wanted.pop("prompt"), SamplingParams(**{**defaults, **wanted})
        yield number, prompt, params


def answered(llm: LLM, file: Path, requests: list[Request]) -> Iterator[tuple[int, Output]]:
    """Adds all requests of a file; yields the output of each once it and all before it are there. All are for the
    engine's adapter, if it has one."""
    for number, prompt, params in requests:
        with naming(file, number):
            llm.add(prompt, params, request_id=str(number), adapter=llm.adapters and llm.adapters.names[0])
    ended: dict[str, Output] = {}
    for number, _, _ in requests:
        while str(number) not in ended:
            ended |= {output.request_id: output for output in llm.step()}
        yield number, ended[str(number)]


def _fields(line: str) -> dict[str, Any]:
    wanted = _object(line)
    if not wanted:
        raise ValueError('it is not a JSON object: write {"prompt": "..."}')
    for name in wanted:
        if name not in FIELDS:
            close = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(FIELDS)}."
            raise ValueError(f"unknown field '{name}'; {hint}")
    if not isinstance(wanted.get("prompt"), str | list):
        raise ValueError('it has no "prompt" that is a text or a list of token ids')
    return wanted


def _object(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty if it is none."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def naming(file: Path, number: int) -> Iterator[None]:
    """Names the file and the line in a ValueError raised within."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file} line {number}: {error}") from None
