"""The best mesh with its stages: all shapes in the order of their bounds, the best dozen by the clock, a few priced.

shapes ──bound──▶ partitions of each (`stage_cuts`) ──formula──▶ a dozen ──`simulate`──▶ a few ──the estimate──▶ one
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autoshard.estimate import Estimate
from autoshard.plan import Plan
from autoshard.strategies.compare import value_of
from autoshard.strategies.mesh_lines import MeshLines
from autoshard.strategies.mesh_shapes import Shape
from autoshard.strategies.stage_cuts import Found, Line, StageCuts, figure_of

_AS_GOOD = 1.002
"""Meshes that are so little slower count as equal: then the simpler one is taken."""
_DOZEN = 12
_SIMULATED_ACTIONS = 10_000
"""Actions of schedules that are played, but a dozen candidates in any case."""
_PRICED_OPS = 8_000
"""Ops of the run, times meshes, that are priced."""
_CLOSE = 1.15
"""How much worse than the best, by the formula, what is looked at may be."""
_TIGHT = 0.6
"""Part of the fullest device in use from which on memory may have decided."""
_ROOMS = (1.0, 1.25, 0.85, 0.7, 0.5)
"""Parts of the memory that are searched with: what a stage holds is known roughly before it is priced.

More than all of it only to see whether something faster fits after all; less where nothing did.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A shape with the stages of it; `value` is what is minimised."""

    shape: Shape
    line: Line
    found: Found
    value: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """A candidate as a plan with its estimate."""

    candidate: Candidate
    plan: Plan
    figures: Estimate
    value: float


def best_mesh(
    lines: MeshLines, shapes: Iterable[Shape], goal: str, write: Callable[[Candidate], Plan],
    price: Callable[[Plan], Estimate],
) -> tuple[Priced | None, Priced | None]:  # fmt: skip
    """Return the best plan that fits, and what lacks least of those that don't; between equals the simplest."""
    every = [(shape, line) for shape in shapes if (line := lines.line(shape)) and line.size >= shape.stages]
    most = max(2, min(_DOZEN, _PRICED_OPS // max(len(lines.profile.graph.ops), 1)))
    best: Priced | None = None
    closest: Priced | None = None
    for room in _ROOMS:
        if best is not None and (room < 1 or not _is_tight(best)):
            break
        for one in _looked_at(lines.whole.training, every, goal, room)[:most]:
            if best is not None and one.value > best.candidate.value * _CLOSE:
                break
            if best is not None and room > 1 and one.value > best.candidate.value / _AS_GOOD:
                break
            plan = write(one)
            figures = price(plan)
            priced = Priced(
                candidate=one, plan=plan, figures=figures, value=value_of(figures, goal, lines.whole.training)
            )
            if not figures.fits:
                closest = priced if closest is None or _lacking(priced) < _lacking(closest) else closest
            elif best is None or _better(priced.value, one.shape, best.value, best.candidate.shape):
                best = priced
    return best, closest


def _lacking(priced: Priced) -> int:
    return max(-device.free_bytes for device in priced.figures.devices)


def _is_tight(best: Priced) -> bool:
    """Whether with more memory something else may be chosen."""
    return any(best.candidate.found.recompute) or best.candidate.found.load > _TIGHT


def _looked_at(training: bool, shapes: Sequence[tuple[Shape, Line]], goal: str, room: float) -> list[Candidate]:
    """The best dozen candidates on devices with this part of their memory, by the clock where seconds count."""
    figure = figure_of(goal, training)
    searches = []
    for number, (shape, whole) in enumerate(shapes):
        line = replace(whole, capacity=whole.capacity * room)
        search = StageCuts(line, shape.schedule, shape.pipeline, shape.per_device, figure)
        searches.append((search.bound(), number, shape, search))
    found: list[tuple[Candidate, StageCuts]] = []
    least = float("inf")
    for bound, _, shape, search in sorted(searches, key=lambda one: one[:2]):
        if bound > least * _CLOSE:
            break
        for one in search.candidates():
            value = search.value(one)
            least = min(least, value)
            found.append((Candidate(shape=shape, line=search.line, found=one, value=value), search))
    found.sort(key=lambda one: (one[0].value, one[0].shape.simplicity))
    if figure != "seconds":
        return [one for one, _ in found[:_DOZEN]]
    timed, actions = list[Candidate](), 0
    for candidate, search in found:
        actions += 2 * candidate.shape.stages * candidate.shape.microbatches
        if actions > _SIMULATED_ACTIONS and len(timed) >= _DOZEN:
            break
        timed.append(replace(candidate, value=search.simulated(candidate.found)))
    return sorted(timed, key=lambda one: (float(f"{one.value:.3g}"), one.shape.simplicity))


def _better(value: float, shape: Shape, best: float, known: Shape) -> bool:
    """Faster; or about as fast and simpler."""
    if value < best / _AS_GOOD:
        return True
    return value <= best * _AS_GOOD and shape.simplicity < known.simplicity
