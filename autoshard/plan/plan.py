"""Plan: what goes where, as strings and ints. Made anywhere, saved as JSON, applied elsewhere."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from autoshard.common.files import write_whole
from autoshard.common.module_paths import is_below
from autoshard.common.sizes import format_bytes
from autoshard.errors import PlanError
from autoshard.plan.batching import BatchAxis
from autoshard.plan.mesh import Mesh, PlanDevice, Stage
from autoshard.plan.notebook import as_html
from autoshard.plan.placement import check_known_in, check_placements
from autoshard.plan.reading import PLAN_FORMAT, PLAN_VERSION, read_plan
from autoshard.plan.sharding import Cut, Results, Whole
from autoshard.plan.tp_plan import write_tp_plan
from autoshard.plan.workload import Workload

WRITTEN_IF_USED = frozenset({"cuts", "whole", "results", "offloaded", "mesh", "batch", "stages", "layers", "target",
                             "kept_layers", "sequence_parallel", "divided_outputs", "alike"})  # fmt: skip
"""Fields that most plans do not use, and leave out."""
PROCESS_FIELDS = ("launch", "micro_batch", "recompute", "kept_layers", "precision", "compiled", "sequence_parallel",
                  "divided_outputs", "alike")  # fmt: skip
"""Fields that only plans for processes have."""
PLAN_VARIABLE = "AUTOSHARD_PLAN"
"""Environment variable by which `autoshard run --plan` tells a script its plan."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Decisions only; consequences are an `Estimate`, always recomputed.

    Attributes:
        placements: module path or tensor name -> device name. Paths never overlap: every parameter and buffer has
            exactly one entry that is its name or a prefix of it. It is also the `device_map` that Transformers and
            Accelerate take. With cuts, {"": the first device}: see `cuts`.
        cuts: what is cut over ranks. Rank i is `devices[i]`, all of them take part, and every rank has the whole model
            on its device, with its share of what is cut. Empty for plans that place modules.
        whole: matrices that a plan with cuts leaves whole on every rank, and why.
        results: what the blocks of a plan with cuts, and the modules around them, gave when it was made. What they give
            besides must be the same on all ranks, or it is refused.
        offloaded: path of a module -> "cpu" or "disk", where its parameters are kept between its calls; they are
            brought to the device of its placement for each call, the next module's while this one computes. In the
            order in which the modules run. No path is inside another. Empty where everything stays on its device.
        mixed_device: paths of modules inside which tensors of several devices meet (an op of theirs would mix devices),
            so the runtime watches their ops and moves what is elsewhere. Empty for most plans.
        written_back: paths of modules that write into an argument which was copied from another device; the runtime
            copies the result back.
        mesh: how the devices form replicas, stages and tensor-parallel ranks; None for plans that only place modules,
            and for those that only cut them. `placements` are then those of replica 0 and tensor rank 0, and cuts have
            `mesh.cut_ranks` shares.
        batch: how the batch is divided into micro-batches and over replicas; None where it is not.
        stages: of a pipeline, in the order in which they run; their paths are the keys of `placements`. With
            interleaving there are several per device. Of sharded replicas, the modules that are gathered as one.
        num_microbatches: into how many parts each replica divides its batch; `schedule`: "gpipe", "1f1b", "interleaved"
            or "zero-bubble", the order of their forwards and backwards; "none" where there is one.
        objective: "latency", "throughput" or "memory".
        reasons: why this plan, in sentences, for people.
        fingerprint: of the model's names, shapes and dtypes; apply refuses another model.
        layers: paths of the modules that are recomputed, and whose parameters are gathered, as one, where `stages` are
            other ones: of plans for processes that train, in the order in which they run.
        target: what the command line was given to plan for, so that other commands find the model again.
        launch: "processes" for a plan that one process per device carries out (torchrun), "one-process" for one of a
            single device, both with the precision, recomputation and compilation that they name; "" for all others.
        micro_batch: samples that a replica computes at once, 0 where nobody chose.
        recompute: "none", "selective" (the output of attention and every second product are kept) or "full".
        sequence_parallel: ranks that share matrices divide the tokens between them in training, where that is sound.
        divided_outputs: logits of which ranks compute the loss in parts, in training, are given out as a `DTensor`.
        alike: paths of modules whose shapes inside depend on values, and which give one tensor as large as what they
            are given: ranks of other stages need not run them to know it.
        kept_layers: the last layers, so many, keep all of their activations nevertheless.
        precision: of training, a key of `engine.precision.PRECISIONS`; else the dtype of weights; "" as the model is.
        compiled: the modules are to be compiled.
    """

    strategy: str
    objective: str
    workload: Workload
    devices: tuple[PlanDevice, ...]
    placements: Mapping[str, str]
    mixed_device: tuple[str, ...] = ()
    written_back: tuple[str, ...] = ()
    num_microbatches: int = 1
    schedule: str = "none"
    reasons: tuple[str, ...] = ()
    fingerprint: str = ""
    version: int = PLAN_VERSION
    pins: Mapping[str, str] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()
    whole: tuple[Whole, ...] = ()
    results: tuple[Results, ...] = ()
    offloaded: Mapping[str, str] = field(default_factory=dict)
    mesh: Mesh | None = None
    batch: BatchAxis | None = None
    stages: tuple[Stage, ...] = ()
    layers: tuple[str, ...] = ()
    target: str = ""
    launch: str = ""
    micro_batch: int = 0
    recompute: str = "none"
    kept_layers: int = 0
    sequence_parallel: bool = True
    divided_outputs: bool = False
    alike: tuple[str, ...] = ()
    precision: str = ""
    compiled: bool = False

    @property
    def gathered(self) -> tuple[str, ...]:
        """Paths of the modules that are recomputed, and whose parameters are gathered, as one."""
        return self.layers or tuple(path for stage in self.stages for path in stage.paths)

    @property
    def spread(self) -> tuple[str, ...]:
        """Paths of the modules whose experts are divided over ranks."""
        divided = (cut for cut in self.cuts if any(action.kind == "dispatch" for action in cut.actions))
        return tuple(path for cut in divided for path in cut.blocks)

    def layers_of(self, stage: Stage) -> tuple[str, ...]:
        """Those of `gathered` that are in a stage."""
        return tuple(layer for layer in self.gathered if any(is_below(layer, path) for path in stage.paths))

    @property
    def device_map(self) -> dict[str, str]:
        """The dict that `from_pretrained(device_map=…)` and `accelerate.dispatch_model` take.

        Offloaded modules are on "cpu" or "disk" there, which is how Accelerate writes what it brings for each call.

        Raises `PlanError` for a plan with cuts: no such dict can say that parameters are cut.
        """
        if self.cuts:
            raise PlanError(
                f"this plan cuts parameters over {len(self.devices)} devices, which a device map can't say: it places "
                'whole modules. Use autoshard.apply(model, plan), or plan with strategy="balanced".'
            )
        return {**self.placements, **self.offloaded}

    @property
    def tp_plan(self) -> dict[str, str]:
        """The dict that `from_pretrained(tp_plan=…)` takes, such as {"layers.*.mlp.up": "colwise"}.

        Raises `PlanError`, naming the block, for cuts that it can't say: uneven ones, or with integers to be scaled.
        """
        return write_tp_plan(self.cuts, self.whole)

    @classmethod
    def from_device_map(
        cls,
        device_map: Mapping[str, Any],
        profile: Any = None,
        *,
        workload: Workload | None = None,
        devices: tuple[PlanDevice, ...] = (),
        fingerprint: str = "",
    ) -> "Plan":
        """Import a `device_map` dict: module path -> device index, device string or `torch.device`.

        Modules on "disk" stay in their file and are brought, for each call, to the first device of the map that is
        neither "cpu" nor "disk", else to the CPU, as Accelerate does; modules on "cpu" compute there.

        `profile` gives the workload and the fingerprint, if there is one. `devices` describes the devices as far as
        they are known; the others are added with 0 bytes. Raises `PlanError` if a key or a device makes no sense, if
        keys overlap, or if the profiled model has no such part.
        """
        if not isinstance(device_map, Mapping):
            raise PlanError(f"a device map is a dict such as {{'': 'cuda:0'}}, got {type(device_map).__name__}.")
        placements = {path: _device_name(path, device) for path, device in device_map.items()}
        check_placements(placements)
        offloaded = {path: name for path, name in placements.items() if name == "disk"}
        computing = next((name for name in placements.values() if name not in ("cpu", "disk")), "cpu")
        placements |= dict.fromkeys(offloaded, computing)
        if profile is not None:
            check_known_in(placements, profile.graph)
            workload, fingerprint = workload or profile.workload, fingerprint or profile.graph.fingerprint
        known = {device.name: device for device in devices}
        names = (*placements.values(), *offloaded.values())
        used = {name: known.get(name, PlanDevice(name=name, memory_bytes=0)) for name in names}
        return cls(
            strategy="device_map",
            objective="memory",
            workload=workload or Workload(assumed=True),
            devices=(*devices, *(device for name, device in used.items() if name not in known)),
            placements=placements,
            offloaded=offloaded,
            reasons=("the device map was given by hand",),
            fingerprint=fingerprint,
        )

    @property
    def heading(self) -> str:
        """The strategy, the objective and the number of devices."""
        count = len(self.devices)
        return f"{self.strategy}, for {self.objective}, {count} device{'s' if count != 1 else ''}"

    @property
    def remarks(self) -> list[str]:
        """What the plan does beside placing modules, one line each."""
        found = []
        if self.mesh is not None:
            degrees = [f"{name}={degree}" for name, degree in self.mesh.degrees.items() if degree > 1]
            found.append(f"mesh {', '.join(degrees) or 'of one device'}")
        if self.num_microbatches > 1:
            found.append(f"{self.num_microbatches} micro-batches, {self.schedule}")
        if self.cuts:
            found.append(f"{len(self.cuts)} groups of parameters are cut over {len(self.devices)} devices")
        if self.offloaded:
            found.append(f"{len(self.offloaded)} modules are kept on {', '.join(sorted(set(self.offloaded.values())))}")
        return found

    @property
    def runs(self) -> list[tuple[str, str, str]]:
        """(first and last path, how many, device) of placements that follow one another on a device; not with cuts."""
        found = []
        for device, rows in groupby({} if self.cuts else self.placements, key=self.placements.__getitem__):
            paths = [path or "(whole model)" for path in rows]
            several = len(paths) > 1
            found.append((f"{paths[0]} … {paths[-1]}" if several else paths[0],
                          f"{len(paths)} entries" if several else "", device))  # fmt: skip
        return found

    def __repr__(self) -> str:
        return f"<Plan: {self.heading}>"

    def summary(self) -> str:
        """Return the plan as text: its devices, what is on each, and why. What it costs is in an `Estimate`."""
        lines = [f"Plan  {self.heading}"]
        for device in self.devices:
            size = format_bytes(device.memory_bytes) if device.memory_bytes else "memory unknown"
            lines.append(f"  {device.name}  {device.kind}  {size}")
        lines += [f"  {remark}" for remark in self.remarks]
        for paths, count, device_name in self.runs:
            lines.append(f"  {paths}{f'  ({count})' if count else ''} -> {device_name}")
        return "\n".join([*lines, *(f"  - {reason}" for reason in self.reasons)])

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        return as_html(self.summary())

    def to_json(self) -> str:
        """Write the plan as JSON text; the same plan gives the same bytes."""
        values = asdict(self)
        if not self.launch:
            for name in PROCESS_FIELDS:
                del values[name]
        usual = {one.name: one.default for one in fields(self) if one.name in WRITTEN_IF_USED}
        data = {
            name: value for name, value in values.items()
            if name not in usual or (value not in ((), {}) and value != usual[name])
        }  # fmt: skip
        for device in data["devices"]:
            if not device["network"]:
                del device["network"]
        for part, name in (("mesh", "shares"), ("mesh", "stages_outermost"), ("batch", "assumed")):
            if part in data and not data[part][name]:
                del data[part][name]
        return json.dumps({"format": PLAN_FORMAT, **data}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote. Raises `PlanError` on anything else: nothing is guessed and nothing is dropped."""
        return read_plan(cls, text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file. It appears whole or not at all. Raises `SpecError` if it can't be written."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> "Plan":
        """Read a plan file; without a path that of `autoshard run --plan FILE`.

        Raises `PlanError` if it is missing, damaged, newer than this version or not a plan.
        """
        path = path or os.environ.get(PLAN_VARIABLE)
        if path is None:
            raise PlanError("no plan was given. Name a file, or start the script with `autoshard run --plan FILE`.")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise PlanError(
                f"{path} is not a plan: it is not text. Make one with `autoshard plan … -o {path}`."
            ) from None
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None


def _device_name(path: str, device: Any) -> str:
    """Turn an index, a digit string, a device string or a `torch.device` into a device name."""
    if isinstance(device, torch.device):
        return str(device)
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"{_accelerator()}:{device}"
    if isinstance(device, str) and device.strip():
        return f"{_accelerator()}:{int(device)}" if device.strip().isdecimal() else device.strip()
    raise PlanError(
        f"the device of {path!r} is {device!r}; write an index such as 0, or a name such as 'cuda:0' or 'cpu'."
    )


def _accelerator() -> str:
    """What a bare index means: the accelerator of this machine, or CUDA where there is none."""
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None else "cuda"
