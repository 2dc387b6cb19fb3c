"""Plan: what goes where, as strings and ints. Made anywhere, saved as JSON, applied elsewhere."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from autoshard.common.files import write_whole
from autoshard.common.module_paths import above, is_below
from autoshard.errors import PlanError
from autoshard.plan.batching import BatchAxis
from autoshard.plan.cuts import Whole
from autoshard.plan.placement import check_known_in
from autoshard.plan.sharding import Cut, Results
from autoshard.plan.workload import Workload

PLAN_VERSION = 2
PLAN_FORMAT = "autoshard plan"
_USUAL = {"kept_layers": 0, "sequence_parallel": True}
"""Fields of plans for processes that are written where they are something else."""
PROCESS_FIELDS = ("launch", "micro_batch", "recompute", "kept_layers", "precision", "compiled", "sequence_parallel")
"""Fields that only plans for processes have."""
PLAN_VARIABLE = "AUTOSHARD_PLAN"
"""Environment variable by which `autoshard run --plan` tells a script its plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDevice:
    """A device a plan was made for: enough to rebuild its cluster entry from the hardware table.

    `memory_bytes` is 0 where nobody said how much there is (a device map that was imported). `network`: how its host
    differs from a usual one, in the words of a device spec ("4x100Gb/s, no nvlink").
    """

    name: str
    memory_bytes: int
    network: str = ""
    kind: str = "generic"
    host: str = "host0"


MESH_AXES = ("dp", "fsdp", "pp", "cp", "tp")
"""Dimensions of a mesh that multiply to its devices; `ep` takes its ranks out of fsdp, cp and tp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How many devices there are along each dimension of a mesh.

    Attributes:
        dp: replicas that keep all parameters of their stage and rank.
        fsdp: replicas of which each keeps 1 / fsdp of parameters, gradients and optimizer state, and gathers the rest.
        pp: pipeline ranks. tp: tensor-parallel ranks of a stage. cp: parts of every sequence.
        ep: groups of experts, among ranks that are replicas otherwise.
        shares: samples of the batch per replica, in proportion; empty: all alike.
        stages_outermost: devices of one stage follow each other, else those of one replica.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    shares: tuple[int, ...] = ()
    stages_outermost: bool = False

    @property
    def size(self) -> int:
        """How many devices it has."""
        return self.data * self.pp * self.cp * self.tp

    @property
    def data(self) -> int:
        """How many replicas there are, sharded or not."""
        return self.dp * self.fsdp

    @property
    def pipeline(self) -> int:
        """The number of pipeline ranks."""
        return self.pp

    @property
    def tensor(self) -> int:
        """The number of tensor-parallel ranks of a stage."""
        return self.tp

    @property
    def sharded(self) -> bool:
        """Whether replicas keep parts of the parameters."""
        return self.fsdp > 1

    @property
    def degrees(self) -> dict[str, int]:
        """All six degrees by name."""
        return {"dp": self.dp, "fsdp": self.fsdp, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}

    def rank(self, *, data: int = 0, pipeline: int = 0, tensor: int = 0) -> int:
        """The number of a device in `Plan.devices`, and of its process, where sequences are not divided."""
        outer = pipeline * self.data + data if self.stages_outermost else data * self.pp + pipeline
        return outer * self.tp + tensor

    def place(self, rank: int) -> tuple[int, int, int]:
        """The (replica, pipeline rank, tensor-parallel rank) of a device, where sequences are not divided."""
        outer, tensor = divmod(rank, self.tp)
        pipeline, data = divmod(outer, self.data) if self.stages_outermost else divmod(outer, self.pp)[::-1]
        return data, pipeline, tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline: modules (or tensors) that run one after another. Stage i is on pipeline position i mod p.

    `recompute`: activations are not kept for backward but computed again from what came into the stage.
    """

    paths: tuple[str, ...]
    recompute: bool = False


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
        streamed: path of a module -> "cpu" or "disk", where its parameters are kept between its calls; they are brought
            to the device of its placement for each call, the next module's while this one computes. In the order in
            which the modules run. No path is inside another. Empty where everything stays on its device.
        aligned: paths of modules inside which tensors of several devices meet (an op of theirs would mix devices), so
            the runtime watches their ops and moves what is elsewhere. Empty for most plans.
        written_back: paths of modules that write into an argument which was copied from another device; the runtime
            copies the result back.
        mesh: how the devices form replicas, stages and tensor-parallel ranks; None for plans that only place modules,
            and for those that only cut them. `placements` are then those of replica 0 and tensor rank 0, and cuts have
            `mesh.tensor` shares.
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
        kept_layers: the last layers, so many, keep all of their activations nevertheless.
        precision: of training, a key of `engine.precision.PRECISIONS`; else the dtype of weights; "" as the model is.
        compiled: the modules are to be compiled.
    """

    strategy: str
    objective: str
    workload: Workload
    devices: tuple[PlanDevice, ...]
    placements: Mapping[str, str]
    aligned: tuple[str, ...] = ()
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
    streamed: Mapping[str, str] = field(default_factory=dict)
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

        Streamed modules are on "cpu" or "disk" there, which is how Accelerate writes what it brings for each call.

        Raises `PlanError` for a plan with cuts: no such dict can say that parameters are cut.
        """
        if self.cuts:
            raise PlanError(
                f"this plan cuts parameters over {len(self.devices)} devices, which a device map can't say: it places "
                'whole modules. Use autoshard.apply(model, plan), or plan with strategy="balanced".'
            )
        return {**self.placements, **self.streamed}

    @property
    def tp_plan(self) -> dict[str, str]:
        """The dict that `from_pretrained(tp_plan=…)` takes, such as {"layers.*.mlp.up": "colwise"}.

        Raises `PlanError`, naming the block, for cuts that it can't say: uneven ones, or with integers to be scaled.
        """
        from autoshard.plan.tp_plan import write_tp_plan

        return write_tp_plan(self)

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
        streamed = {path: name for path, name in placements.items() if name == "disk"}
        computing = next((name for name in placements.values() if name not in ("cpu", "disk")), "cpu")
        placements |= dict.fromkeys(streamed, computing)
        if profile is not None:
            check_known_in(placements, profile.graph)
            workload, fingerprint = workload or profile.workload, fingerprint or profile.graph.fingerprint
        known = {device.name: device for device in devices}
        names = (*placements.values(), *streamed.values())
        used = {name: known.get(name, PlanDevice(name=name, memory_bytes=0)) for name in names}
        return cls(
            strategy="device_map",
            objective="memory",
            workload=workload or Workload(assumed=True),
            devices=(*devices, *(device for name, device in used.items() if name not in known)),
            placements=placements,
            streamed=streamed,
            reasons=("the device map was given by hand",),
            fingerprint=fingerprint,
        )

    def __repr__(self) -> str:
        from autoshard.plan.summary import heading

        return f"<Plan: {heading(self)}>"

    def summary(self) -> str:
        """Return the plan as text: its devices, what is on each, and why. What it costs is in an `Estimate`."""
        from autoshard.plan.summary import summary

        return summary(self)

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        from autoshard.plan.notebook import plan_html

        return plan_html(self)

    def to_json(self) -> str:
        """Write the plan as JSON text; the same plan gives the same bytes."""
        data: dict[str, Any] = {"format": PLAN_FORMAT}
        for item in fields(self):
            data[item.name] = getattr(self, item.name)
        data["workload"] = self.workload.to_dict()
        data["devices"] = [
            {part.name: getattr(d, part.name) for part in fields(d) if part.name != "network" or d.network}
            for d in self.devices
        ]
        data["placements"], data["pins"] = dict(self.placements), dict(self.pins)
        for name in ("cuts", "whole", "results", "stages"):
            rows = [asdict(row) for row in data.pop(name)]
            if rows:  # plans that cut nothing look as they always did
                data[name] = rows
        for name in ("mesh", "batch"):
            row = data.pop(name)
            if row is not None:
                data[name] = asdict(row)
        for name in ("shares", "stages_outermost"):  # other meshes look as they always did
            if self.mesh is not None and not getattr(self.mesh, name):
                del data["mesh"][name]
        if self.batch is not None and not self.batch.assumed:  # checked batches look as they always did
            del data["batch"]["assumed"]
        for name in ("target", "layers"):
            if not data[name]:
                del data[name]
        if not self.launch:
            for name in PROCESS_FIELDS:
                del data[name]
        else:
            for name in [name for name, usual in _USUAL.items() if data[name] == usual]:
                del data[name]
        if self.streamed:  # so do plans that keep everything in place
            data["streamed"] = dict(data.pop("streamed"))
        else:
            del data["streamed"]
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote. Raises `PlanError` on anything else: nothing is guessed and nothing is dropped."""
        from autoshard.plan.reading import read_plan

        return read_plan(text)

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


def refuse_priced_alone(plan: Plan, what: str, instead: str) -> None:
    """Raise `PlanError` for a plan whose recipe is priced, but which nothing but `plan` and `estimate` handle yet."""
    if plan.launch:
        raise PlanError(f"{what} does not handle plans for one process per device yet ({plan.strategy}). {instead}")


def check_placements(placements: Mapping[str, str]) -> None:
    """Raise `PlanError` unless every path and device is a sensible string and no path lies inside another."""
    if not placements:
        raise PlanError(
            "the placements are empty: nothing says where the model goes. {'': 'cuda:0'} would put all there."
        )
    for path, device in placements.items():
        if not isinstance(path, str) or (path and "" in path.split(".")):
            raise PlanError(f"{path!r} in the placements is not a module path such as 'encoder.layers.0'.")
        if not isinstance(device, str) or not device.strip():
            raise PlanError(f"the device of {path!r} in the placements is {device!r}; write a name such as 'cuda:0'.")
    for path in placements:
        for parent in reversed([*above(path)]):
            if parent in placements:
                whole = repr(parent) if parent else "the whole model"
                raise PlanError(
                    f"the placements overlap: {path!r} is inside {whole}, which has its own device. "
                    f"Name the children of {whole} one by one instead."
                )


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
