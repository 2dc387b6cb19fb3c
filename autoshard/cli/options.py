"""The options that several commands take, each written once, and what they say together."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from autoshard.common.files import check_writable
from autoshard.errors import SpecError
from autoshard.plan import choices
from autoshard.plan.workload import Workload


def _option(default: Any, *names: str, metavar: str | None = None, help: str, min: int | None = None) -> Any:
    """An option whose help says what the default is, where there is one to know of."""
    shown = isinstance(default, str)
    return typer.Option(default, *names, metavar=metavar, help=help, show_default=shown, min=min)


TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="model.py, model.py:name, a Hugging Face directory or config.json, or a model's name in its cache.",
        show_default=False,
    ),
]
PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN", help="A plan file, or a JSON file with a device_map.", show_default=False)
]
OfPlan = Annotated[
    str | None,
    typer.Argument(metavar="TARGET", help="The model; default: what the plan was made for.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.", show_default=False)]
_DEVICES = (
    "auto, 4, cuda:0,cuda:1, 8xH100-80GB, 2x24GiB,1x12GiB, '2 hosts of 8xA100-40GB, 1600Gb/s', cuda:0=20GiB,cpu=60GiB, "
    "or a cluster file."
)
Devices = Annotated[str, typer.Option("--devices", "-d", metavar="SPEC", help=_DEVICES)]
_STRATEGIES = (
    "auto, sequential, balanced, balanced_low_0, column-parallel (tp), pipeline (pp), data-parallel (ddp, fsdp, zero3) "
    "or hybrid."
)
_INDEPENDENT = "Divide the batch though the check refuses it, on your word that rows are independent. The plan says so."
_OPTIMIZERS = "With --train: adamw (which is the default), adam, momentum, sgd or none."
_SCHEDULES = "Of a pipeline: gpipe, 1f1b, interleaved or zero-bubble. Default: chosen."
_LAUNCHES = "one-process, or processes: one per device (torchrun). Default: what the devices suggest."
_MESH = "Of processes, as in fsdp=8,tp=2; of dp, fsdp, tp, pp, cp and ep, those left out are 1. Default: chosen."
_RECOMPUTE = "Of processes that train: none, selective or full. Default: the least that fits."
_PRECISION = "Of processes that train: mixed (float32 kept, bfloat16 computed), pure (all 16 bits), master or full."
_DTYPES = "Of weights: auto is the model's; bfloat16, float32, int8 or int4"
_DIVIDED = (
    "Of processes that train: logits stay divided over ranks (DTensor) where the model computes its loss of parts."
)
_COMPILE = "Price compiled modules (torch.compile), or eager ones. Default: compiled where tokens are generated."
_LIMIT = "Use at most so much, as in cuda:0=20GiB. Repeatable."
_MICRO_BATCHES = "Parts of the batch in a pipeline. Default: chosen."
_MICRO_BATCH = "Samples that a replica computes at once. Default: chosen."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What a model is planned, profiled or priced for."""

    batch: int | None = _option(None, "--batch", metavar="N", min=1, help="Sequences, images or rows per pass.")
    seq: int | None = _option(None, "--seq", metavar="N", min=1, help="Tokens per sequence.")
    new_tokens: int | None = _option(
        None, "--new-tokens", metavar="N", min=0, help="Tokens generated after the prompt."
    )  # fmt: skip
    train: bool = _option(False, "--train", help="Plan a training step: forward, backward and optimizer.")
    optimizer: str | None = _option(None, "--optimizer", metavar="NAME", help=_OPTIMIZERS)

    def workload(self) -> Workload:
        """The workload that options describe; without any it is an assumed one."""
        if self.optimizer is not None and not self.train:
            raise SpecError("--optimizer is read with --train only. Add --train, or leave it out.")
        if self.new_tokens and self.train:
            raise SpecError("--new-tokens is read without --train only: a training step generates none. Leave one out.")
        return Workload(
            batch_size=self.batch,
            sequence_length=self.seq,
            new_tokens=self.new_tokens or 0,
            mode="training" if self.train else "inference",
            optimizer=cast("choices.Optimizer", self.optimizer or "adamw"),
            assumed=self.batch is None and self.seq is None and self.new_tokens is None and not self.train,
        )

    def changed(self, known: Workload) -> Workload:
        """The workload of a plan with what options change of it: what they leave out stays as it was planned."""
        asked, decodes = self.workload(), self.new_tokens is not None
        if asked.assumed:
            return known
        return Workload(
            batch_size=self.batch or known.batch_size,
            sequence_length=self.seq or known.sequence_length,
            new_tokens=asked.new_tokens if decodes or self.train else known.new_tokens,
            mode="training" if self.train or (known.training and not decodes) else "inference",
            optimizer=asked.optimizer if self.optimizer is not None else known.optimizer,
            dtype=known.dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """What all plans of a comparison have in common."""

    objective: str = _option("latency", "--objective", metavar="NAME", help="latency, throughput or memory.")
    max_memory: list[str] | None = _option(None, "--max-memory", metavar="DEVICE=SIZE", help=_LIMIT)
    assume_independent_rows: bool = _option(False, "--assume-independent-rows", help=_INDEPENDENT)

    def settings(self, out: Path | None = None) -> dict[str, Any]:
        """What options say about planning, as `plan_measured` and `chosen_for` take it.

        Raises `SpecError`, before the long work, for names that do not exist, and for a file `out` that can't be
        written.
        """
        choices.check_choices(objective=self.objective)
        if out is not None:
            check_writable(out)
        return {
            "objective": self.objective, "max_memory": pairs(self.max_memory, "--max-memory", "cuda:0=20GiB"),
            "assume_independent_rows": self.assume_independent_rows,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(ComparisonOptions):
    """How a plan is made."""

    strategy: str = _option("auto", "--strategy", "-s", metavar="NAME", help=_STRATEGIES)
    pin: list[str] | None = _option(
        None, "--pin", metavar="MODULE=DEVICE", help="Put a module on a device. Repeatable."
    )  # fmt: skip
    micro_batches: int | None = _option(None, "--micro-batches", metavar="N", min=1, help=_MICRO_BATCHES)
    schedule: str | None = _option(None, "--schedule", metavar="NAME", help=_SCHEDULES)

    def settings(self, out: Path | None = None) -> dict[str, Any]:
        """As in a comparison, with what of a single plan is asked for."""
        strategy = choices.strategy_named(self.strategy)
        choices.check_choices(strategy=strategy, schedule=self.schedule)
        return {
            **ComparisonOptions.settings(self, out), "strategy": strategy, "schedule": self.schedule,
            "pins": pairs(self.pin, "--pin", "model.layers.0=cuda:0"), "num_microbatches": self.micro_batches,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """How processes share a model."""

    launch: str | None = _option(None, "--launch", metavar="HOW", help=_LAUNCHES)
    mesh: str | None = _option(None, "--mesh", metavar="DEGREES", help=_MESH)
    micro_batch: int | None = _option(None, "--micro-batch", metavar="N", min=1, help=_MICRO_BATCH)
    recompute: str | None = _option(None, "--recompute", metavar="MODE", help=_RECOMPUTE)
    precision: str = _option("auto", "--precision", metavar="NAME", help=_PRECISION)
    dtype: str = _option("auto", "--dtype", metavar="NAME", help=_DTYPES)
    compiled: bool | None = _option(None, "--compile/--eager", help=_COMPILE)
    divided_outputs: bool = _option(False, "--divided-outputs", help=_DIVIDED)

    def wishes(self, *, train: bool) -> dict[str, Any]:
        """What options say, as `chosen_for` takes it. Raises `SpecError` for those of training where nothing trains."""
        given = {
            "--recompute": self.recompute is not None, "--precision": self.precision != "auto",
            "--divided-outputs": self.divided_outputs,
        }  # fmt: skip
        if not train and any(given.values()):
            first = next(name for name, is_given in given.items() if is_given)
            raise SpecError(f"{first} is read with --train only. Add --train, or leave it out; --dtype is of weights.")
        return asdict(self)


def pairs(texts: list[str] | None, option: str, example: str) -> dict[str, str]:
    """["cuda:0=20GiB,cpu=60GiB"] -> {"cuda:0": "20GiB", "cpu": "60GiB"}."""
    found: dict[str, str] = {}
    for part in (part for text in texts or () for part in text.split(",")):
        name, equals, value = part.rpartition("=")
        if not equals or not value.strip():
            raise SpecError(f"{option} {part!r} makes no sense. Write {option} {example}.")
        if name.strip() in found:
            raise SpecError(f"{option} names {name.strip()!r} twice.")
        found[name.strip()] = value.strip()
    return found
