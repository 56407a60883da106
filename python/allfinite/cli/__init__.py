"""`python -m allfinite`: the command line, one module a subcommand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from . import bench, info, train

USAGE = 2


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence on standard error, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with code 2."""
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        arguments: the words after the program's name; None takes those of the process.

    Returns:
        The exit code; a wrong command line exits with 2 by itself.
    """
    parser = OneLineParser(prog="allfinite", description="Keeps mixed-precision Transformer training finite.")
    subcommands = parser.add_subparsers(title="commands", dest="command", required=True)
    for module in (train, bench, info):
        module.add(subcommands)
    parsed = parser.parse_args(arguments)
    code = parsed.run(parsed)
    assert isinstance(code, int)
    return code
