"""The claims of lab 23 in an interview: vote, say the condition, and hear what decides it."""

from functools import cache
from importlib import import_module

from course.shared.statement import VERDICTS, Statement

TOPICS: dict[str, str] = {  # topic of lab 23: topic of the cards
    "pipeline": "pipeline parallel",
    "ZeRO": "data parallel and ZeRO",
    "memory": "memory and precision",
    "decoding": "decoding and the cache",
    "network": "hardware",
    "data parallel": "data parallel and ZeRO",
    "tensor parallel": "tensor and sequence parallel",
    "faults": "checkpoints and faults",
    "kernels": "kernels and compilation",
    "code": "debugging",
    "paging": "decoding and the cache",
    "speculation": "speculative decoding",
    "long context": "long context and experts",
    "experts": "long context and experts",
    "cost": "planning",
    "several axes": "planning",
    "batching": "batching and scheduling",
    "quantization": "quantization and adapters",
}
SHORT = {"t": "true", "f": "false", "d": "depends"}


def of_topic(topic: str) -> list[str]:
    """Keys of the claims of a topic of the cards; all of them for ""."""
    return [key for key, its in statements().items() if topic in ("", TOPICS[its.topic])]


def claim(key: str) -> Statement:
    return statements()[key]


@cache
def statements() -> dict[str, Statement]:
    """By key. The lab is imported when one is asked for: it brings the engine and all schemes of parallelism."""
    return import_module("course.lab23_claims.receipts").STATEMENTS


def vote(reply: str) -> str | None:
    """true, false or depends, or its first letter; None for anything else."""
    reply = SHORT.get(reply.lower(), reply.lower())
    return reply if reply in VERDICTS else None


def reply(its: Statement, voted: str) -> str:
    """What is said after the vote."""
    mark = "Right" if voted == its.verdict else "No"
    return f"{mark}: {its.decision}. {its.because}\n{its.when}: {its.flips}.\n{its.source}"
