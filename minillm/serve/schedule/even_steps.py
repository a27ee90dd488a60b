"""How many prompt tokens a step takes of tenants that want more than their part, while others may come.

Whoever comes waits for the step that runs, so its length decides how late the first token is. Requests of one kind that
were admitted together end together, and their successors' prompts then fill one step:

    tokens of a step    256 8 8 8 8 8 8 8 256 8 8 8 8 8 8 8 256       all prompts when places are free
                         40 40 40 40 40 40 40 40 40 40 40 40 40       as many as the places need to stay full

The second row computes as many tokens in as many steps. A sequence that decodes has a token in each step, and for each
token of an answer a tenant's requests bring `prompts / answers` prompt tokens; so a step needs as many as that, times
the places, to keep them occupied. The ratio is measured. It does not depend on how prompts are spread: with fewer of
them, fewer answers come.
"""

from dataclasses import dataclass

RECENT = 16384  # tokens, after which what was counted before weighs half


@dataclass
class Mix:
    """Tokens of prompts and of answers that a tenant's requests had computed of late."""

    prompts: float = 0.0
    answers: float = 0.0

    def add(self, prompts: int = 0, answers: int = 0) -> None:
        if self.prompts + self.answers > RECENT:
            self.prompts, self.answers = self.prompts / 2, self.answers / 2
        self.prompts, self.answers = self.prompts + prompts, self.answers + answers


def prompt_tokens_needed(mixes: list[Mix], places: int) -> float:
    """Of a step, so that so many places stay occupied; inf before the first answer."""
    answers = sum(mix.answers for mix in mixes)
    return places * sum(mix.prompts for mix in mixes) / answers if answers else float("inf")
