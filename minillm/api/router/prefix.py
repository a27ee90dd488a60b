"""What requests with a common prefix share: tenant, model, and how their prompt begins.

A replica's cache is of tokens and of one tenant; the router has no tokenizer and takes characters. Prompts that agree
in the first `characters` go to the same replica, which has their blocks; those that agree in fewer may not.
"""

import json
from collections.abc import Iterator
from typing import Any

CHARACTERS_PER_ID = 4  # of a prompt that is token ids


def prefix_key(tenant: str, body: bytes, characters: int) -> bytes:
    """body: of a completion or a chat; what is neither has only its tenant in common, and its replica refuses it."""
    try:
        asked = json.loads(body)
        parts = _parts(asked, characters) if isinstance(asked, dict) else ()
        model = asked.get("model") if isinstance(asked, dict) else None
        beginning = ""
        for part in parts:
            beginning += part
            if len(beginning) >= characters:
                break
    except (ValueError, RecursionError):
        return tenant.encode()
    return "\0".join((tenant, str(model), beginning[:characters])).encode("utf-8", "replace")


def _parts(asked: dict[str, Any], characters: int) -> Iterator[str]:
    """Texts of a prompt from its beginning; only the first of several prompts counts."""
    prompt, messages = asked.get("prompt"), asked.get("messages")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):
        yield " ".join(map(str, prompt[: characters // CHARACTERS_PER_ID])).ljust(characters)
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            texts = content if isinstance(content, list) else [{"text": content}]
            yield str(message.get("role"))
            yield from (str(each.get("text")) for each in texts if isinstance(each, dict))
