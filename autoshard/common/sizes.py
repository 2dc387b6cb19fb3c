"""Bytes and seconds as people write them: parsed at the door, printed at the door, plain numbers inside."""

import re

from autoshard.errors import SpecError

_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
MAX_BYTES = 2**60
"""No size may be larger: beyond it arithmetic in floats would start to round or overflow."""


def shown(value: object, length: int = 60) -> str:
    """Return the repr of what a user gave, short enough for a message whatever it is."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print ints of thousands of digits
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def parse_bytes(text: str | int) -> int:
    """Turn "24GiB", "80GB", "512MiB" or an int of bytes into a positive int; raise `SpecError` otherwise.

    A text without a unit is refused: "24" is meant as GiB by whoever writes it.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
        if match is not None and not match[2]:
            raise SpecError(f"the size {shown(text)} has no unit. Write for example {match[1][:12]}GiB.")
        if match is None or match[2].upper() not in _UNITS:
            raise SpecError(f"{shown(text)} is not a size. Write for example 24GiB, 80GB or 512MiB.")
        size = int(min(float(match[1]) * _UNITS[match[2].upper()], 2.0 * MAX_BYTES))
    if size <= 0:
        raise SpecError(
            f"a size must be positive, got {shown(text)}. Write for example 24GiB, or leave the device out."
        )
    if size > MAX_BYTES:
        raise SpecError(f"the size {shown(text)} is beyond every device. Write for example 24GiB.")
    return size


def format_bytes(size: float) -> str:
    """Print bytes with three significant digits: 1.50 GiB, 320 MiB, 12 B."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or (unit == "B" and size < 1024):
            break
        size /= 1024
    else:
        unit = "TiB"
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{sign}{size:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Print seconds with three significant digits and a fitting unit: 1.20 s, 35.0 ms, 4.10 us; 0 s for none."""
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale or unit == "us":
            break
    value = seconds / scale
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"
