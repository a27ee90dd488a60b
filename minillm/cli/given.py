"""Which options the command line names, and which are left at their defaults."""

import typer


def is_given(invocation: typer.Context, name: str) -> bool:
    """Whether the command line names the option, rather than leaving it to its default."""
    return invocation.get_parameter_source(name).name == "COMMANDLINE"
