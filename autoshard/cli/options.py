"""The options that several commands take, each written once."""

from typing import Annotated, Any

import typer


def _option(*names: str, metavar: str | None = None, help: str, **settings: Any) -> Any:
    """An option whose help says what the default is, where there is one to know of."""
    return typer.Option(*names, metavar=metavar, help=help, **({"show_default": False} | settings))


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
_DEVICES = (
    "auto, 4, cuda:0,cuda:1, 8xH100-80GB, 2x24GiB,1x12GiB, '2 hosts of 8xA100-40GB, 1600Gb/s', cuda:0=20GiB,cpu=60GiB, "
    "or a cluster file."
)
_STRATEGIES = (
    "auto, sequential, balanced, balanced_low_0, column-parallel (tp), pipeline (pp), data-parallel (ddp, fsdp, zero3) "
    "or hybrid."
)
_INDEPENDENT = "Divide the batch though the check refuses it, on your word that rows are independent. The plan says so."
_MESH = "Of processes, as in fsdp=8,tp=2; of dp, fsdp, tp, pp, cp and ep, those left out are 1. Default: chosen."
_PRECISION = "Of processes that train: mixed (float32 kept, bfloat16 computed), pure (all 16 bits), master or full."
_COMPILE = "Price compiled modules (torch.compile), or eager ones. Default: compiled where tokens are generated."

Devices = Annotated[str, _option("--devices", "-d", metavar="SPEC", help=_DEVICES, show_default=True)]
Strategy = Annotated[str, _option("--strategy", "-s", metavar="NAME", help=_STRATEGIES, show_default=True)]
Objective = Annotated[
    str, _option("--objective", metavar="NAME", help="latency, throughput or memory.", show_default=True)
]
Batch = Annotated[int | None, _option("--batch", metavar="N", min=1, help="Sequences, images or rows per pass.")]
Seq = Annotated[int | None, _option("--seq", metavar="N", min=1, help="Tokens per sequence.")]
NewTokens = Annotated[
    int | None, _option("--new-tokens", metavar="N", min=0, help="Tokens generated after the prompt.")
]
Train = Annotated[bool, _option("--train", help="Plan a training step: forward, backward and optimizer.")]
Optimizer = Annotated[
    str | None,
    _option(
        "--optimizer", metavar="NAME", help="With --train: adamw (which is the default), adam, momentum, sgd or none."
    ),
]
MaxMemory = Annotated[
    list[str] | None,
    _option("--max-memory", metavar="DEVICE=SIZE", help="Use at most so much, as in cuda:0=20GiB. Repeatable."),
]
Pin = Annotated[
    list[str] | None, _option("--pin", metavar="MODULE=DEVICE", help="Put a module on a device. Repeatable.")
]
MicroBatches = Annotated[
    int | None,
    _option("--micro-batches", metavar="N", min=1, help="Parts of the batch in a pipeline. Default: chosen."),
]
Schedule = Annotated[
    str | None,
    _option(
        "--schedule", metavar="NAME", help="Of a pipeline: gpipe, 1f1b, interleaved or zero-bubble. Default: chosen."
    ),
]
Assume = Annotated[bool, _option("--assume-independent-rows", help=_INDEPENDENT)]
MaxBatch = Annotated[bool, _option("--max-batch", help="Find the largest batch that fits, and plan it.")]
MaxSeq = Annotated[bool, _option("--max-seq", help="Find the longest sequence that fits, and plan it.")]
Json = Annotated[bool, _option("--json", help="Print one JSON document instead of tables.")]
Launch = Annotated[
    str | None,
    _option(
        "--launch", metavar="HOW",
        help="one-process, or processes: one per device (torchrun). Default: what the devices suggest.",
    ),
]  # fmt: skip
Mesh = Annotated[str | None, _option("--mesh", metavar="DEGREES", help=_MESH)]
MicroBatch = Annotated[
    int | None,
    _option("--micro-batch", metavar="N", min=1, help="Samples that a replica computes at once. Default: chosen."),
]
Recompute = Annotated[
    str | None,
    _option(
        "--recompute", metavar="MODE",
        help="Of processes that train: none, selective or full. Default: the least that fits.",
    ),
]  # fmt: skip
Precision = Annotated[str, _option("--precision", metavar="NAME", help=_PRECISION, show_default=True)]
Dtype = Annotated[
    str,
    _option(
        "--dtype", metavar="NAME", help="Of weights: auto is the model's; bfloat16, float32, int8 or int4",
        show_default=True,
    ),
]  # fmt: skip
Compile = Annotated[bool | None, _option("--compile/--eager", help=_COMPILE)]
