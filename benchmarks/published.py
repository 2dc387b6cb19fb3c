"""Price published runs with the recipe they were run with, and compare.

    python benchmarks/published.py runs.csv            # per source, and in all
    python benchmarks/published.py runs.csv --rows     # every row, too
    python benchmarks/published.py runs.csv --json     # {"rows": [...], "unpriced": [...]}

Each row names a model by its dimensions, the hardware, the recipe and one measured figure. A model is built on meta
from its dimensions: a Llama-like decoder of transformers, or a GPT-like one where the source trains those.
"""

import argparse
import csv
import functools
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from autoshard.capture.capture import capture
from autoshard.cluster.hardware import find_hardware
from autoshard.cluster.topology import Topology
from autoshard.engine.blocks import ModelWork, model_work
from autoshard.engine.price import StepEstimate, price_step
from autoshard.engine.recipe import Precision, Recipe
from autoshard.errors import AutoshardError
from autoshard.workload import Workload

Row = Mapping[str, str]
GPT_LIKE = ("mpt", "bs", "sc21", "mk22")
FUSED = ("bs", "sc21", "nano", "mlm", "mb", "mk22")
NETWORK_GBITS = {"A100": 200.0, "H100": 400.0, "H200": 400.0, "B200": 400.0, "GB200": 400.0, "V100": 100.0}
"""Network per device on training nodes, where the row does not say."""
RATES = ("tokens_per_s_per_gpu", "tokens_per_s_total", "step_time")
THROUGHPUT = (*RATES, "hardware_tflops_per_gpu", "model_tflops_per_gpu", "mfu")
MEMORY = ("peak_mem_per_gpu", "peak_allocated_per_gpu", "peak_reserved_per_gpu")
TRACED_LAYERS = 3
"""Layers that are built of each model: all of them are alike, and one more costs a capture more time."""
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}


class Unpriced(Exception):
    """A row that can't be priced; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One row with its figure predicted."""

    id: str
    family: str
    metric: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured if self.measured else float(self.predicted == self.measured)


def number(row: Row, name: str, default: int = 0) -> int:
    """A whole number of a row, `default` where the cell is empty or says "on"."""
    return int(float(row[name])) if row[name] not in ("", "on") else default


def family(row: Row) -> str:
    """The source's short name, which begins the id."""
    return row["id"].split("-")[0]


@functools.cache
def work_of(kind: str, hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, seq: int) -> ModelWork:
    """Build a decoder of a few layers on meta, fold it, and count its layer as often as the model has it."""
    common: dict[str, Any] = {"vocab_size": vocab, "use_cache": False, "attn_implementation": "sdpa"}
    if kind == "gpt":
        config: Any = transformers.GPT2Config(
            n_embd=hidden, n_layer=TRACED_LAYERS, n_head=heads, n_inner=ffn, n_positions=max(seq, 1024),
            activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common,
        )  # fmt: skip
        make: Any = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=TRACED_LAYERS, num_attention_heads=heads, num_key_value_heads=kv,
            intermediate_size=ffn, max_position_embeddings=max(seq, 2048), tie_word_embeddings=kind == "tied", **common,
        )  # fmt: skip
        make = transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = make(config).to(torch.bfloat16)
    ids = torch.zeros(2, seq, dtype=torch.long)
    workload = Workload(batch_size=2, sequence_length=seq)
    graph = capture(model, {"input_ids": ids, "labels": ids.clone()}, workload=workload, composite=True)
    work = model_work(graph, 2, seq)
    repeated = [block for block in work.blocks if block.count == TRACED_LAYERS]
    if len(repeated) != 1:
        raise Unpriced("its layers are not all alike")
    blocks = tuple(replace(block, count=layers) if block.count > 1 else block for block in work.blocks)
    return replace(work, blocks=blocks)


def model_of(row: Row) -> ModelWork:
    """The model of a row. Raises `Unpriced` where dimensions are missing."""
    missing = [name for name in ("hidden", "layers", "heads", "seq") if not row[name]]
    if missing:
        raise Unpriced(f"no {', '.join(missing)}")
    if re.search(r"moe|mixtral|x7b|a3b|deepseek", row["model"].lower()) or number(row, "ep", 1) > 1:
        raise Unpriced("a mixture of experts")
    hidden, heads = number(row, "hidden"), number(row, "heads")
    vocab = number(row, "vocab") or (50304 if family(row) in (*GPT_LIKE, "nano") else 32000)
    kind = "gpt" if family(row) in GPT_LIKE else "tied" if "tied" in row["model"] else "llama"
    ffn = number(row, "ffn") or 4 * hidden
    return work_of(
        kind, hidden, number(row, "layers"), heads, number(row, "kv_heads", heads), ffn, vocab, number(row, "seq")
    )


def recipe_of(row: Row) -> Recipe:
    """The recipe as given. Raises `Unpriced` where it does not determine a run."""
    if re.search(r"fp8|mxfp8|nvfp4|nf4|int", row["dtype"].lower()):
        raise Unpriced(f"computes in {row['dtype']}")
    if "lora" in row["optimizer"].lower():
        raise Unpriced("trains adapters")
    gpus, tp, pp, cp = (number(row, name, 1) for name in ("gpus", "tp", "pp", "cp"))
    rest = gpus // (tp * pp * cp)
    zero1 = "ZeRO-1" in row["optimizer"] or family(row) in FUSED
    if zero1:
        fsdp, dp = 1, rest
    else:
        fsdp = number(row, "fsdp", rest)
        dp = max(1, rest // max(1, fsdp))
    if dp * fsdp * tp * pp * cp != gpus:
        raise Unpriced("the degrees do not multiply to the GPUs")
    micro = number(row, "micro_batch")
    if not micro:
        raise Unpriced("no micro_batch")
    batch = number(row, "global_batch")
    count = max(1, round(batch / (micro * dp * fsdp))) if batch else (1 if pp == 1 else 4 * pp)
    return Recipe(
        dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, micro_batch=micro, num_microbatches=count,
        schedule="1f1b" if count >= pp else "gpipe", recompute=recompute_of(row), stack=stack_of(row),
        precision=precision_of(row), sequence_parallel=family(row) not in ("bs", "sc21"), zero=int(zero1),
        loss_parallel=family(row) not in ("kf", "kfc"), accumulate_unsharded=family(row) in ("kf", "kfc"),
    )  # fmt: skip


def recompute_of(row: Row) -> Any:
    text = row["recompute"]
    if "every" in text:
        raise Unpriced("recomputes some layers")
    if family(row) == "sc21":
        return "full"
    return "selective" if text.startswith("selective") else "full" if text == "full" else "none"


def stack_of(row: Row) -> Any:
    if family(row) in FUSED and family(row) != "nano":
        return "fused"
    return "compiled" if row["compile"] == "yes" else "eager"


def precision_of(row: Row) -> Precision:
    """Bytes per element, from what the dtype and the optimizer say."""
    if "pure" in row["dtype"] or "states bf16" in row["optimizer"]:
        reduce = 4 if "reduced in fp32" in row["optimizer"] else 2
        return Precision(parameters=2, compute=2, gradients=2, reduce=reduce, moments=2)
    if family(row) in FUSED:
        gradients = 4 if "fp32" in row["optimizer"] or "fp32 gradient" in row["dtype"] else 2
        return Precision(parameters=2, compute=2, gradients=gradients, reduce=gradients, master=4, moments=4)
    return Precision()


def hardware_of(row: Row) -> tuple[Any, Topology]:
    """The card, and how the row's cards are connected."""
    from autoshard.engine.timing import Card

    text = row["gpu"]
    name = re.sub(r"^DGX-| ?\(.*\)|-\d+W$| \d+W$|-HBM2e.*", "", text)
    try:
        known = find_hardware(re.sub(r"-96GB", "", name))
    except AutoshardError as error:
        raise Unpriced(f"the card {text!r} is not in the table") from error
    watts = re.search(r"(\d+) ?W", text)
    full_watts = {"sm90": 700, "sm80": 400}.get(known.arch, 0)
    power = min(1.0, int(watts[1]) / full_watts) ** 0.5 if watts and full_watts else 1.0
    bandwidth = re.search(r"([\d.]+) TB/s", text)
    size = re.search(r"(\d+)GB", text)
    gigabytes = int(size[1]) if size else known.nominal_gb
    card = Card(
        generation=known.arch,
        flops_per_second=known.flops_per_second["bfloat16"] * power,
        bytes_per_second=float(bandwidth[1]) * 1e12 if bandwidth else known.bytes_per_second,
        memory_bytes=known.memory_bytes if gigabytes == known.nominal_gb else int(gigabytes * 2**30 * 0.985),
    )
    gpus = number(row, "gpus")
    per_host = min(gpus, number(row, "gpus_per_node", 8))
    topology = Topology(
        hosts=-(-gpus // per_host), devices_per_host=per_host,
        local_bytes_per_second=(known.peer_bytes_per_second or known.host_bytes_per_second / 2),
        network_bytes_per_second=network_gbits(row, per_host) * 1e9 / 8,
    )  # fmt: skip
    return card, topology


def network_gbits(row: Row, per_host: int) -> float:
    """Gb/s of network per device."""
    text = row["interconnect"] + " " + row["source"]
    each = re.search(r"(\d+) Gb/s per GPU", text) or re.search(r"NDR (\d+) Gb/s", text)
    if each:
        return float(each[1])
    host = re.search(r"(\d{3,4}) ?Gbps node", text)
    if host:
        return float(host[1]) / 8
    if "4 Omni-Path" in text or "4 x 100" in text:
        return 4 * 100 / per_host
    return next((value for name, value in NETWORK_GBITS.items() if name in row["gpu"]), 100.0)


def predicted(row: Row, estimate: StepEstimate, work: ModelWork, recipe: Recipe, card: Any) -> float:
    """The figure of a row's metric, in its unit."""
    gpus, metric = recipe.devices, row["metric"]
    tokens = recipe.global_batch * work.tokens
    if metric == "tokens_per_s_per_gpu":
        return estimate.tokens_per_second / gpus
    if metric == "tokens_per_s_total":
        return estimate.tokens_per_second
    if metric == "step_time":
        return estimate.seconds
    if metric in ("model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu"):
        flops = (
            model_flops(row, work)
            * tokens
            * (4 / 3 if metric.startswith("hardware") and recipe.recompute == "full" else 1)
        )
        rate = flops / estimate.seconds / gpus
        return 100 * rate / find_peak(row) if metric == "mfu" else rate / 1e12
    if metric in MEMORY:
        nbytes = estimate.memory.allocated if metric == "peak_allocated_per_gpu" else estimate.reserved_bytes
        return nbytes / UNITS[row["unit"]]
    if metric == "fits":
        return float(estimate.fits)
    raise Unpriced(f"the metric {metric} is of one source alone")


def find_peak(row: Row) -> float:
    """The published peak that a share of it is counted against."""
    return 312e12 if "A100" in row["gpu"] else 989e12


def model_flops(row: Row, work: ModelWork) -> float:
    """FLOPs per token of forward and backward, as model FLOPs are counted: 6 per parameter, and attention."""
    attention = 12 * number(row, "layers") * number(row, "hidden") * work.tokens
    return 6 * work.parameters + attention


def price_rows(rows: list[Row]) -> tuple[list[Priced], list[dict[str, str]]]:
    """Price all rows that can be; the others with the reason."""
    priced: list[Priced] = []
    unpriced: list[dict[str, str]] = []
    known: dict[tuple[Any, ...], StepEstimate] = {}
    for number_, row in enumerate(rows):
        if sys.stderr.isatty():
            print(f"\r{number_ + 1}/{len(rows)}", end="", file=sys.stderr)
        try:
            recipe, work = recipe_of(row), model_of(row)
            card, topology = hardware_of(row)
            key = (id(work), recipe, card, topology)
            if key not in known:
                known[key] = price_step(work, recipe, card, topology)
            estimate = known[key]
            value = predicted(row, estimate, work, recipe, card)
            priced.append(
                Priced(
                    id=row["id"],
                    family=family(row),
                    metric=row["metric"],
                    predicted=value,
                    measured=float(row["value"]),
                )
            )
        except (Unpriced, AutoshardError) as error:
            unpriced.append({"id": row["id"], "reason": str(error)})
    return priced, unpriced


def summary(priced: list[Priced]) -> Iterator[str]:
    """Median and 90th percentile of the error, per source and in all."""
    for kind, metrics in (("throughput", THROUGHPUT), ("memory", MEMORY)):
        chosen = [one for one in priced if one.metric in metrics]
        for name in [*dict.fromkeys(one.family for one in chosen), "all"]:
            errors = sorted(abs(one.ratio - 1) for one in chosen if name in (one.family, "all"))
            ratios = [one.ratio for one in chosen if name in (one.family, "all")]
            if errors:
                ninety = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
                yield (
                    f"{kind:11} {name:8} {len(errors):4} rows  median error {100 * statistics.median(errors):5.1f} %  "
                    f"90th {100 * ninety:5.1f} %  median ratio {statistics.median(ratios):.2f}"
                )
    fits = [one for one in priced if one.metric == "fits"]
    if fits:
        right = sum(one.predicted == one.measured for one in fits)
        yield f"fits        all      {len(fits):4} rows  right {100 * right / len(fits):.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true")
    given = parser.parse_args()
    with open(given.file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    priced, unpriced = price_rows(rows)
    if given.json:
        listed = [
            {"id": one.id, "metric": one.metric, "predicted": one.predicted, "measured": one.measured} for one in priced
        ]
        print(json.dumps({"rows": listed, "unpriced": unpriced}))
        return
    if given.rows:
        for one in sorted(priced, key=lambda one: (one.metric, one.ratio)):
            print(f"{one.metric:24} {one.ratio:5.2f}  {one.predicted:12.4g} {one.measured:12.4g}  {one.id}")
    reasons: dict[str, int] = {}
    for row in unpriced:
        reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"not priced  {count:4} rows  {reason}")
    print("\n".join(summary(priced)))


if __name__ == "__main__":
    main()
