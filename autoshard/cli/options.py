"""The options that several commands take, each written once."""

from typing import Annotated

import typer

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="model.py, model.py:name, a Hugging Face directory or config.json, or a model's name in its cache.",
        show_default=False,
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        "--devices",
        "-d",
        metavar="SPEC",
        help="auto, 4, cuda:0,cuda:1, 8xH100-80GB, 2x24GiB,1x12GiB, '2 hosts of 8xA100-40GB, 1600Gb/s', "
        "cuda:0=20GiB,cpu=60GiB, or a cluster file.",
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME",
        help="auto, sequential, balanced, balanced_low_0, column-parallel (tp), pipeline (pp), data-parallel (ddp, "
        "fsdp, zero3) or hybrid.",
    ),
]
Objective = Annotated[str, typer.Option("--objective", metavar="NAME", help="latency, throughput or memory.")]
Batch = Annotated[
    int | None,
    typer.Option("--batch", metavar="N", min=1, help="Sequences, images or rows per pass.", show_default=False),
]
Seq = Annotated[int | None, typer.Option("--seq", metavar="N", min=1, help="Tokens per sequence.", show_default=False)]
NewTokens = Annotated[
    int | None,
    typer.Option("--new-tokens", metavar="N", min=0, help="Tokens generated after the prompt.", show_default=False),
]
Train = Annotated[bool, typer.Option("--train", help="Plan a training step: forward, backward and optimizer.")]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="With --train: adamw (which is the default), adam, momentum, sgd or none.",
        show_default=False,
    ),
]
MaxMemory = Annotated[
    list[str] | None,
    typer.Option("--max-memory", metavar="DEVICE=SIZE", help="Use at most so much, as in cuda:0=20GiB. Repeatable."),
]
Pin = Annotated[
    list[str] | None, typer.Option("--pin", metavar="MODULE=DEVICE", help="Put a module on a device. Repeatable.")
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches",
        metavar="N",
        min=1,
        help="Parts of the batch in a pipeline. Default: chosen.",
        show_default=False,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Of a pipeline: gpipe, 1f1b, interleaved or zero-bubble. Default: chosen.",
        show_default=False,
    ),
]
Assume = Annotated[
    bool,
    typer.Option(
        "--assume-independent-rows",
        help="Divide the batch though the check refuses it, on your word that rows are independent. The plan says so.",
    ),
]
MaxBatch = Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits, and plan it.")]
MaxSeq = Annotated[bool, typer.Option("--max-seq", help="Find the longest sequence that fits, and plan it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Launch = Annotated[
    str | None,
    typer.Option(
        "--launch",
        metavar="HOW",
        help="one-process, or processes: one per device (torchrun). Default: what the devices suggest.",
        show_default=False,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="DEGREES",
        help="Of processes, as in fsdp=8,tp=2; of dp, fsdp, tp, pp, cp and ep, those left out are 1. Default: chosen.",
        show_default=False,
    ),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        "--micro-batch",
        metavar="N",
        min=1,
        help="Samples that a replica computes at once. Default: chosen.",
        show_default=False,
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="MODE",
        help="Of processes that train: none, selective or full. Default: the least that fits.",
        show_default=False,
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="Of processes that train: mixed (float32 kept, bfloat16 computed), pure (all 16 bits), master or full.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="NAME", help="Of weights: auto is the model's; bfloat16, float32, int8 or int4"),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--eager",
        help="Price compiled modules (torch.compile), or eager ones. Default: compiled where tokens are generated.",
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
