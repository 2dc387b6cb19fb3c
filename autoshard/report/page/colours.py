"""The colours of pictures: parts of memory, kinds of events, devices. Each is used beside a word, never alone."""

from collections.abc import Sequence

PARTS = {
    "weights": "#3b7dd8",
    "gradients": "#d1495b",
    "optimizer": "#8e5fc2",
    "activations": "#e0a030",
    "cache": "#3aa76d",
    "offloaded": "#2aa5b5",
    "overhead": "#8a8f98",
}
KINDS = {
    "forward": "#3b7dd8",
    "backward": "#d1495b",
    "weight": "#b36bd0",
    "recompute": "#7fb2ee",
    "optimizer": "#8e5fc2",
    "launch": "#c3c8d0",
    "transfer": "#e0a030",
    "fetch": "#2aa5b5",
    "all-reduce": "#3aa76d",
    "all-gather": "#7bc47f",
    "decode": "#8e5fc2",
    "exchange": "#e0a030",
    "gather": "#7bc47f",
    "reduce": "#3aa76d",
}
HELD = {
    "context, allocator": PARTS["overhead"],
    "workspace": "#b4b9c1",
    **{part: PARTS[part] for part in ("weights", "optimizer", "gradients", "cache")},
    "unsharded parameters": "#7fb2ee",
    "activations": PARTS["activations"],
    "transient": "#f0cf8e",
}
"""Kinds of memory of a rank over a step, what is there all the time first."""
_DEVICES = (
    "#3b7dd8",
    "#e0a030",
    "#3aa76d",
    "#d1495b",
    "#8e5fc2",
    "#2aa5b5",
    "#c96f2e",
    "#7a8b2f",
    "#c2559a",
    "#5b6b8c",
)


def device_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour per device. Beyond ten they begin again: names tell devices apart."""
    return {name: _DEVICES[i % len(_DEVICES)] for i, name in enumerate(names)}
