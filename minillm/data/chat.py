"""Chat templates: a list of messages becomes the text that a model was trained on, by the Jinja program beside it.

A special token counts as one only where the template writes it. A message that contains "<|im_end|>" must not be able
to end the turn, so such text is marked before the template sees it, and `Tokenizer.chat` encodes what is marked as the
plain characters it is. Templates are foreign programs: they run in Jinja's sandbox, without access to Python.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARKS = range(0xFDD0, 0xFDF0)  # Unicode's noncharacters: no text for interchange has them


def render(
    template: str, messages: Sequence[Mapping[str, Any]], specials: Iterable[str], sign: str, **variables: Any
) -> str:
    """The text of the conversation, with `sign` before every character in a message that looks like part of a special
    token.

    variables: what the template may ask for beside `messages`, as in transformers. Raises ValueError for a template
    that is not valid Jinja, that the sandbox refuses, or that refuses the messages.
    """
    if (pattern := one_of(specials)) is not None:
        messages = _changed(messages, lambda text: pattern.sub(lambda hit: sign + sign.join(hit[0]), text))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    given = {"tools": None, "documents": None, **variables}
    try:
        return environment.from_string(template).render(messages=messages, **given)
    except Exception as error:  # a template is a foreign program: it may divide by zero as well as refuse
        raise ValueError(f"the chat template cannot be applied to these messages ({error}).") from error


def read_template(folder: Path, config: dict) -> str | None:
    """The template of a model folder with this tokenizer_config.json; of several, the one called default."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found


def answer_spans(
    messages: Sequence[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]], bool], str]
) -> tuple[str, list[tuple[int, int, bool]]]:
    """A whole conversation's text, and its parts from start to stop: whether the assistant said them. None is empty.

    write: the text of the first messages; with True, up to where the next answer begins. ValueError if the template
    rewrites what came before an answer.
    """
    whole, spans, start = write(messages, False), [], 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            asked, answered = write(messages[:place], True), write(messages[: place + 1], False)
            if not (whole.startswith(answered) and answered.startswith(asked) and start <= len(asked)):
                raise ValueError("the chat template rewrites what came before an answer: use one that only adds.")
            spans += [(start, len(asked), False), (len(asked), len(answered), True)]
            start = len(answered)
    spans.append((start, len(whole), False))
    return whole, [(start, stop, is_answer) for start, stop, is_answer in spans if start < stop]


def unused(text: str) -> str:
    """A character that the text does not contain."""
    if (found := next((chr(code) for code in MARKS if chr(code) not in text), None)) is None:
        raise ValueError("the text contains every noncharacter from U+FDD0 to U+FDEF: remove one.")
    return found


def one_of(specials: Iterable[str], unless_after: str = "") -> re.Pattern | None:
    """A pattern that matches any of the special tokens, the longest first. unless_after: a mark directly after which
    none matches."""
    names = sorted(specials, key=len, reverse=True)
    before = f"(?<!{re.escape(unless_after)})" if unless_after else ""
    return re.compile(before + "(?:" + "|".join(map(re.escape, names)) + ")") if names else None


def _changed(value: Any, change) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(each, change) for key, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list | tuple) else value


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """As in transformers: Jinja's own escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
