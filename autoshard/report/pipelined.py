"""A pipeline on the terminal: its stages, and what every device does when.

cuda:0  000111222333......aaaaaabbbbbbccccccdddddd       digits: forwards, by micro-batch; letters: backwards
cuda:1  ...000111222333aaaaaabbbbbbccccccdddddd...       dots: it waits
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import Event, Pipelining
from autoshard.report.layout import INDENT, Column, print_items, print_left_off, print_section, print_table

MOST_LANES = 16
MOST_STAGES = 32
MARKS = {
    "recompute": ("r", "red", "computes again"),
    "weight": ("w", "magenta", "gradients of parameters"),
    "all-reduce": ("+", "cyan", "sums gradients"),
    "all-gather": ("+", "cyan", "gathers parameters"),
    "optimizer": ("o", "green", "optimizer"),
}
_IDLE = Text(".", style="bright_black")


def print_pipelining(console: Console, pipelining: Pipelining) -> None:
    """Print the stages, and a lane per device with what it does when."""
    _print_stages(console, pipelining)
    count = pipelining.num_microbatches
    parts = f"{count} micro-batches" if count > 1 else "the batch in one piece"
    schedule = f"{pipelining.schedule}, {parts}: devices wait {pipelining.bubble:.0%} of the time"
    print_section(console, "Timeline", schedule)
    devices = list(dict.fromkeys(stage.device for stage in pipelining.stages))
    end = max((event.end_seconds for event in pipelining.events), default=0.0)
    label = max(map(len, devices[:MOST_LANES]), default=0)
    width = max(console.width - label - 2 * len(INDENT), 20)
    for device in devices[:MOST_LANES]:
        line = Text(INDENT).append(f"{device:<{label}}", style="bold").append(INDENT)
        own = [event for event in pipelining.events if event.device == device and event.kind != "transfer"]
        console.print(line.append_text(lane(own, end, width)), soft_wrap=True)
    print_left_off(console, len(devices) - MOST_LANES, "devices", "--json lists all stages")
    console.print(Text(f"{INDENT}{'':<{label}}{INDENT}0{format_seconds(end):>{width - 1}}", style="bright_black"))
    print_items(console, _legend(pipelining.events))


def lane(events: Sequence[Event], end: float, width: int) -> Text:
    """Return one mark per slice of time: of what takes most of it, or a dot where the device waits for more than half.

    Events shorter than a slice add up with others of their kind, or a busy device would look as if it waited.
    """
    line = Text()
    if end <= 0:
        return line
    each = end / width
    spent: list[dict[str, float]] = [{} for _ in range(width)]
    marks: dict[str, Text] = {}
    for event in events:
        mark = _mark(event).plain
        marks.setdefault(mark, _mark(event))
        first, last = int(event.begin_seconds / each), min(int(event.end_seconds / each), width - 1)
        for at in range(first, last + 1):
            share = min(event.end_seconds, (at + 1) * each) - max(event.begin_seconds, at * each)
            spent[at][mark] = spent[at].get(mark, 0.0) + max(share, 0.0)
    for slice_ in spent:
        busy = sum(slice_.values()) >= 0.5 * each * (1 - 1e-9)
        line.append_text(marks[max(slice_, key=slice_.__getitem__)] if busy else _IDLE)
    line.rstrip()
    return line


def _mark(event: Event) -> Text:
    if event.kind in MARKS:
        return Text(MARKS[event.kind][0], style=MARKS[event.kind][1])
    number = max(event.microbatch, 0) % 10
    if event.kind == "backward":
        return Text("abcdefghij"[number], style="yellow")
    return Text(str(number), style="blue")


def _legend(events: Sequence[Event]) -> list[Text]:
    kinds = {event.kind for event in events}
    items = [Text("0-9", style="blue").append(" forward of a micro-batch", style="default")]
    if "backward" in kinds:
        items.append(Text("a-j", style="yellow").append(" its backward", style="default"))
    for kind, (mark, style, words) in MARKS.items():
        if kind in kinds:
            items.append(Text(mark, style=style).append(f" {words}", style="default"))
    return [*items, _IDLE.copy().append(" waits", style="default")]


def _print_stages(console: Console, pipelining: Pipelining) -> None:
    stages = pipelining.stages
    print_section(console, "Stages", "seconds and bytes of one micro-batch")
    columns = [
        Column(title="Stage", right=True),
        Column(title="Device", style="bold", flexible=True),
        *(Column(title=name, right=True) for name in ("Forward", "Backward", "Keeps", "In flight")),
        Column(style="bright_black", flexible=True),
    ]
    table: list[list[str | Text]] = [
        [
            str(number), stage.device, format_seconds(stage.forward_seconds), format_seconds(stage.backward_seconds),
            format_bytes(stage.activation_bytes), str(stage.in_flight), "computes again" if stage.recompute else "",
        ]
        for number, stage in enumerate(stages[:MOST_STAGES])
    ]  # fmt: skip
    if not any(stage.backward_seconds for stage in stages):  # inference: the rest is of training
        columns, table = columns[:3], [row[:3] for row in table]
    print_table(console, columns, table)
    print_left_off(console, len(stages) - MOST_STAGES, "stages", "--json lists all")
