"""What a process of a pipeline knows: its place in the mesh, its stages, which tensors it has, and who has the others.

plan.stages   0 embed, layers.0     1 layers.1           2 layers.2           3 norm, head (tied to embed)
position      0 (rank 0)            1 (rank 1)           0                    1
embed.weight  held by stage 0 and, tied, by stage 3: both positions have it, position 0 is its owner
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.plan import Plan
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.groups import Made
from autoshard.runtime.sharded import Replaced
from autoshard.runtime.used import Used


@dataclass(slots=True, kw_only=True)
class PipelineRecord:
    """What was applied to a model in this process, and what undoes it.

    Attributes:
        ranks: all processes of the plan; `across`: those of this replica and tensor rank, by pipeline position;
            `replicas`: those that have the same part of the model, None without replicas; `control`: as `across`, for
            tensors on the CPU; `made`: groups that were made for this model.
        replica, position, tensor_rank: of this process (`Mesh.place`).
        stages: numbers of the stages that this process runs, ascending.
        holders: name of every parameter and buffer, tied ones under each name -> positions that have it, the owner
            first. Small buffers are kept by all positions; the owner's count.
        originals: name -> device it was on before; `whole`: name -> its shape when the model is whole.
        around: paths of the modules whose tensors are at several positions, or that stages do not call themselves.
        replaced: parameters that were replaced by sharded ones; `used`: follows those, None where none are.
        silent: set while the model runs only to be recorded: whatever hooks a forward lets it pass.
        extras: what else belongs to the applied model, by who put it there.
    """

    plan: Plan
    ranks: ProcessRanks
    across: ProcessRanks
    replicas: ProcessRanks | None = None
    control: ProcessRanks | None = None
    made: Made = field(default_factory=Made)
    replica: int
    pp_rank: int
    tensor_rank: int
    device: torch.device
    stages: tuple[int, ...]
    holders: dict[str, tuple[int, ...]]
    originals: Mapping[str, torch.device]
    around: tuple[str, ...] = ()
    replaced: list[Replaced] = field(default_factory=list)
    used: Used | None = None
    silent: bool = False
    extras: dict[str, Any] = field(default_factory=dict)

    def owner(self, name: str) -> int:
        """The position whose value of a tensor counts."""
        return self.holders.get(name, (0,))[0]

    def has(self, name: str) -> bool:
        """Whether this process has the values of a tensor; what was registered after `apply` all have."""
        return name not in self.holders or self.pp_rank in self.holders[name]

    def __deepcopy__(self, memo: dict) -> "PipelineRecord":
        return self  # a copy of the model runs on the same processes


class StagesHook:
    """The hook on the root that holds the record, and what is of this very model; it refuses calls.

    `handles`: undo its hooks; `parameters`: by each of their names when the plan was applied.
    """

    def __init__(self, record: PipelineRecord) -> None:
        self.record = record
        self.handles: list[Any] = []
        self.parameters: dict[str, nn.Parameter] = {}
        record.made.users.add(self)

    def __deepcopy__(self, memo: dict) -> "StagesHook":
        made = StagesHook(self.record)
        made.handles, made.parameters = copy.deepcopy((self.handles, self.parameters), memo)
        return made

    def __call__(self, module: nn.Module, args: tuple) -> None:
        self.refuse(module, args)

    def check_replaced(self, model: nn.Module) -> None:
        """Raise `ApplyError` unless the model has the parameters that its stages know, whose gradients are summed."""
        now = dict(model.named_parameters(remove_duplicate=False))
        wrong = next((name for name in self.parameters | now if now.get(name) is not self.parameters.get(name)), "")
        if wrong:
            raise ApplyError(
                f"{wrong} was added, removed or replaced after autoshard.apply, which stages on other processes don't "
                "know. Call autoshard.remove(model), change it then, and apply a plan that was made with it. For other "
                "values alone call model.load_state_dict(…), without assign=True."
            )

    def refuse(self, module: nn.Module, args: tuple) -> None:
        """Raise `ApplyError` unless a schedule runs the model, or it is only recorded, or it answers."""
        if not self.record.silent and not self.record.plan.workload.generates:
            raise ApplyError(
                f"{type(module).__name__} is called, and the stages of its model are on several processes. Call "
                "autoshard.schedule(model).eval(…) or .step(…) on all of them; for generate() plan with new_tokens."
            )


def written_down(module: nn.Module) -> tuple:
    """What of a module that stages do not call is in a recording as it was: numbers, switches, hooks, its forward."""
    attributes = (
        (name, value)
        for name, value in vars(module).items()
        if type(value) in (bool, int, float, str) and name != "training"
    )
    hooks = torch_private.hook_numbers(module, except_of="autoshard")
    return *attributes, id(vars(module).get("forward")), hooks


def pipeline_record(model: nn.Module) -> PipelineRecord | None:
    """What of a pipeline over processes was applied to a model, None if nothing was."""
    state = stages_of(model)
    return None if state is None else state.record


def stages_of(model: nn.Module) -> StagesHook | None:
    """The hook that says that a pipeline over processes is applied to a model, None if none is."""
    return next((hook for hook in torch_private.forward_pre_hooks(model) if isinstance(hook, StagesHook)), None)
