"""`python -m autoshard`: the same as the command."""

from autoshard.cli.main import run

run()
