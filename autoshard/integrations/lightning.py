"""Strategies for Lightning's Trainer: the module is planned for and changed in place; the loop stays the Trainer's.

    Trainer(strategy=AutoshardStrategy({"cuda:0": "20GiB", "cuda:1": "20GiB"}))      one process, several devices
    Trainer(strategy=AutoshardProcessesStrategy(strategy="data-parallel"), devices=4)  one process per device

What is planned is the module's own `forward`, so `training_step` should call the module (`self(x)`). Inputs come from
`inputs`, or from the module's `example_input_array`, as Lightning has it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autoshard
from autoshard.errors import CheckpointError, SpecError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.data_parallel import replica_record
from autoshard.runtime.dispatch import is_applied
from autoshard.runtime.pipeline_record import pipeline_record

_WHOLE = StateDictOptions(full_state_dict=True)


class _Planned(Strategy):
    """Apply a plan where other strategies move the module to its device."""

    plan: "Plan | None"

    def _prepare(self, devices: Any, inputs: Any, plan: "Plan | None", settings: Mapping[str, Any]) -> None:
        self.plan, self._devices, self._inputs, self._settings = plan, devices, inputs, dict(settings)

    def _apply(self) -> Plan:
        module = self._module()
        inputs = self._inputs if self._inputs is not None else module.example_input_array
        if self.plan is None and inputs is None:
            raise SpecError(
                f"nothing says what {type(module).__name__} is called with. Set self.example_input_array in it, or "
                "give the strategy inputs=."
            )
        if self.plan is None:
            settings = {"workload": Workload(mode="training"), **self._settings}
            self.plan = autoshard.plan(module, self._devices, inputs=inputs, **settings)
        autoshard.apply(module, self.plan)
        plugin: Any = self.precision_plugin
        clip = autoshard.clip_grad_norm_
        plugin.clip_grad_by_norm = lambda optimizer, norm: clip(plugin.main_params(optimizer), norm)
        return self.plan

    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module = self._module()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if replica_record(module) is not None:
                set_optimizer_state_dict(module, optimizer, state, options=_WHOLE)
            else:  # torch's own loading puts the state of each parameter where the parameter is
                optimizer.load_state_dict(state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        module = self._module()
        if cut_record(module) is not None or pipeline_record(module) is not None:
            raise CheckpointError(
                "this process has a part of the optimizer's state, and a checkpoint of the Trainer holds that of one. "
                "Use ModelCheckpoint(save_weights_only=True), and autoshard.save_checkpoint to go on with training."
            )
        if replica_record(module) is not None:
            return get_optimizer_state_dict(module, optimizer, options=_WHOLE)
        return super().optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self._module()
        if replica_record(module) is None or cut_record(module) is not None:
            return super().lightning_module_state_dict()
        return get_model_state_dict(module, options=_WHOLE)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._module()
        if replica_record(module) is None or cut_record(module) is not None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            whole = StateDictOptions(full_state_dict=True, strict=strict)
            set_model_state_dict(module, checkpoint["state_dict"], options=whole)

    def teardown(self) -> None:
        if self.lightning_module is not None and is_applied(self.lightning_module):
            autoshard.remove(self.lightning_module)
        super().teardown()


class AutoshardStrategy(_Planned, SingleDeviceStrategy):
    """Train on several devices from one process.

    `devices`, and what else `autoshard.plan` takes, such as `strategy="balanced"`; or a `plan`. `inputs`: what the
    module is called with. Raises what `autoshard.plan` and `autoshard.apply` raise when the Trainer sets it up.
    """

    strategy_name = "autoshard"

    def __init__(self, devices: Any = "auto", *, inputs: Any = None, plan: "Plan | None" = None, **settings: Any):
        current = torch.accelerator.current_accelerator(check_available=True)
        super().__init__(device="cpu" if current is None else f"{current.type}:0")
        self._prepare(devices, inputs, plan, settings)

    def model_to_device(self) -> None:
        plan = self._apply()
        if plan.devices[0].name.partition(":")[0] != "cpu":  # batches go to where the root is
            self._root_device = torch.device(next(iter(plan.placements.values())))


class AutoshardProcessesStrategy(_Planned, DDPStrategy):
    """Train with one process per device: replicas (sharded or not), or matrices cut over the processes.

    Takes what `AutoshardStrategy` does. Of replicas each process gets its own part of the data, as with "ddp";
    processes that share a replica get the same.
    """

    strategy_name = "autoshard_processes"

    def __init__(self, devices: Any = None, *, inputs: Any = None, plan: "Plan | None" = None, **settings: Any):
        super().__init__()
        self._prepare(devices, inputs, plan, {"strategy": "data-parallel", **settings})

    def setup(self, trainer: Any) -> None:
        Strategy.setup(self, trainer)  # that of DDP would wrap the module

    def _setup_model(self, model: Any) -> Any:
        return model

    def model_to_device(self) -> None:
        if self._devices is None:
            kind = self.root_device.type
            self._devices = "auto" if kind != "cpu" else [f"cpu:{rank}" for rank in range(self.world_size)]
        plan = self._apply()
        if plan.mesh is not None and plan.mesh.pp > 1:
            raise SpecError(
                "a pipeline over processes trains through autoshard.schedule(model, loss).step(…), which a Trainer "
                'does not call. Use strategy="data-parallel" or "column-parallel" with it.'
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.plan.mesh if self.plan is not None else None
        if mesh is None:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": mesh.data, "rank": mesh.place(self.global_rank)[0]}
