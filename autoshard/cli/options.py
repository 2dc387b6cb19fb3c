"""The options that several commands take, each written once."""

from typing import Annotated

import typer

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="model.py, model.py:name, a Hugging Face directory or config.json, or a model's name in its cache.",
        show_default=False,
    ),
]
DevicesOption = Annotated[
    str,
    typer.Option(
        "--devices",
        "-d",
        metavar="SPEC",
        help="auto, 4, cuda:0,cuda:1, 8xH100-80GB, 2x24GiB,1x12GiB, '2 hosts of 8xA100-40GB, 1600Gb/s', "
        "cuda:0=20GiB,cpu=60GiB, or a cluster file.",
    ),
]
StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME",
        help="auto, sequential, balanced, balanced_low_0, column-parallel, pipeline, data-parallel or hybrid.",
    ),
]
ObjectiveOption = Annotated[str, typer.Option("--objective", metavar="NAME", help="latency, throughput or memory.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch", metavar="N", help="Sequences, images or rows per pass.", show_default=False)
]
SeqOption = Annotated[int | None, typer.Option("--seq", metavar="N", help="Tokens per sequence.", show_default=False)]
NewTokensOption = Annotated[
    int | None, typer.Option("--new-tokens", metavar="N", help="Tokens generated after the prompt.", show_default=False)
]
TrainOption = Annotated[bool, typer.Option("--train", help="Plan a training step: forward, backward and optimizer.")]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="With --train: adamw (which is the default), adam, momentum, sgd or none.",
        show_default=False,
    ),
]
MaxMemoryOption = Annotated[
    list[str] | None,
    typer.Option("--max-memory", metavar="DEVICE=SIZE", help="Use at most so much, as in cuda:0=20GiB. Repeatable."),
]
PinOption = Annotated[
    list[str] | None, typer.Option("--pin", metavar="MODULE=DEVICE", help="Put a module on a device. Repeatable.")
]
MicroBatchesOption = Annotated[
    int | None,
    typer.Option(
        "--micro-batches",
        metavar="N",
        min=1,
        help="Parts of the batch in a pipeline. Default: chosen.",
        show_default=False,
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Of a pipeline: gpipe, 1f1b, interleaved or zero-bubble. Default: chosen.",
        show_default=False,
    ),
]
AssumeOption = Annotated[
    bool,
    typer.Option(
        "--assume-independent-rows",
        help="Divide the batch though the check refuses it, on your word that rows are independent. The plan says so.",
    ),
]
MaxBatchOption = Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits, and plan it.")]
MaxSeqOption = Annotated[bool, typer.Option("--max-seq", help="Find the longest sequence that fits, and plan it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
