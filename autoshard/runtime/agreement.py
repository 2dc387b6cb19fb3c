"""Processes tell each other what they are about to do, before the first collective: a difference would be a hang.

Every rank sends what it has, or the error that stopped it, and every rank raises if anything differs.
"""

import hashlib
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.common.fingerprint import fingerprint
from autoshard.common.packed import stored_tensors
from autoshard.errors import RankError
from autoshard.nested import tensors_in
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut
from autoshard.runtime.collectives import ProcessRanks, Ranks
from autoshard.runtime.meeting import meet
from autoshard.runtime.moves import named_tensors

_SAMPLE = 16  # values of each tensor that are compared
_COMPARED_BYTES = 64 << 10  # integers up to this size are compared between ranks, in every step
_COMPARED, _ROUNDING = 1024, 1e-3  # of each floating-point input so many numbers are, but for this part of their size


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What must be the same on all ranks, as hashes; `error`: why a rank can't go on; `random`: its generators."""

    plan: str = ""
    model: str = ""
    weights: str = ""
    inputs: str = ""
    error: str = ""
    random: tuple[torch.Tensor, ...] = ()


def state_of_rank(model: nn.Module, cuts: Sequence[Cut], device: torch.device | None) -> RankState:
    """Describe what this process is about to run; `device`: where it computes, if that is known."""
    return RankState(
        plan=hashlib.sha256(repr(tuple(cuts)).encode()).hexdigest(),
        model=fingerprint(model),
        weights=_sampled(model),
        random=random_states(device),
    )


def digest_of(plan: Plan) -> str:
    """A hash of what a plan lets ranks do; memory that was free when it was made, and its reasons, may differ."""
    devices = tuple(replace(device, memory_bytes=0) for device in plan.devices)
    done = replace(plan, devices=devices, reasons=(), whole=(), pins={}, target="")
    return hashlib.sha256(done.to_json().encode()).hexdigest()


def _generators(device: torch.device | None) -> tuple[Any, tuple[torch.device, ...]] | None:
    """The module of torch with the random generators of a device, and how it is named there ("mps" has only one).

    None where the CPU's is the only one.
    """
    if device is None or device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device), () if device.type == "mps" else (device,)


def random_states(device: torch.device | None) -> tuple[torch.Tensor, ...]:
    """The states of the random generators of the CPU and of a device."""
    own = _generators(device)
    return (torch.get_rng_state(), *([] if own is None else [own[0].get_rng_state(*own[1])]))


def set_random_states(states: Sequence[torch.Tensor], device: torch.device | None) -> None:
    """Let the generators of the CPU and of a device go on from these states."""
    first, *others = states
    torch.set_rng_state(first)
    own = _generators(device)
    if own is not None and others:
        own[0].set_rng_state(others[0], *own[1])


def agree(
    ranks: Ranks | None, state: RankState, error: Exception | None = None, device: torch.device | None = None
) -> None:
    """Raise on all ranks if one has an error, or another plan, model or weights than rank 0; `error`: this rank's own.

    Afterwards all ranks draw the random numbers that rank 0 does: what is replicated must be dropped alike, and
    sampled alike.
    """
    if isinstance(ranks, ProcessRanks):
        state = RankState(error=str(error) or type(error).__name__) if error is not None else state
        state = replace(state, random=state.random if ranks.rank == 0 else ())
        try:
            words = meet(ranks, pickle.dumps(state), error is not None)
        except RankError as problem:
            raise (error or problem) from problem
        states: dict[int, RankState] = {rank: pickle.loads(word) for rank, word in sorted(words.items())}
        if error is None:
            _decide(ranks, states, device)
    if error is not None:
        raise error


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """Raise on all ranks if what is inside raises an `Exception` on one of them: the others learn of it at the end."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    agree(ranks, RankState(), error)


def _decide(ranks: ProcessRanks, states: Mapping[int, RankState], device: torch.device | None) -> None:
    """Raise `RankError` for what stands against going on; else go on with the random numbers of rank 0."""
    members = ranks.members
    failed = next((rank for rank, state in states.items() if state.error), None)
    if failed is not None:
        raise RankError(f"rank {members[failed]} can't take part: {states[failed].error}")
    problem = _compared(list(states.values()), members)
    if problem:
        raise RankError(problem)
    if states[0].random:
        set_random_states(states[0].random, device)


Summary = tuple[float, float, float]


def summary_of(inputs: Sequence[torch.Tensor]) -> Summary:
    """Three numbers that tell inputs apart: one of shapes and small integers (ids of tokens, masks), a weighted sum of
    some of their floating-point numbers, and how large these are.
    """
    exact, weighted, size = 0, 0.0, 0.0
    for tensor in inputs:
        exact = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), exact)
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        values = tensor.detach()
        if values.is_floating_point():
            values = values.reshape(-1)[:: max(1, values.numel() // _COMPARED)][:_COMPARED]
            values = values.to("cpu", torch.float64).nan_to_num(0, 0, 0)
            weighted += float(values @ (1 + torch.arange(1, len(values) + 1, dtype=torch.float64).cos()))
            size += float(values.abs().sum())
        elif not values.is_complex() and values.nbytes <= _COMPARED_BYTES:
            exact = zlib.crc32(values.cpu().contiguous().numpy().tobytes(), exact)
    return float(exact), weighted, size


def other_inputs(rows: Sequence[Sequence[float]]) -> int | None:
    """The first of these summaries that is of other inputs than the one before all of them; None if there is none.

    Floating-point numbers may differ by rounding: what made them may add up in another order.
    """
    first = rows[0]
    return next(
        (
            number
            for number, row in enumerate(rows)
            if row[0] != first[0] or abs(row[1] - first[1]) > _ROUNDING * max(row[2], first[2])
        ),
        None,
    )


def _rows_of_all(ranks: ProcessRanks, row: Sequence[float], device: torch.device | None) -> list[list[float]]:
    """What every rank gives, by rank; sent from `device`, which is one that their group talks over."""
    words = torch.zeros(ranks.size, len(row), dtype=torch.float64)
    words[ranks.rank] = torch.tensor(row, dtype=torch.float64)
    return ranks.all_reduce(words.to(device)).tolist()


class SameInputs:
    """Pre-hook of a model that ranks share: raises `RankError` if they are given other inputs than each other.

    In the first calls, and then in every 16th. Where ranks divide tokens nothing else would show it: gradients are
    sums over ranks, so they are equal, and wrong.
    """

    def __init__(self, ranks: ProcessRanks) -> None:
        self.ranks, self.calls = ranks, 0

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or torch_private.autograd_node() is not None:
            return
        self.calls += 1
        if self.calls > 8 and self.calls % 16:
            return
        given = [one for _, one in tensors_in((args, kwargs)) if not one.is_meta]
        here = next((one.device for one in module.parameters() if not one.is_meta), None)  # others are in other stages
        other = other_inputs(_rows_of_all(self.ranks, summary_of(given), here))
        if other is not None:
            members = self.ranks.members
            raise RankError(
                f"rank {members[other]} has other inputs than rank {members[0]}, and they share one replica of the "
                f"model. Give all {len(members)} the same batch (DistributedSampler(…, num_replicas=dist."
                f"get_world_size() // {len(members)}, rank=dist.get_rank() // {len(members)})), and seed what is "
                "sampled alike."
            )


@dataclass(frozen=True, slots=True)
class Heard:
    """What ranks of a pipeline know of each other before a step.

    Attributes:
        news: one of them has something new to do, an error, or other integers than the first.
        values: of each rank.
        problem: which rank has other inputs, or another target, than which; "" if none has.
    """

    news: bool
    values: list[float]
    problem: str


def hear(ranks: ProcessRanks, given: Summary, target: Summary | None, news: bool, value: float) -> Heard:
    """Tell the others what this rank is given, whether it has news, and a value; all call it in every step.

    `target`: not every rank needs one.
    """
    row = (*given, *(target or (0.0, 0.0, 0.0)), float(target is not None), float(news), value)
    rows = _rows_of_all(ranks, row, torch.device("cpu"))
    aimed = [rank for rank, row in enumerate(rows) if row[6]]
    problem = ""
    for what, those, begin in (("another target", aimed, 3), ("other inputs", range(ranks.size), 0)):
        other = other_inputs([rows[rank][begin:] for rank in those]) if those else None
        if other is not None:
            first, found = ranks.members[those[0]], ranks.members[those[other]]
            problem = (
                f"rank {found} has {what} than rank {first}. Give all ranks of a pipeline the same batch, in the same "
                "order."
            )
    return Heard(any(row[7] or row[0] != rows[0][0] for row in rows), [row[8] for row in rows], problem)


def agree_in_step(ranks: Ranks, error: Exception | None, device: torch.device) -> None:
    """As `agree`, for every step: while no rank has an error one number is summed, in one collective."""
    try:
        failed = error is not None
        if isinstance(ranks, ProcessRanks):
            failed = bool(ranks.all_reduce(torch.tensor([float(failed)], device=device)).item())
    except RankError as problem:
        raise (error or problem) from problem
    if failed:
        agree(ranks, RankState(), error)


def _compared(states: Sequence[RankState], members: Sequence[int]) -> str:
    """What differs between the ranks; nothing: ""."""
    for what, remedy in (
        (
            "plan",
            "Plans that each rank makes for itself may differ with the memory that is free at that moment: make one, "
            "save it, and start all ranks with the same plan file.",
        ),
        ("model", "Build the same model on all ranks."),
        ("inputs", "Give all ranks of a pipeline the same batch, in the same order."),
        ("weights", "Load the same checkpoint on all ranks, or set the same seed before the model is made."),
    ):
        differing = [
            members[rank] for rank, state in enumerate(states) if getattr(state, what) != getattr(states[0], what)
        ]
        if differing:
            verb = "has another" if len(differing) == 1 else "have another"
            verb = verb.replace("another", "other") if what in ("weights", "inputs") else verb
            listed = ", ".join(map(str, differing))
            return f"rank{'s'[: len(differing) > 1]} {listed} {verb} {what} than rank {members[0]}. {remedy}"
    return ""


def _sampled(model: nn.Module) -> str:
    """Hash a few values of every tensor that has values."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors(model).items():
        digest.update(name.encode())
        for stored in stored_tensors(tensor):
            if (
                stored.numel()
                and not stored.is_meta
                and stored.layout is torch.strided
                and not stored.is_complex()
                and not stored.is_quantized
            ):
                values = stored.detach()
                while values.dim() > 1:  # the last of each dimension but one: no copy, whatever the strides
                    values = values.select(0, values.shape[0] - 1)
                values = values.reshape(-1)[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE]
                digest.update(values.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()
