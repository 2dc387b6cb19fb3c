"""How plans and profiles show themselves in a notebook: as the text that they are printed as."""

from html import escape

MOST_LINES = 60


def as_html(text: str) -> str:
    """Return a text for a notebook, the first lines of a long one."""
    lines = text.splitlines()
    more = [f"and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return f"<pre>{escape(chr(10).join([*lines[:MOST_LINES], *more]))}</pre>"
