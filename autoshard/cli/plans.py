"""PLAN of the commands: a plan file, or a JSON file that holds a device_map."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cli.steps import check_same_model, load, profile_of
from autoshard.errors import SpecError
from autoshard.plan import PLAN_FORMAT, Plan

if TYPE_CHECKING:
    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.profile.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A plan with the model that it is for, profiled for the plan's workload, and its devices."""

    plan: Plan
    loaded: "Target"
    profile: "Profile"
    cluster: "Cluster"


def open_plan(plan_file: str, target: str | None = None) -> Opened:
    """Read a plan and find the model again: `target`, or what the plan was made for.

    Raises `SpecError` where neither tells, `PlanError` for another model, and what reading and capturing raise.
    """
    from autoshard.cluster.parse import cluster_of

    plan = read_plan(plan_file)
    loaded = load(model_of(plan, plan_file, target), plan.workload)
    measured = profile_of(loaded)
    check_same_model(plan, measured, plan_file)
    return Opened(plan=plan, loaded=loaded, profile=measured, cluster=cluster_of(plan.devices))


def model_of(plan: Plan, plan_file: str, target: str | None) -> str:
    """Return where the model of a plan is: `target`, or what the plan says. Raises `SpecError` where neither tells."""
    wanted = target or plan.target
    if not wanted:
        raise SpecError(f"{plan_file} does not say which model it is for. Name it as well: model.py, or a config.json.")
    if target is None and not _is_here(wanted):
        raise SpecError(f"{plan_file} was made for {wanted}, which is not here. Name where the model is now.")
    return wanted


def _is_here(target: str) -> bool:
    """Whether a plan's target is a path here, or a model in the Hugging Face cache."""
    if any(Path(path).exists() for path in (target, target.rpartition(":")[0] or target)):
        return True
    from autoshard.integrations.huggingface import cached_config

    return cached_config(target) is not None


def read_plan(text: str) -> Plan:
    """Return the plan in a file; that of a device_map has an assumed workload. Raises `SpecError` or `PlanError`."""
    path = Path(text)
    if not path.is_file():
        raise SpecError(f"{text[:200]!r} does not exist; PLAN is a file written by `autoshard plan … -o plan.json`.")
    data = _device_map(path)
    if data is not None:
        return Plan.from_device_map(data)
    return Plan.load(path)


def is_plan(text: str) -> bool:
    """Whether a text names a file with a plan or a device_map, not a model."""
    path = Path(text)
    if path.suffix == ".py" or not path.is_file():
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and (data.get("format") == PLAN_FORMAT or _device_map(path) is not None)


def _device_map(path: Path) -> dict[str, Any] | None:
    """The content if it is an object of path: device and nothing else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # Plan.load says what is wrong
    if not isinstance(data, dict) or not data or "format" in data:
        return None
    plain = all(isinstance(value, (str, int)) and not isinstance(value, bool) for value in data.values())
    return data if plain else None
