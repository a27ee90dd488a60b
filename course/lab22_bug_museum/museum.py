"""The exhibits of the museum by name, training first."""

import difflib

from course.lab22_bug_museum import (
    exhibits_checkpoint,
    exhibits_context,
    exhibits_data_parallel,
    exhibits_hang,
    exhibits_pipeline,
    exhibits_serving_blocks,
    exhibits_serving_cache,
    exhibits_serving_drafts,
    exhibits_serving_hidden,
    exhibits_serving_numbers,
    exhibits_serving_schedule,
    exhibits_tensor,
    exhibits_trainer,
)
from course.lab22_bug_museum.exhibit import Exhibit

MODULES = (
    exhibits_data_parallel,
    exhibits_pipeline,
    exhibits_tensor,
    exhibits_context,
    exhibits_trainer,
    exhibits_checkpoint,
    exhibits_hang,
    exhibits_serving_cache,
    exhibits_serving_blocks,
    exhibits_serving_schedule,
    exhibits_serving_hidden,
    exhibits_serving_drafts,
    exhibits_serving_numbers,
)
EXHIBITS: dict[str, Exhibit] = {its.name: its for module in MODULES for its in module.EXHIBITS}


def exhibit(name: str) -> Exhibit:
    """ValueError for a name that no exhibit has."""
    if name in EXHIBITS:
        return EXHIBITS[name]
    close = difflib.get_close_matches(name, EXHIBITS, n=1, cutoff=0.4)
    choice = f"did you mean '{close[0]}'?" if close else "`python -m minillm museum` lists them"
    raise ValueError(f"no exhibit is called '{name}'; {choice}")
