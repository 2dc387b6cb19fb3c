"""The largest size (batch, or sequence) with which something fits, by few exact trials.

    1, 2 fit, 10 % and 18 % full  ->  try 12 (a line through both, up to full)  ->  11 %, 12 … 13 does not fit  ->  12

Memory is about linear in the batch, and more in the sequence: the next size to try is where the line is full, or the
middle of what is left. The answer fits and the next size does not: both were tried.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Generic, TypeVar

from autoshard.cluster.cluster import Cluster
from autoshard.errors import AutoshardError, PlanError
from autoshard.plan.workload import Workload
from autoshard.search.best import search
from autoshard.search.choose import Chosen
from autoshard.search.traced import SHORT_TOKENS

Made = TypeVar("Made")
MOST = 2**30
EVEN_TOKENS = 128
"""A sequence that is looked for is a multiple of it, if the one to begin with is."""
_GROWTH = 16
"""Most by which a size grows from one trial to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(Generic[Made]):
    """The largest multiple of `step` that fits, what was made for it, and all trials: (size, part of memory used, None:
    no)."""

    size: int
    made: Made
    trials: tuple[tuple[int, float | None], ...]
    step: int = 1

    def reason(self, vary: str, in_parts: str = "") -> str:
        """What a plan of this size says of it; `vary`: "batch_size" or "sequence_length"; `in_parts`: computed how."""
        what, count = vary.replace("_", " "), len(self.trials)
        largest = f"largest multiple of {self.step}" if self.step > 1 else "largest"
        return f"{what} {self.size} is the {largest} that fits{in_parts}: of {count} that were tried no larger one did"


def largest(
    make: Callable[[int], tuple[Made, float]], *, start: int = 1, step: int = 1,
    tried: Callable[[int, float | None], None] | None = None,
) -> Largest[Made]:  # fmt: skip
    """Find the largest multiple of `step` from `start` on for which `make` succeeds.

    `make`: returns what fits and how full the fullest device is, from 0 to 1, or raises an `AutoshardError`. `tried` is
    told of every trial. Raises what `make` raises for the first size.
    """
    trials: list[tuple[int, float | None]] = []
    fits: dict[int, float] = {}

    def attempt(count: int) -> Made:
        try:
            made, fits[count] = make(count * step)
        finally:
            trials.append((count * step, fits.get(count)))
            if tried is not None:
                tried(*trials[-1])
        return made

    low, high = max(-(-start // step), 1), 0
    made = attempt(low)
    while high - low != 1 and low * step < MOST:
        guess = max(_where_full(fits), low + 1)
        if not high:
            count = min(max(guess, 2 * low if len(fits) < 2 else 0), _GROWTH * low)
        else:  # the line may lead astray: every second time the middle
            count = guess if guess < high and len(trials) % 2 else (low + high) // 2
        try:
            made, low = attempt(count), count
        except AutoshardError:
            high = count
    if trials[-1][0] != low * step:  # callers keep what was measured last
        made, _ = make(low * step)
    return Largest(size=low * step, made=made, trials=tuple(trials), step=step)


def _where_full(fits: dict[int, float]) -> int:
    """Where a line through the last two sizes that fitted is full."""
    sizes = sorted(fits)[-2:]
    if len(sizes) < 2 or fits[sizes[1]] <= fits[sizes[0]]:
        return 2 * sizes[-1]
    (a, b), (x, y) = ((size, fits[size]) for size in sizes)
    return int(min(x + (1.0 - y) * (x - a) / (y - b), float(MOST)))


def largest_chosen(
    vary: str, workload: Workload, planned: Callable[..., tuple[Made, Chosen | None]], cluster: Cluster,
    num_microbatches: int | None = None, tried: Callable[[int, float | None], None] | None = None,
) -> tuple[Made, Chosen] | None:  # fmt: skip
    """The plan for processes with the largest batch or sequence that fits, with what `planned` gave beside it.

    `planned(workload, num_microbatches=…)`. None where it gives none for the first size: then one process is planned.
    Raises what planning raises there.
    """
    batch = vary == "batch_size"
    # a step of training with several micro-batches has no largest batch: one per replica unless more are asked for
    count = num_microbatches or (1 if batch and workload.training else None)
    begin = getattr(workload, vary) or (1 if batch else 512)
    step = (len(cluster.devices) if workload.training else 1) * (num_microbatches or 1)
    if not batch:  # ranks that share a sequence take equal parts of it
        step = gcd(begin, EVEN_TOKENS)
    start = max(1, -(-begin // step)) * step

    def at(size: int) -> tuple[Made, Chosen | None]:
        if size not in last:
            asked = replace(workload, **{vary: size, "assumed": False})  # type: ignore[arg-type]
            last.clear()
            last[size] = planned(asked, num_microbatches=count, **known)
        return last[size]

    last: dict[int, tuple[Made, Chosen | None]] = {}
    known: dict[str, Any] = {}
    first = at(start)[1]
    if first is None:
        return None
    known["advise"] = False
    if first.traced.derived and first.traced.work.tokens > SHORT_TOKENS:  # it was found with few tokens
        known["why_undivided"] = first.task.given.why_undivided

    def make(size: int) -> tuple[int, float]:
        if batch:
            return size, _fullness(first, size)
        chosen = at(size)[1]
        if chosen is None:
            raise PlanError(f"sequences of {size} tokens are planned for one process.")
        return size, chosen.estimate.fullest.peak_bytes / max(1, chosen.estimate.fullest.memory_bytes)

    found = largest(make, start=start, step=step, tried=tried)
    other, chosen = at(found.size)
    assert chosen is not None
    in_parts = "" if count is None else " in 1 micro-batch" if count == 1 else f" in {count} micro-batches"
    reasons = (*chosen.plan.reasons[:-1], found.reason(vary, in_parts), chosen.plan.reasons[-1])
    return other, replace(chosen, plan=replace(chosen.plan, reasons=reasons))


def _fullness(chosen: Chosen, batch: int) -> float:
    """How full the fullest device is with another batch. Raises `PlanError` where no recipe fits."""
    best = search(replace(chosen.task, limits=replace(chosen.task.limits, samples=batch))).best
    if best is None:
        raise PlanError(f"no recipe fits with a batch of {batch}.")
    return best.memory.used / max(1, chosen.estimate.fullest.memory_bytes)
