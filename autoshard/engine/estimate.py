"""Estimate: the consequences of a plan. Data only; `pricer` and the search compute it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard.common.sizes import format_bytes, format_seconds

FULL = 0.95
"""Part of a device's memory from which on it counts as full: fragments may not fit any more."""


def level(peak_bytes: int, memory_bytes: int) -> str:
    """Say how full a device is: "bad" where the peak does not fit, "amber" where less than 5 % are left, else ""."""
    return "bad" if peak_bytes > memory_bytes else "amber" if peak_bytes > FULL * memory_bytes else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEstimate:
    """Bytes and seconds of one device under a plan. `peak_bytes`: the most that is live at once, overhead included.

    It is the peak in the long run, from the second pass on: by then the copies of parameters that another device reads,
    and the optimizer's state, are there all the time. The first pass needs no more.
    """

    name: str
    memory_bytes: int
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    cache_bytes: int = 0
    transfer_bytes: int = 0
    overhead_bytes: int = 0
    peak_bytes: int = 0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    slot_bytes: int = 0
    stored_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Left over; negative if the plan does not fit."""
        return self.memory_bytes - self.peak_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the fullest moment by what they are for, which add up to the peak; copies count as activations."""
        return {
            "weights": self.parameter_bytes + self.buffer_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes + self.transfer_bytes,
            "cache": self.cache_bytes,
            "offloaded": self.slot_bytes + self.stored_bytes,
            "overhead": self.overhead_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One tensor copied between devices per pass, from the module that made it to the first that needs it there.

    "(inputs)" and "(outputs)" stand for the caller, "" for what the model's own forward makes or needs.
    """

    source: str
    destination: str
    nbytes: int
    seconds: float
    producer: str
    consumer: str
    backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLink:
    """Parameters brought from "cpu" or "disk" to a device in one pass: `modules` in `fetches`, once per call each."""

    source: str
    destination: str
    modules: int
    fetches: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """What a pass of a plan with offloaded modules is made of, in the long run.

    Attributes:
        compute_seconds: all that computes, copies of activations included.
        bound_seconds: no order of bringing what this plan streams is faster: the slowest of computing and of each link.
        stall_seconds: of the pass in which nothing computes, waiting for parameters.
    """

    links: tuple[StreamLink, ...]
    compute_seconds: float
    bound_seconds: float
    stall_seconds: float

    @property
    def nbytes(self) -> int:
        """Brought in one pass, over all links."""
        return sum(link.nbytes for link in self.links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that occupies a device, or a link into it, for a while in a predicted pass.

    `kind`: "forward", "backward", "weight" (the part of backward that makes gradients of parameters, where a schedule
    has it apart), "recompute", "transfer", "all-reduce", "all-gather", "fetch" (offloaded parameters), "optimizer", or
    "launch" (a device waits for the one thread that launches the ops of all); of plans for processes also "exchange"
    (collectives that kernels wait for), "gather" and "reduce" (collectives beside kernels) and "decode" (further
    tokens).
    `stage` and `microbatch` are -1 where there are none; `source` is the other end of a transfer or fetch.
    """

    device: str
    kind: str
    begin_seconds: float = 0.0
    end_seconds: float
    stage: int = -1
    microbatch: int = -1
    source: str = ""
    nbytes: int = 0
    label: str = ""

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_seconds - self.begin_seconds

    def starting(self, begin: float) -> "Event":
        """The same at another time."""
        return replace(self, begin_seconds=begin, end_seconds=begin + self.seconds)


def waiting(device: str, seconds: float) -> Event:
    """A device that waits, as one thread launches the ops of all."""
    return Event(
        device=device, kind="launch", end_seconds=seconds, label="one thread launches the ops of all devices"
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One stage of a pipeline, for one micro-batch; `in_flight`: the most micro-batches it keeps activations of."""

    device: str
    forward_seconds: float
    backward_seconds: float
    recompute: bool
    in_flight: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelining:
    """What a pass of a pipeline is made of; `bubble`: part of the devices' time in which they wait, from 0 to 1."""

    schedule: str
    num_microbatches: int
    stages: tuple[StageEstimate, ...]
    bubble: float
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes by kind on a rank at one moment of a step or an answer."""

    name: str
    bytes: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """Equal ranks of a plan for processes: the stages they have, and what they do with a step or an answer.

    Attributes:
        first: name of the first device; devices: how many there are.
        compute_seconds: in which kernels run; exposed_seconds: in which communication is waited for; idle_seconds: in
            which other stages have the work.
        curve: bytes over a step or an answer; peak_bytes: taken of each device at the fullest moment.
    """

    first: str
    devices: int
    stages: tuple[int, ...]
    compute_seconds: float
    exposed_seconds: float
    idle_seconds: float
    peak_bytes: int
    curve: tuple[Moment, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate:
    """What a plan costs. Times are of one pass of the workload: a forward, a training step, or an answer.

    Inputs are taken to be on the root's execution device. The peak of a generation is that of its prompt or of its last
    step.

    Attributes:
        latency_seconds: one pass, devices taking turns.
        bottleneck_seconds: the busiest device with its incoming transfers: 1 / throughput when passes overlap.
        lower_bound_seconds: no plan of this kind on this cluster can have a lower value of the objective.
        gap: (objective value - lower bound) / lower bound; 0 means proved optimal.
        streaming: of a plan with offloaded modules; `latency_seconds` then overlaps bringing with computing.
        pipelining: of a plan with stages; `latency_seconds` is then one pass of all micro-batches, and
            `bottleneck_seconds` the busiest device's part of it.
        collective_seconds: part of latency spent in all-reduces and all-gathers of a plan with cuts; there are
            `all_reduces` and `all_gathers` of them in one pass.

        tokens_per_second: those generated, else those of the inputs, by the whole machine; 0 where inputs are none.

    Where tokens are generated, `latency_seconds` and the seconds of devices are those of the whole answer, and what is
    offloaded is that of one token. Transfers are those of the recorded run, a prompt and one token. Then:

        prompt_seconds: until the first token; token_seconds: for each further token of every sequence.

    Of plans that the engine prices (`Plan.launch`) also:

        exposed_seconds: of a step, in which ranks wait for communication; bubble: part of it in which stages are idle.
        curve: bytes on the fullest rank over a step or an answer; ranks: classes of equal ranks, by pipeline rank.
        token_parts: seconds of a further token by cause, of all stages that it passes through.
    """

    devices: tuple[DeviceEstimate, ...]
    transfers: tuple[Transfer, ...] = ()
    objective: str
    latency_seconds: float
    bottleneck_seconds: float
    lower_bound_seconds: float = 0.0
    gap: float = 0.0
    mixed_device: tuple[str, ...] = ()
    written_back: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    collective_seconds: float = 0.0
    all_reduces: int = 0
    all_gathers: int = 0
    streaming: Streaming | None = None
    pipelining: Pipelining | None = None
    tokens_per_second: float = 0.0
    prompt_seconds: float = 0.0
    token_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bubble: float = 0.0
    curve: tuple[Moment, ...] = ()
    ranks: tuple[RankEstimate, ...] = ()
    token_parts: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        peaks = ", ".join(f"{one.name} {format_bytes(one.peak_bytes)}" for one in self.devices[:4])
        more = f" and {len(self.devices) - 4} more" if len(self.devices) > 4 else ""
        fits = "fits" if self.fits else "does not fit"
        return f"<Estimate: {format_seconds(self.latency_seconds)} per pass, {fits}; peaks: {peaks}{more}>"

    @property
    def fullest(self) -> DeviceEstimate:
        """The device of which the largest part is taken at its peak."""
        return max(self.devices, key=lambda device: device.peak_bytes / max(device.memory_bytes, 1))

    @property
    def moved_bytes(self) -> int:
        """What is copied between devices in the recorded run: tensors, and parameters that are brought."""
        return sum(transfer.nbytes for transfer in self.transfers) + self.brought_bytes

    @property
    def brought_bytes(self) -> int:
        """Parameters that are brought in the recorded run, which has two passes where tokens are generated."""
        passes = 2 if self.token_seconds else 1
        return passes * self.streaming.nbytes if self.streaming is not None else 0

    @property
    def recorded_seconds(self) -> float:
        """What a timeline of the recorded run covers at least; 0 where it is a part of an answer."""
        return 0.0 if self.prompt_seconds else self.latency_seconds

    @property
    def fits(self) -> bool:
        """Whether every device has room for its peak."""
        return all(device.free_bytes >= 0 for device in self.devices)


def gap_above(value: float, bound: float) -> float:
    """Return how far a value is above its lower bound, as a part of that; 0 where no bound is known."""
    return max(0.0, (value - bound) / bound) if bound > 0 else 0.0
