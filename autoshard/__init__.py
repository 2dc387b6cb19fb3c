"""Automatic model partitioner for PyTorch: profile a model, plan where every module goes, apply the plan, and compare
the result with the original.
"""

import gc

from autoshard.common.start import end_quietly, is_command

if is_command():
    end_quietly()
    gc.disable()  # until all is imported, when the command switches it on: a seventh of the time of the imports

import torch

if torch.distributed.is_available():
    # The default arguments of its functions are the process group there is when it is imported, for good. torch imports
    # it late, here and there; a group made before would never end, and its threads can abort a process at its exit.
    import torch.distributed.nn.functional

# Some public calls bear the name of the package they lead to, and importing a submodule binds its name here. So these
# are imported first and the calls bound after them: `autoshard.plan` is the call, while `from autoshard.plan import
# Plan` finds the package.
import autoshard.capture
import autoshard.plan
import autoshard.profile
import autoshard.report
import autoshard.simulate
import autoshard.verify  # noqa: F401
from autoshard.api import (
    apply,
    capture,
    clip_grad_norm_,
    estimate,
    largest,
    load,
    load_checkpoint,
    plan,
    profile,
    remove,
    save,
    save_checkpoint,
    schedule,
    simulate,
    verify,
)
from autoshard.cluster.cluster import Cluster
from autoshard.engine.estimate import Estimate
from autoshard.errors import (
    ApplyError,
    AutoshardError,
    CaptureError,
    CheckpointError,
    PlanError,
    RankError,
    SpecError,
    VerifyError,
)
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.report.reporting import compare, explain, report

__version__ = "0.1.0"

__all__ = [
    "ApplyError",
    "AutoshardError",
    "CaptureError",
    "CheckpointError",
    "Cluster",
    "Estimate",
    "Plan",
    "PlanError",
    "RankError",
    "SpecError",
    "VerifyError",
    "Workload",
    "apply",
    "capture",
    "clip_grad_norm_",
    "compare",
    "estimate",
    "explain",
    "largest",
    "load",
    "load_checkpoint",
    "plan",
    "profile",
    "remove",
    "report",
    "save",
    "save_checkpoint",
    "schedule",
    "simulate",
    "verify",
]


def __dir__() -> list[str]:
    """The public names; modules of the package and of torch, which importing binds here, are left out."""
    return [*__all__, "__version__"]
