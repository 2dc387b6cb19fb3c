"""Memory over a step as an SVG: bytes by kind, piled up, from moment to moment, and what the device has."""

from collections.abc import Mapping, Sequence
from html import escape

from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import RankEstimate
from autoshard.report.page.colours import HELD

OUTSIDE = "context, allocator"
"""What is taken of a device beside tensors: it is there all the time."""
WIDTH, HEIGHT = 520, 230
_LEFT, _TOP, _BOTTOM, _RIGHT = 8, 14, 26, 66


def held(rank: RankEstimate) -> list[tuple[str, dict[str, int]]]:
    """(moment, bytes by kind) of a class of ranks; the fullest moment adds up to its peak."""
    fullest = max(sum(moment.bytes.values()) for moment in rank.curve)
    return [(moment.name, {OUTSIDE: rank.peak_bytes - fullest, **moment.bytes}) for moment in rank.curve]


def kinds_of(ranks: Sequence[RankEstimate]) -> list[str]:
    """Kinds that occur, in the order in which they are piled up."""
    found = {kind for rank in ranks for _, kinds in held(rank) for kind, nbytes in kinds.items() if nbytes}
    return [*(kind for kind in HELD if kind in found), *sorted(found - set(HELD))]


def curve_svg(rank: RankEstimate, memory_bytes: int, about: str) -> str:
    """Draw the curve of one class of ranks, with `memory_bytes` as a line."""
    moments = held(rank)
    most = max(memory_bytes, rank.peak_bytes) * 1.04
    across, up = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    xs = [_LEFT + across * at / max(1, len(moments) - 1) for at in range(len(moments))]

    def y(nbytes: float) -> float:
        return _TOP + up * (1 - nbytes / most)

    below, body = [0] * len(moments), []
    for kind in kinds_of([rank]):
        above = [floor + kinds.get(kind, 0) for floor, (_, kinds) in zip(below, moments, strict=True)]
        line = [f"{x:.1f},{y(n):.1f}" for x, n in zip(xs, above, strict=True)]
        back = [f"{x:.1f},{y(n):.1f}" for x, n in zip(reversed(xs), reversed(below), strict=True)]
        said = ", ".join(f"{name} {format_bytes(kinds.get(kind, 0))}" for name, kinds in moments)
        title = f"<title>{escape(f'{kind}: {said}')}</title>"
        body.append(f'<polygon points="{" ".join([*line, *back])}" fill="{HELD.get(kind, "#999")}">{title}</polygon>')
        below = above
    for (name, _), x, at in zip(moments, xs, range(len(moments)), strict=True):
        anchor = "start" if at == 0 else "end" if at == len(moments) - 1 else "middle"
        body.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{escape(name)}</text>')
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
    peak = max(range(len(moments)), key=below.__getitem__)
    body.append(f'<circle cx="{xs[peak]:.1f}" cy="{y(below[peak]):.1f}" r="4"/>')
    for nbytes, kind, words in _lines(memory_bytes, rank.peak_bytes):
        body.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}"/>'
        )
        body.append(f'<text x="{WIDTH - _RIGHT + 5}" y="{y(nbytes) + 4:.1f}">{words}</text>')
    inner = "".join(body)
    return f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(about)}">{inner}</svg>'


def _lines(memory_bytes: int, peak_bytes: int) -> list[tuple[int, str, str]]:
    """What the device has, and the peak where the two are not in each other's way."""
    lines = [(memory_bytes, "limit", format_bytes(memory_bytes))]
    if abs(memory_bytes - peak_bytes) > 0.08 * memory_bytes:
        lines.append((peak_bytes, "peak", format_bytes(peak_bytes)))
    return lines


def curve_rows(rank: RankEstimate, kinds: Sequence[str]) -> list[tuple[str, list[int], int]]:
    """(moment, bytes by kind, sum) as a table says them."""
    found = []
    for name, own in held(rank):
        row = [own.get(kind, 0) for kind in kinds]
        found.append((name, row, sum(row)))
    return found


def percent(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Parts as shares of a whole, for bars."""
    return {name: 100 * part / whole if whole else 0.0 for name, part in parts.items()}
