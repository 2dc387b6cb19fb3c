"""Cells of other sizes and devices as tables of a page, and as the data between which its script interpolates."""

from collections.abc import Sequence
from typing import Any

from autoshard.plan.workload import Workload
from autoshard.search.sizes import Cell


def grids(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Cells by length of the sequence, as tables of batches and devices."""
    found = []
    for tokens in sorted({cell.tokens for cell in cells}):
        own = [cell for cell in cells if cell.tokens == tokens]
        columns = sorted({(cell.card, cell.devices) for cell in own})
        rows = [
            (batch, [next((c for c in own if (c.batch, c.card, c.devices) == (batch, *at)), None) for at in columns])
            for batch in sorted({cell.batch for cell in own})
        ]
        has_own = any(cell.own for cell in own)
        found.append({"tokens": tokens, "columns": [column_name(*at) for at in columns], "rows": rows, "own": has_own})
    return found


def column_name(card: str, devices: int) -> str:
    """What a column is headed."""
    return f"{devices} x {card}" if card else f"{devices} device{'s' if devices > 1 else ''}"


def cell_data(cells: Sequence[Cell]) -> list[list[Any]]:
    """[column, batch, tokens, seconds, tokens per second, how full, own] of the cells that have a plan."""
    return [
        [column_name(c.card, c.devices), c.batch, c.tokens, c.seconds, c.tokens_per_second, c.full, c.own]
        for c in cells if c.mesh
    ]  # fmt: skip


def unit(workload: Workload) -> str:
    """What is counted per second."""
    return "tokens/s" if workload.sequence_length else "samples/s"
