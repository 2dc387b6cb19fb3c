"""Steps that several commands take: options to a workload and devices, TARGET to a model, the model to a profile."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autoshard.cli.console import step
from autoshard.common.files import check_writable
from autoshard.errors import CaptureError, PlanError, SpecError
from autoshard.plan.choices import check_choices, strategy_named
from autoshard.plan.placement import check_known_in
from autoshard.plan.workload import Workload

if TYPE_CHECKING:
    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.plan import Plan
    from autoshard.plan.choices import Optimizer
    from autoshard.profile.profile import Profile


def check_before(
    out: Path | None, strategy: str = "auto", objective: str = "latency", schedule: str | None = None
) -> None:
    """Raise `SpecError`, before the long work, for names that do not exist and a file that can't be written."""
    check_choices(strategy=strategy, objective=objective, schedule=schedule)
    if out is not None:
        check_writable(out)


def asked_settings(
    strategy: str, objective: str, max_memory: list[str] | None, pin: list[str] | None = None,
    num_microbatches: int | None = None, schedule: str | None = None, assume_independent_rows: bool = False,
    *, out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What options say about planning, checked before the long work, as `plan_measured` and `chosen_for` take it."""
    strategy = strategy_named(strategy)
    check_before(out, strategy, objective, schedule)
    return {
        "strategy": strategy, "objective": objective, "max_memory": pairs(max_memory, "--max-memory", "cuda:0=20GiB"),
        "pins": pairs(pin, "--pin", "model.layers.0=cuda:0"), "num_microbatches": num_microbatches,
        "schedule": schedule, "assume_independent_rows": assume_independent_rows,
    }  # fmt: skip


def workload_of(
    batch: int | None, seq: int | None, new_tokens: int | None, train: bool, optimizer: str | None
) -> Workload:
    """The workload that options describe; without any it is an assumed one."""
    if optimizer is not None and not train:
        raise SpecError("--optimizer is read with --train only. Add --train, or leave it out.")
    return Workload(
        batch_size=batch,
        sequence_length=seq,
        new_tokens=new_tokens or 0,
        mode="training" if train else "inference",
        optimizer=cast("Optimizer", optimizer or "adamw"),
        assumed=batch is None and seq is None and new_tokens is None and not train,
    )


def changed_workload(
    known: Workload, batch: int | None, seq: int | None, new_tokens: int | None, train: bool, optimizer: str | None
) -> Workload:  # fmt: skip
    """The workload of a plan with what options change of it: what they leave out stays as it was planned."""
    asked = workload_of(batch, seq, new_tokens, train, optimizer)
    if asked.assumed:
        return known
    return Workload(
        batch_size=batch or known.batch_size,
        sequence_length=seq or known.sequence_length,
        new_tokens=known.new_tokens if new_tokens is None and not train else asked.new_tokens,
        mode="training" if train or (known.training and new_tokens is None) else "inference",
        optimizer=asked.optimizer if optimizer is not None else known.optimizer,
        dtype=known.dtype,
    )


def pairs(texts: list[str] | None, option: str, example: str) -> dict[str, str]:
    """["cuda:0=20GiB,cpu=60GiB"] -> {"cuda:0": "20GiB", "cpu": "60GiB"}."""
    found: dict[str, str] = {}
    for part in (part for text in texts or () for part in text.split(",")):
        name, equals, value = part.rpartition("=")
        if not equals or not value.strip():
            raise SpecError(f"{option} {part!r} makes no sense. Write {option} {example}.")
        if name.strip() in found:
            raise SpecError(f"{option} names {name.strip()!r} twice.")
        found[name.strip()] = value.strip()
    return found


def devices_of(spec: str, limits: dict[str, str]) -> "Cluster":
    """The devices; with "auto" and limits, exactly those that have a limit, as in max_memory elsewhere."""
    from autoshard.cluster.parse import parse_devices

    return parse_devices(limits if spec == "auto" and limits else spec)


def load(target: str, workload: Workload, *, with_weights: bool = False) -> "Target":
    """Build what TARGET names."""
    from autoshard.cli.target import load_target

    with step("building the model" if with_weights else "building the model without its weights"):
        return load_target(target, workload, with_weights=with_weights)


def profile_of(target: "Target") -> "Profile":
    """Profile a target for its workload."""
    from autoshard.api import profile

    with capturing(target):
        return profile(target.model, target.inputs, workload=target.workload)


@contextlib.contextmanager
def capturing(target: "Target") -> Iterator[None]:
    """Say that the model runs, and add to what goes wrong how to help."""
    # What torch logs about a failing op is in the error already.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with step("running the model without its weights"):
            yield
    except CaptureError as error:
        raise CaptureError(f"{error} {target.hint}".strip()) from error


def check_same_model(plan: "Plan", profile: "Profile", plan_file: str) -> None:
    """Raise `PlanError` if a plan was made for another model than the profiled one, or names what is not in it."""
    if plan.fingerprint and plan.fingerprint != profile.graph.fingerprint:
        raise PlanError(
            f"{plan_file} was made for another model: parameter names, shapes or dtypes differ. "
            f"Plan this one again with `autoshard plan`."
        )
    check_known_in(plan.placements, profile.graph)
