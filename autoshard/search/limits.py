"""What is asked of a plan for processes, and what a model and a workload allow of its mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autoshard.cluster.cluster import RESERVED
from autoshard.engine.blocks import ModelWork
from autoshard.engine.precision import inference_precision, training_precision
from autoshard.errors import PlanError, SpecError
from autoshard.plan.choices import Objective

DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
LONG_SEQUENCE = 16_384
"""Tokens of a sequence from which on dividing it over ranks is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is allowed.

    Attributes:
        samples: of the batch, of all replicas together; tokens: of a sequence.
        layers: that can be divided over stages; experts: of a layer, 0 for none.
        tensor: degrees of tensor parallelism; slices: by the path of layers, how many slices ranks share; widest: how
            many devices share them at most.
        divides_tokens: ranks that share matrices may divide the tokens between them.
        why_not: what stands against dividing the batch, "" for nothing; why_not_staged: number of stages -> what stands
            against answers in so many.
    """

    samples: int
    tokens: int
    layers: int
    tensor: tuple[int, ...]
    experts: int
    attention: bool
    slices: Mapping[str, int] = field(default_factory=dict)
    widest: int = 1
    divides_tokens: bool = True
    why_not: str = ""
    why_not_staged: Mapping[int, str] = field(default_factory=dict)

    @property
    def divisible(self) -> bool:
        """Whether the batch may be divided."""
        return not self.why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of a plan for processes; what is None is chosen.

    Attributes:
        launch: "one-process", "processes" or None: both.
        mesh: degrees by name; also given as a text such as "fsdp=8,tp=2", or None.
        precision: of training, by name; dtype: of weights, "auto" for the model's own; compiled: whether modules are
            compiled, None: for answers, where the host would be too slow.
        divided_outputs: logits of which ranks compute the loss in parts are given out as they are.
        reserve: part of the memory of a device that is kept free.
        one_process_alone: what was asked for that only plans of one process have, such as pins; "" for nothing.
        why_undivided: what stands against dividing the batch, "" for nothing; None: that is to be found out.
        advise: a refusal says what would fit, which takes some searches.
        axes: which dimensions may be larger than 1; everyone: all devices take part, since their processes run already.
    """

    strategy: str = "auto"
    objective: Objective = "latency"
    launch: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    micro_batch: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    precision: str = "auto"
    dtype: str = "auto"
    compiled: bool | None = None
    divided_outputs: bool = False
    reserve: float = RESERVED
    assume_independent_rows: bool = False
    one_process_alone: str = ""
    why_undivided: str | None = None
    advise: bool = True
    axes: tuple[str, ...] = DEGREES
    everyone: bool = False

    def __post_init__(self) -> None:
        if self.launch not in (None, "one-process", "processes"):
            raise SpecError(f"unknown launch {self.launch!r}: use one-process or processes.")
        if self.recompute not in (None, "none", "selective", "full"):
            raise SpecError(f"unknown recomputation {self.recompute!r}: use none, selective or full.")
        training_precision(self.precision, "")  # raises for a name that is none, also where nothing trains
        if self.dtype != "auto":
            inference_precision(self.dtype)
        object.__setattr__(self, "mesh", parse_mesh(self.mesh))
        if self.micro_batch is not None and not isinstance(self.micro_batch, int):
            raise SpecError(f"micro_batch is {self.micro_batch!r}, and must be a whole number.")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise SpecError(f"a micro-batch has at least one sample, not {self.micro_batch}.")

    @property
    def of_processes(self) -> bool:
        """Whether something was said that only plans for processes have."""
        given = bool(self.mesh), self.micro_batch is not None, self.recompute is not None, self.divided_outputs
        return any(given) or self.precision != "auto" or self.dtype != "auto"

    @property
    def named(self) -> bool:
        """Whether a strategy was named: it is taken where one device would be faster, too."""
        return self.strategy != "auto"

    @property
    def in_parts(self) -> bool:
        """Whether the user says in what parts the batch of a step is computed, though it may not be divisible."""
        return self.micro_batch is not None or self.num_microbatches is not None


def limits_of(
    work: ModelWork, samples: int, *, widest: int, why_not: str, why_not_staged: Mapping[int, str],
    divides_tokens: bool = True,
) -> Limits:  # fmt: skip
    """Derive the limits from the blocks of a model; `widest`: devices of a host, which tensor parallelism stays in.

    So many ranks must share most of what is cut. Layers that they don't share evenly are whole on each.
    """
    layers = [block for block in work.blocks if block.layer]
    cut = [block for block in layers or work.blocks if block.cut_elements]
    most = max((block.most_shares for block in cut), default=1)

    def elements(ranks: int) -> int:
        return sum(block.count * block.cut_elements for block in cut if block.is_shared_by(ranks))

    tensor = tuple(ranks for ranks in range(1, min(most, widest) + 1) if 2 * elements(ranks) >= elements(1))
    return Limits(
        samples=samples,
        tokens=work.tokens,
        layers=sum(block.count for block in layers),
        tensor=tensor or (1,),
        experts=max((block.experts for block in layers), default=0),
        attention=any(op.kind == "attention" for block in layers for op in block.ops),
        slices={block.path: block.most_shares for block in cut},
        widest=widest,
        divides_tokens=divides_tokens,
        why_not=why_not,
        why_not_staged=why_not_staged,
    )


def parse_mesh(mesh: Any) -> dict[str, int]:
    """Read "dp=2,fsdp=8,tp=4", or a dict of degrees; none of None. Raises `SpecError` for what is no degree."""
    if mesh is None or mesh == {}:
        return {}
    if not isinstance(mesh, str | Mapping):
        raise SpecError(f"the mesh is {mesh!r}: write degrees such as 'fsdp=8,tp=4', or a dict of them.")
    text = mesh if isinstance(mesh, str) else _shown(mesh)
    found: dict[str, int] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (one.strip() for one in part.partition("="))
        if name not in DEGREES or not equals or not value.isdecimal() or int(value) < 1:
            raise SpecError(
                f"{part!r} in the mesh makes no sense: write degrees such as fsdp=8,tp=4, of {', '.join(DEGREES)}."
            )
        if name in found:
            raise SpecError(f"the mesh names {name} twice.")
        found[name] = int(value)
    if not found:
        raise SpecError("the mesh is empty: write degrees such as fsdp=8,tp=4.")
    return found


def check_given(given: Asked, limits: Limits, devices: int, *, training: bool) -> None:
    """Raise `PlanError` where what was fixed does not go with the devices or the model, with what does."""
    mesh = given.mesh
    if mesh:
        _check_size(mesh, devices, training)
    elif devices > 1:
        _check_strategy(given.strategy, limits, training)
    gathered = [name for name in ("fsdp", "cp") if mesh.get(name, 1) > 1]
    if gathered and not training:
        raise PlanError(
            f"{_shown(mesh)}: inference is planned with dp, tp, pp and ep, and {' and '.join(gathered)} only for "
            "training steps. Replicas are dp; what is too large for one device is divided by tp or pp."
        )
    _check_tensor(mesh.get("tp", 1), limits)
    _check_stages(given, mesh.get("pp", 1), limits)
    if given.schedule == "zero-bubble" and mesh.get("pp", 1) > 1 and mesh.get("fsdp", 1) > 1:
        raise PlanError(
            "zero-bubble computes gradients of parameters apart from the others, which torch's fully_shard can't: plan "
            "fsdp and pp with --schedule 1f1b or interleaved."
        )
    if mesh.get("cp", 1) > 1 and not limits.attention:
        raise PlanError("cp divides sequences of models that use scaled_dot_product_attention, and this one does not.")
    if mesh.get("cp", 1) > 1 and limits.tokens % mesh["cp"]:
        raise PlanError(
            f"cp={mesh['cp']} does not divide sequences of {limits.tokens} tokens. Give a --seq that is a multiple of "
            f"{mesh['cp']}, or another cp."
        )
    if mesh.get("ep", 1) > 1:
        if not limits.experts:
            raise PlanError(
                "ep divides experts, and no experts were found in this model: none of its modules is given rows, "
                "choices and weights. Leave ep out."
            )
        degrees = [n for n in range(1, limits.experts + 1) if limits.experts % n == 0]
        if mesh["ep"] not in degrees:
            raise PlanError(
                f"ep={mesh['ep']} is not possible: ranks have equally many of the {limits.experts} experts. Plan with "
                f"an ep of {', '.join(map(str, degrees[1:]))}, or without."
            )
        if prod(mesh.get(name, 1) for name in ("dp", "fsdp", "cp")) % mesh["ep"]:
            raise PlanError(
                f"{_shown(mesh)}: experts are divided among replicas. Plan with degrees of dp, fsdp and cp that are "
                f"together a multiple of ep={mesh['ep']}, or without ep."
            )
    replicas = mesh.get("dp", 1) * mesh.get("fsdp", 1)
    if replicas > 1 and not limits.divisible:
        raise PlanError(f"dp and fsdp give each replica its own samples, but {limits.why_not}")
    if replicas > limits.samples:
        raise PlanError(
            f"{replicas} replicas need at least as many samples, and the batch has {limits.samples}. "
            f"Give --batch {replicas} or more."
        )


def _check_size(mesh: Mapping[str, int], devices: int, training: bool) -> None:
    """Raise `PlanError` unless a mesh has as many ranks as there are devices, with a degree that would."""
    size = prod(degree for name, degree in mesh.items() if name != "ep")
    if size != devices:
        axis = "fsdp" if training else "dp"
        degree, left = divmod(devices, size // mesh.get(axis, 1))
        near = f" {axis}={degree} would." if not left else ""
        raise PlanError(
            f"the mesh {_shown(mesh)} has {size} ranks, and there are {devices} devices: degrees other than ep "
            f"must multiply to {devices}.{near}"
        )


def _check_strategy(strategy: str, limits: Limits, training: bool) -> None:
    """Raise `PlanError` where a strategy that was named could only be planned as one device by itself."""
    replicas = strategy in ("data-parallel", "ddp", "fsdp")
    if strategy == "fsdp" and not training:
        raise PlanError(
            "fsdp shards what is trained, and this is inference. Plan with --train, or with data-parallel (whole "
            "replicas), tp or pp."
        )
    if replicas and not limits.divisible:
        raise PlanError(f"{strategy} gives each replica its own samples, but {limits.why_not}")
    if replicas and limits.samples < 2:
        raise PlanError(
            f"{strategy} gives each replica its own samples, and the batch has {limits.samples}. Give --batch 2 or "
            "more."
        )
    if strategy == "column-parallel" and not limits.experts and limits.tensor == (1,):
        _check_tensor(2, limits)


def _check_stages(given: Asked, pp: int, limits: Limits) -> None:
    """Raise `PlanError` for a number of stages that the model does not allow, with why."""
    if pp > max(limits.layers, 1):
        raise PlanError(f"pp={pp} is more stages than the model has layers: at most {max(limits.layers, 1)}.")
    if why := limits.why_not_staged.get(pp):
        raise PlanError(f"pp={pp} is not possible: {why}. Plan with tp or dp, or with fewer stages.")
    least = 2 * pp
    if given.schedule in ("interleaved", "zero-bubble") and limits.layers < least and least > 2:
        raise PlanError(
            f"with the schedule {given.schedule} every rank has two stages or more, which takes {least} layers for "
            f"pp={pp}, and the model has {limits.layers}. Plan with --schedule 1f1b, or fewer stages."
        )


def _check_tensor(degree: int, limits: Limits) -> None:
    """Raise `PlanError` for a degree of tensor parallelism that the model or the host does not allow, with why."""
    if degree in limits.tensor:
        return
    others = ", ".join(map(str, limits.tensor[1:]))
    if not limits.slices:
        why = "no matrix of this model was found that ranks can share (autoshard profile --axes says why)"
    elif degree > limits.widest and degree <= max(limits.slices.values()):
        why = f"ranks that share matrices are in one host, which has {limits.widest} devices"
    else:
        many = ", ".join(f"{count} in {path}" for path, count in limits.slices.items())
        why = f"ranks share matrices by slices (heads or columns), about equally many each, and there are {many}"
    raise PlanError(
        f"tp={degree} is not possible: {why}. Plan with {f'a tp of {others}, or with ' if others else ''}"
        "dp, fsdp or pp in the place of tp."
    )


def _shown(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={degree}" for name, degree in mesh.items())
