"""A design round: a problem of lab 20 or 21 as an interviewer asks it, its numbers, the six moves, the follow-ups."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from course.kit import course, masters
from course.shared.cases import Cases
from course.shared.decisions import Decision, Problem

MINUTES = 25
LABS = ("20_design_training", "21_design_serving")

TOPICS: dict[str, str] = {  # problem: topic of the cards
    "seventy_on_64": "planning",
    "seven_on_8": "memory and precision",
    "four_hundred_on_16k": "pipeline parallel",
    "gpt3_on_1024": "planning",
    "fine_tune_on_a_node": "quantization and adapters",
    "slower_on_two_nodes": "tensor and sequence parallel",
    "a_loss_spike": "debugging",
    "a_hang": "debugging",
    "a_straggler": "debugging",
    "checkpoint_interval": "checkpoints and faults",
    "starving_input": "data",
    "scaling": "planning",
    "money_and_energy": "planning",
    "chat_70b": "serving systems",
    "eight_on_24gb": "decoding and the cache",
    "rag_32k": "decoding and the cache",
    "offline_batch": "serving systems",
    "many_adapters": "quantization and adapters",
    "at_the_edge": "hardware",
    "tail_at_85": "batching and scheduling",
    "bursts": "serving systems",
    "blocked_by_a_prompt": "batching and scheduling",
    "does_speculation_pay": "speculative decoding",
    "does_quantization_pay": "quantization and adapters",
    "split_prefill_decode": "serving systems",
}


@dataclass(frozen=True)
class Design:
    """question: what the interviewer says. decisions: the numbers asked for on the way. answer: the walkthrough."""

    name: str
    question: str
    decisions: dict[str, Decision]
    answer: Problem


def of_topic(topic: str) -> list[str]:
    """Problems of a topic of the cards; all of them for ""."""
    return [name for name, its in TOPICS.items() if topic in ("", its)]


def design(name: str) -> Design:
    """ValueError for a name that neither lab has."""
    lab, cases = _home(name)
    return Design(name, _question(lab, name), cases.decisions(name), cases.answer(name))


def _home(name: str) -> tuple[str, Cases]:
    for lab in LABS:
        cases = import_module(f"course.lab{lab}.receipts").CASES  # when one is asked for: the planner takes seconds
        if name in cases:
            return lab, cases
    raise ValueError(f"neither lab 20 nor lab 21 has a problem {name!r}")


@cache
def _question(lab: str, name: str) -> str:
    """What stands under the problem's heading, without the questions in bold that ask for a number."""
    cells = masters.lab(course.masters(course.home())[lab]).cells
    end = next(place for place, cell in enumerate(cells) if f'("{name}"' in cell.source)
    texts = [cell.source for cell in cells[:end] if cell.cell_type == "markdown"]
    text = next(text for text in reversed(texts) if "## Problem" in text)
    problem = text[text.index("## Problem") :].split("\n\n")[1:]
    asked = " ".join(part for part in problem if not part.startswith("**"))
    return re.sub(r"\s+", " ", asked).replace("*", "").strip()
