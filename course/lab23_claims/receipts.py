"""Lab 23's claims: every statement's rows decide as the table says."""

from collections.abc import Iterator, Mapping
from functools import cache

from course.kit.receipts import Receipt, Row, receipt, titled
from course.lab23_claims import (
    claims_code,
    claims_compiler,
    claims_data_parallel,
    claims_decoding,
    claims_hardware,
    claims_memory,
    claims_pipeline,
    claims_running,
    claims_scale,
    claims_serving,
    claims_tensor,
    claims_zero,
)
from course.shared.statement import VERDICTS, Statement

MODULES = (
    claims_memory,
    claims_data_parallel,
    claims_zero,
    claims_pipeline,
    claims_tensor,
    claims_hardware,
    claims_compiler,
    claims_scale,
    claims_running,
    claims_decoding,
    claims_serving,
    claims_code,
)
STATEMENTS = {its.key: its for module in MODULES for its in vars(module).values() if isinstance(its, Statement)}


@cache
def _ran(key: str) -> Receipt:
    rows = STATEMENTS[key].run()
    return receipt("", rows, open_rows=len(rows))


class Ballot:
    """The statements of some topics with the reader's votes, each run and decided."""

    def __init__(self, votes: Mapping[str, str]):
        unknown = [f"{key}: {vote}" for key, vote in votes.items() if key not in STATEMENTS or vote not in VERDICTS]
        if unknown:
            raise ValueError(f"vote {', '.join(VERDICTS)} on the statements' names; not {'; '.join(unknown)}.")
        self.votes = dict(votes)

    @property
    def right(self) -> int:
        return sum(STATEMENTS[key].verdict == vote for key, vote in self.votes.items())

    def __repr__(self) -> str:
        lines = []
        for key, vote in self.votes.items():
            its = STATEMENTS[key]
            lines += [
                f"“{its.text}”",
                f"    you: {vote}; {its.decision}. {its.because} {its.when}: {its.flips}. {its.source}",
                *(f"    {line}" for line in str(_ran(key)).splitlines()),
                "",
            ]
        return "\n".join([*lines, f"{self.right} of {len(self.votes)} right"])

    def _repr_markdown_(self) -> str:
        parts = []
        for key, vote in self.votes.items():
            its = STATEMENTS[key]
            mark = "✓" if vote == its.verdict else "✗"
            name, _, link = its.source.rpartition(": ")
            parts.append(
                f"**“{its.text}”** {mark} You voted *{vote}*; **{its.decision}**. {its.because} "
                f"*{its.when}:* {its.flips}. [{name}]({link})\n\n{_ran(key)._repr_html_()}"
            )
        return "\n\n".join([*parts, f"**{self.right} of {len(self.votes)} right.**"])


def statements(*topics: str) -> "Listing":
    return Listing([key for key, its in STATEMENTS.items() if its.topic in topics])


class Listing:
    """Statements with their names, to vote on."""

    def __init__(self, keys: list[str]):
        self.keys = keys

    def __repr__(self) -> str:
        return "\n".join(f"{key}: {STATEMENTS[key].text}" for key in self.keys)

    def _repr_markdown_(self) -> str:
        return "\n".join(f"- `{key}`: *“{STATEMENTS[key].text}”*" for key in self.keys)


def decide(votes: Mapping[str, str]) -> Ballot:
    """Run and decide what was voted on."""
    return Ballot(votes)


@titled("common claims")
def every_statement() -> Iterator[Row]:
    """The rows of all statements."""
    for key in STATEMENTS:
        yield from _ran(key).rows


CLAIMS = (every_statement,)
