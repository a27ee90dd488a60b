"""A progress bar for many prompts."""

import sys
from collections.abc import Iterable

from minillm.serve.requests.request import Request

MANY = 16  # prompts from which a progress bar is of use


def progress_bar(requests: list[Request], shown: bool | None) -> Iterable[Request]:
    """The requests, with a bar that says how many have ended. None: for many, if standard error is a terminal."""
    if shown is None:
        shown = len(requests) >= MANY and sys.stderr.isatty()
    if not shown:
        return requests
    from tqdm.auto import tqdm

    return tqdm(requests, unit="request")
