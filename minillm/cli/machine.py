"""`python -m minillm machine`: how fast this machine computes, reads its memory and passes messages between ranks."""

from typing import Annotated

import typer

from minillm.measure import machine
from minillm.measure.provenance import JsonFile, write_json


def command(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again instead of reading the kept card.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Show this machine's card; the first time takes about 15 seconds."""
    card = machine(refresh=refresh)
    print(card)
    write_json(json_file, card.to_json())
    return 0
