"""The outcome of a verification, as a table and as a JSON document."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from autoshard.common.sizes import format_bytes
from autoshard.report.layout import INDENT, Column, numbers, print_section, print_sentences, print_table
from autoshard.verify import Verification

VERSION = 1


def print_verification(console: Console, found: Verification, *, title: str = "") -> None:
    """Print whether the split model equals the whole one, where not, and the peaks against their predictions."""
    console.print()
    line = Text("equal" if found.ok else "not equal", style="bold green" if found.ok else "bold red")
    where = "on simulated devices" if found.simulated else "on this machine's devices"
    line.append(f"  {title + ', ' if title else ''}split {where}", style="default not bold")
    console.print(line, soft_wrap=True)
    error = "bit for bit" if found.ok and found.max_error == 0 else f"largest error {_number(found.max_error)}"
    console.print(Text(f"{INDENT}compared: {', '.join(found.compared) or 'nothing'}; {error}"), soft_wrap=True)
    if found.first_difference is not None:
        print_section(console, "First difference", str(found.first_difference))
    if found.peaks:
        print_section(console, "Memory")
        rows = []
        for peak in found.peaks:
            predicted, off = "-", "-"
            if peak.predicted_bytes is not None:
                predicted = format_bytes(peak.predicted_bytes)
                if peak.measured_bytes:
                    off = f"{100 * (peak.predicted_bytes / peak.measured_bytes - 1):+.2f} %"
            rows.append([peak.name, predicted, format_bytes(peak.measured_bytes), off])
        print_table(console, [Column(title="Device"), *numbers("Predicted", "Measured", "Off by")], rows, INDENT)
    print_sentences(console, "Notes", found.notes)


def verification_document(found: Verification, *, title: str = "") -> dict[str, Any]:
    """Return the outcome as plain data; infinite errors become the text "inf"."""
    data = _finite(asdict(found))
    return {"format": "autoshard verification", "version": VERSION, "title": title, **data}


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "unbounded"
