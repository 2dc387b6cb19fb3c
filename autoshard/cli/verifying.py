"""verify of a plan for processes: as many are started here, each verifies with the others, and the first one tells."""

import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoshard.errors import AutoshardError, PlanError, VerifyError
from autoshard.plan import Plan
from autoshard.runtime.collectives import count_processes

if TYPE_CHECKING:
    from autoshard.verify import Verification

MOST_PROCESSES = 16
"""Each has the whole model twice."""


def needs_processes(plan: Plan | None) -> bool:
    """Whether a plan is for several processes, and this is none of them."""
    several = plan is not None and plan.launch == "processes" and len(plan.devices) > 1
    return several and count_processes() == 0


def verify_in_processes(target: str, plan: Plan, training: bool | None, new_tokens: int | None) -> "Verification":
    """Start a process per device on this machine and verify in them; devices that are not here are the CPU.

    Raises `PlanError` for a plan of too many, and `VerifyError` with what stopped the first process.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = len(plan.devices)
    if count > MOST_PROCESSES:
        raise PlanError(
            f"this plan is for {count} processes, and verify starts at most {MOST_PROCESSES} on one machine. Plan the "
            "same kinds of degrees smaller, as in --mesh fsdp=2,tp=2, and verify that."
        )
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="spawn",
    )  # fmt: skip
    try:
        found: dict[int, Any] = elastic_launch(config, _on_rank)(target, _here(plan).to_json(), training, new_tokens)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
        raise VerifyError(f"process {rank} of {count} ended {how}; what it printed is above.") from None
    for result in found.values():
        if isinstance(result, str):
            raise VerifyError(result)
    note = f"{count} processes ran on this machine, each with the whole model for comparison"
    return replace(found[0], notes=(note, *found[0].notes))


def _here(plan: Plan) -> Plan:
    """The plan on devices of this machine: its own if they are here, else a CPU each."""
    from autoshard.verify.stage import is_here, renamed

    if all(is_here(device.name) for device in plan.devices):
        return plan
    names = {device.name: f"cpu:{number}" for number, device in enumerate(plan.devices)}
    here = renamed(plan, names)
    return replace(here, devices=tuple(replace(device, host="host0") for device in here.devices))


def _on_rank(target: str, text: str, training: bool | None, new_tokens: int | None) -> "Verification | str":
    """What one process finds, or why it stopped."""
    import torch
    import torch.distributed as dist

    from autoshard.api import verify
    from autoshard.cli.steps import load

    plan = Plan.from_json(text)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(plan.devices)))
    dist.init_process_group()
    torch.manual_seed(0)  # all have the same weights
    try:
        loaded = load(target, plan.workload, with_weights=True)
        return verify(loaded.model, plan, inputs=loaded.inputs, training=training, new_tokens=new_tokens)
    except AutoshardError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
