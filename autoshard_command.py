"""The `autoshard` command begins here, outside of the package, for the package's import takes in torch."""

import gc


def run() -> None:
    """Run the command. The collector is held off until all is imported: it takes a fifth of torch's time to."""
    gc.disable()
    from autoshard.cli.main import run as run_command

    run_command()
