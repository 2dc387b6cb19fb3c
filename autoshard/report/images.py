"""Each picture of a plan as an SVG of its own, and as PNG: memory, timeline, placement, transfers.

memory      a lane per device: what fills it at its fullest moment
timeline    a lane per device and per device's links: one predicted pass
placement   a strip per level of the module tree, as wide as parameters and buffers are large, coloured by device
transfers   from (rows) to (columns): bytes per pass
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import Estimate
from autoshard.engine.events import events
from autoshard.errors import SpecError
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.page.colours import KINDS, PARTS, device_colours
from autoshard.report.page.lanes import fold, lane_of, lanes_of
from autoshard.report.page.tree import Node, module_tree
from autoshard.report.rows import device_parts, device_runs

WIDTH = 960
_LEFT, _RIGHT, _ROW, _TOP = 150, 200, 26, 64
_INK, _FAINT, _TRACK = "#1c2330", "#5a6475", "#e6eaf1"
_FONT = 'font-family="\'DejaVu Sans\', Arial, Helvetica, sans-serif" font-size="12"'
_MOST_EVENTS = 3000
_MOST_LEVELS = 4


def pictures(plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, *, title: str = "") -> dict[str, str]:
    """Return {name: SVG}."""
    return {
        "memory": _memory(estimate, title),
        "timeline": _timeline(plan, estimate, profile, cluster, title),
        "placement": _placement(plan, profile, cluster, title),
    }


def to_png(svg: str, *, zoom: float = 2.0) -> bytes:
    """Draw an SVG as PNG. Raises `SpecError` where resvg is not installed."""
    try:
        import resvg_py
    except ImportError:
        raise SpecError("PNG images need resvg: pip install resvg-py. SVG images need nothing: --image svg.") from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom))


def _memory(estimate: Estimate, title: str) -> str:
    lanes = device_runs(estimate.devices)
    body, scale = [], WIDTH - _LEFT - _RIGHT
    for row, (device, label) in enumerate(lanes):
        y = _TOP + row * _ROW
        full = max(device.memory_bytes, device.peak_bytes, 1)
        body += [_text(_LEFT - 8, y + 16, label, anchor="end"), _rect(_LEFT, y + 2, scale, _ROW - 6, _TRACK)]
        x = float(_LEFT)
        for part, nbytes in device_parts(device).items():
            width = scale * nbytes / full
            if nbytes:
                body.append(_rect(x, y + 2, width, _ROW - 6, PARTS[part], f"{label}: {part} {format_bytes(nbytes)}"))
            x += width
        if device.free_bytes < 0:
            body.append(_rect(_LEFT + scale * device.memory_bytes / full, y, 2, _ROW - 2, "#b3261e", "all it has"))
        said = f"{format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}"
        body.append(_text(_LEFT + scale + 8, y + 16, said if device.peak_bytes else "unused", colour=_FAINT))
    used = [part for part in PARTS if any(device_parts(device)[part] for device in estimate.devices)]
    return _picture(f"Memory: {title}", _TOP + len(lanes) * _ROW, body, {part: PARTS[part] for part in used})


def _timeline(plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, title: str) -> str:
    found = fold(events(plan, profile, cluster), _MOST_EVENTS)
    lanes = lanes_of(found, cluster.names)
    end = max([estimate.recorded_seconds, *(event.end_seconds for event in found)]) or 1.0
    scale = WIDTH - _LEFT - 40
    body = []
    for row, (name, link) in enumerate(lanes):
        y = _TOP + row * _ROW
        body += [
            _text(_LEFT - 8, y + 16, f"→ {name}" if link else name, anchor="end"),
            _rect(_LEFT, y + 2, scale, _ROW - 6, _TRACK),
        ]
    number = {lane: row for row, lane in enumerate(lanes)}
    for event in found:
        x, width = _LEFT + scale * event.begin_seconds / end, scale * (event.end_seconds - event.begin_seconds) / end
        seconds = format_seconds(event.end_seconds - event.begin_seconds)
        about = f"{event.kind} {event.label}, {seconds}"
        y = _TOP + number[lane_of(event)] * _ROW + 2
        body.append(_rect(x, y, max(width - 0.3, 0.4), _ROW - 6, KINDS[event.kind], about))
    bottom = _TOP + len(lanes) * _ROW
    for i in range(5):
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        body.append(
            _text(_LEFT + scale * i / 4, bottom + 14, format_seconds(end * i / 4), colour=_FAINT, anchor=anchor)
        )
    kinds = {event.kind for event in found}
    return _picture(f"One pass: {title}", bottom + 20, body, {kind: KINDS[kind] for kind in KINDS if kind in kinds})


def _placement(plan: Plan, profile: Profile, cluster: Cluster, title: str) -> str:
    root = module_tree(plan, profile)
    colours = device_colours(cluster.names)
    total = max(root.nbytes, 1)
    scale = WIDTH - 40
    body: list[str] = []
    deepest = 0

    def draw(node: Node, x: float, level: int) -> None:
        nonlocal deepest
        deepest = max(deepest, level)
        width, y = scale * node.nbytes * node.count / total, _TOP + level * 44
        at = x
        for device, nbytes in node.devices.items():
            part = width * nbytes / max(node.nbytes, 1)
            label = f"{node.module.path or node.label}{f' and {node.count - 1} like it' if node.count > 1 else ''}"
            body.append(_rect(at, y + 16, max(part - 0.8, 0.4), 22, colours.get(device, _TRACK), f"{label}: {device}"))
            at += part
        name = f"{node.label} {node.count}×" if node.count > 1 else node.label
        if width > 7.5 * len(name):
            body.append(_text(x + 2, y + 12, name, colour=_FAINT))
        if level + 1 < _MOST_LEVELS and node.count == 1:
            for child in node.children:
                draw(child, x, level + 1)
                x += scale * child.nbytes * child.count / total

    draw(root, 20, 0)
    used = [name for name in cluster.names if name in root.devices]
    legend = {name: colours[name] for name in used}
    return _picture(f"Where the model is: {title}", _TOP + (deepest + 1) * 44, body, legend)


def _picture(title: str, height: float, body: Sequence[str], legend: Mapping[str, str]) -> str:
    """The frame of a picture: its title, a legend, what is drawn."""
    items, x = [], 20.0
    for name, colour in legend.items():
        items += [_rect(x, 38, 11, 11, colour), _text(x + 16, 48, name, colour=_FAINT)]
        x += 34 + 7.2 * len(name)
    size = f'width="{WIDTH}" height="{height + 16:g}" viewBox="0 0 {WIDTH} {height + 16:g}"'
    heading = f'<text x="20" y="24" font-size="16" font-weight="bold" fill="{_INK}">{escape(title)}</text>'
    background = _rect(0, 0, WIDTH, height + 16, "#ffffff")
    lines: Iterable[str] = [background, heading, *items, *body]
    inner = "\n".join(lines)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>\n<title>{escape(title)}</title>\n{inner}\n</svg>\n'


def _rect(x: float, y: float, width: float, height: float, colour: str, about: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}"'
    return f"{box}><title>{escape(about)}</title></rect>" if about else f"{box}/>"


def _text(x: float, y: float, text: str, *, colour: str = _INK, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
