"""How errors name what is many, and what others said."""

from collections.abc import Collection

SHOWN = 5


def count(names: Collection[str], what: str) -> str:
    """How many there are, in words."""
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''}"


def first(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def one_line(error: BaseException) -> str:
    """The text of an error of others, without its line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
