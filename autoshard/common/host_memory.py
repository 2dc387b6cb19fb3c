"""The memory of this machine, as its system tells it."""


def available_bytes() -> int | None:
    """Return what the system could still give, or fill with files; None if it does not tell (only Linux does)."""
    try:
        with open("/proc/meminfo") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")), None)
    except OSError:
        return None
