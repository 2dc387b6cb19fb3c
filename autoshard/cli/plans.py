"""PLAN of the commands: a plan file, or a JSON file that holds a device_map."""

import json
from pathlib import Path
from typing import Any

from autoshard.errors import SpecError
from autoshard.plan import Plan


def read_plan(text: str) -> Plan:
    """Return the plan in a file; that of a device_map has an assumed workload. Raises `SpecError` or `PlanError`."""
    path = Path(text)
    if not path.is_file():
        raise SpecError(f"{text[:200]!r} does not exist; PLAN is a file written by `autoshard plan … -o plan.json`.")
    data = _device_map(path)
    if data is not None:
        return Plan.from_device_map(data)
    return Plan.load(path)


def _device_map(path: Path) -> dict[str, Any] | None:
    """The content if it is an object of path: device and nothing else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # Plan.load says what is wrong
    if not isinstance(data, dict) or not data or "format" in data:
        return None
    plain = all(isinstance(value, (str, int)) and not isinstance(value, bool) for value in data.values())
    return data if plain else None
