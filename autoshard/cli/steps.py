"""Steps that several commands take: options to devices, TARGET to a model, the model to a profile."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.cli.console import step
from autoshard.common.sizes import format_bytes
from autoshard.errors import CaptureError, PlanError, SpecError
from autoshard.plan.placement import check_known_in
from autoshard.plan.workload import Workload

if TYPE_CHECKING:
    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.plan import Plan
    from autoshard.profile.profile import Profile

COPIES = 3
"""The original, the split copy and their activations are in memory at once where a model is verified."""


def devices_of(spec: str, limits: dict[str, str]) -> "Cluster":
    """The devices; with "auto" and limits, exactly those that have a limit, as in max_memory elsewhere."""
    from autoshard.cluster.parse import parse_devices

    return parse_devices(limits if spec == "auto" and limits else spec)


def load(target: str, workload: Workload, *, with_weights: bool = False) -> "Target":
    """Build what TARGET names; example inputs of another batch are repeated, or cut.

    Raises `SpecError` for new tokens of a model that makes none.
    """
    from autoshard.cli.target import load_target
    from autoshard.search.asked import in_size

    with step("building the model" if with_weights else "building the model without its weights"):
        loaded = load_target(target, workload, with_weights=with_weights)
    if loaded.inputs is None:
        return loaded
    with capturing(loaded):
        loaded = replace(loaded, inputs=in_size(loaded.model, loaded.inputs, workload))
    answers = any(hasattr(loaded.model, name) for name in ("generate", "config"))
    if loaded.workload.generates and not answers and profile_of(loaded).further is None:
        raise SpecError(
            f"--new-tokens has no effect: {type(loaded.model).__name__} has no generate(), and no step after the "
            "prompt could be recorded. Leave it out, or give 0."
        )
    return loaded


def load_to_run(target: str, workload: Workload) -> "Target":
    """Build what TARGET names with its weights. Raises `PlanError` where this machine can't run it whole and split."""
    from autoshard.integrations.skeleton import has_weights

    skeleton = load_skeleton(target, workload, 1)
    return skeleton if has_weights(skeleton.model) else load(target, workload, with_weights=True)


def load_skeleton(target: str, workload: Workload, processes: int) -> "Target":
    """The same without its weights, for what so many processes of this machine run."""
    from autoshard.cluster.detect import free_host_bytes
    from autoshard.integrations.skeleton import parameter_bytes

    skeleton = load(target, workload)
    needed, free = processes * COPIES * parameter_bytes(skeleton.model), free_host_bytes()
    if needed > free:
        where = f" in each of {processes} processes" if processes > 1 else ""
        raise PlanError(
            f"verifying runs the model whole and split{where}, which takes about {format_bytes(needed)} of memory; "
            f"{format_bytes(free)} are free. Verify a smaller configuration of the same architecture."
        )
    return skeleton


def profile_of(target: "Target") -> "Profile":
    """Profile a target for its workload."""
    from autoshard.api import profile

    with capturing(target):
        return profile(target.model, target.inputs, workload=target.workload)


@contextlib.contextmanager
def capturing(target: "Target", what: str = "running the model without its weights") -> Iterator[None]:
    """Say that the model runs, and add to what goes wrong how to help."""
    try:
        with step(what):
            yield
    except CaptureError as error:
        raise CaptureError(f"{error} {target.hint}".strip()) from error
    except PlanError as error:
        if "fit" not in str(error) or not target.assumed:
            raise
        raise PlanError(f"{error} {target.assumed}") from error


@contextlib.contextmanager
def loading_for(plan_file: str | None, planned: Workload | None, workload: Workload) -> Iterator[None]:
    """Raise `PlanError` where TARGET can't have the length that a plan was made for, unless another one was typed."""
    from autoshard.cli.target import LengthError

    try:
        yield
    except LengthError as error:
        if planned is None or planned.sequence_length != workload.sequence_length:
            raise
        raise PlanError(
            f"{plan_file} was made for another model, or for other inputs: its sequences have "
            f"{workload.sequence_length} tokens, and example_inputs has none of that length. "
            "Plan this one again with `autoshard plan`."
        ) from error


def check_same_model(plan: "Plan", profile: "Profile", plan_file: str) -> None:
    """Raise `PlanError` if a plan was made for another model than the profiled one, or names what is not in it."""
    if plan.fingerprint and plan.fingerprint != profile.graph.fingerprint:
        raise PlanError(
            f"{plan_file} was made for another model: parameter names, shapes or dtypes differ. "
            f"Plan this one again with `autoshard plan`."
        )
    check_known_in(plan.placements, profile.graph)
