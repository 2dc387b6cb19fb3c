"""Read and price a row of published runs: model, recipe and hardware as given; what is not given by stated defaults."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

import autoshard
from autoshard.cluster.hardware import find_hardware
from autoshard.cluster.parse import parse_devices
from autoshard.cluster.topology import Topology, topology_of
from autoshard.engine.blocks import ModelWork
from autoshard.engine.generation import price_generation
from autoshard.engine.local import sums_of
from autoshard.engine.memory import RecipeEstimate
from autoshard.engine.precision import Precision
from autoshard.engine.price import price_step
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Card, card_of
from autoshard.errors import AutoshardError
from autoshard.search.traced import trace

Row = Mapping[str, str]
TFLOPS = ("hardware_tflops_per_gpu", "model_tflops_per_gpu", "mfu", "hfu", "percent_of_peak")
THROUGHPUT = ("tokens_per_s_per_gpu", "tokens_per_s_total", "tokens_per_s", "step_time", *TFLOPS)
MEMORY = ("peak_mem_per_gpu", "peak_allocated_per_gpu", "peak_reserved_per_gpu", "allocated_between_steps")
DECODE = ("decode_tokens_per_s", "ms_per_token_per_sequence", "s_per_token", "generation_tokens_per_s")
TRACED_LAYERS = 3
"""Layers that are built of each model: all of them are alike, and one more costs a capture more time."""
METERS = {"bs": "used", "kf": "allocated", "kfc": "allocated"}
"""What a source read its peak from, where it is not what the allocator reserved."""
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}
GPT_LIKE = r"\b(gpt|mpt|opt|bloom|bigscience|megatron|turing)"
"""Models with learned positions, LayerNorm, a plain MLP of four times the width and tied embeddings."""
MIXTURE = r"moe|mixtral|x\d+b\b|-a\d+b|deepseek|gpt.oss|kimi"
HAND_FUSED = ("fused", "deepspeed")
STACKS = {
    "deepspeed": r"megatron-deepspeed|bigscience",
    "fused": r"megatron|nemo|transformer.?engine|\bTE\b",
    "early": r"mosaicml|llm-foundry",
}
"""Who made the kernels, by what a source says: DeepSpeed runs those of Megatron, which fused them by hand; torch 1.13
and 2.0, of 2023, had the first fused attention, made for the A100."""
UNFUSED = r"bigscience|2104\.04473|2205\.05198"
"""Sources of 2021 and 2022, before fused attention."""
SERVED = r"vllm|sglang|tensorrt|trt-llm|lmdeploy|tgi"
ANSWERS = re.compile(r"decode|-token prompt")
"""What a source says of runs that generate and don't train."""
JEAN_ZAY_BYTES_PER_SECOND = 4 * 25e9
"""Of one A100 to the others of its host: "NVLink 4 inter-gpu connects" (BLOOM, arXiv 2211.05100)."""
QUANTISED = {"int8": 1.0, "int4": 0.625, "nf4-dq": 0.516, "nf4": 0.5625, "fp4": 0.5625, "awq": 0.53, "gptq": 0.53}
"""Bytes per parameter, scales of groups included."""


class Unpriced(Exception):
    """A row that can't be priced; the message says why."""


def refuse(found: object, reason: str) -> None:
    """Raise `Unpriced` where something was found."""
    if found:
        raise Unpriced(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder: how its classes in transformers begin, and what their configuration is given.

    `fused_norms`: not with nanotron, whose peaks show about 6 bytes more per token and column than the tensors that are
    known to be kept; norms that are written op by op stand for them, with 8. What they are was not found.
    """

    kind: str
    config: tuple[tuple[str, Any], ...]
    layers: int
    tied: bool
    fused_norms: bool


def number(row: Row, name: str, default: int = 0) -> int:
    """A whole number of a row, `default` where the cell is empty or says "on"."""
    return int(float(row[name])) if row[name] not in ("", "on") else default


def says(row: Row, name: str, pattern: str) -> re.Match[str] | None:
    """Where a text of a row has a pattern, in capitals or not."""
    return re.search(pattern, row[name], re.I)


def family(row: Row) -> str:
    """The source's short name, which begins the id."""
    return row["id"].split("-")[0]


def run_of(row: Row) -> str:
    """The run that a row is a figure of."""
    return row["id"].split(":")[0]


def shape_of(row: Row) -> Shape:
    """The model of a row. Raises `Unpriced` where dimensions are missing."""
    missing = [name for name in ("hidden", "layers") if not row[name]]
    refuse(missing, f"no {', '.join(missing)}")
    refuse(re.search(r"cut to \d+ layers", row["model"]), "a model cut to its first layers")
    gpt = bool(says(row, "model", GPT_LIKE)) or family(row) in ("mpt", "bs")
    experts, chosen = experts_of(row)
    refuse(not experts and says(row, "model", MIXTURE), "a mixture whose experts are not given")
    seq = number(row, "seq") or (512 if row["metric"] in (*DECODE, *MEMORY) else 0)
    refuse(not seq, "no seq")
    tied = gpt or bool(re.search(r"\btied\b", f"{row['model']} {row['source']}"))
    hidden, vocab = number(row, "hidden"), vocabulary_of(row, gpt)
    heads = number(row, "heads") or max(1, hidden // 128)
    config = {"hidden_size": hidden, "vocab_size": vocab, "num_attention_heads": heads, "max_position_embeddings": seq}
    if gpt:
        kind, ffn = "OPT", number(row, "ffn") or 4 * hidden
        config |= {"ffn_dim": ffn, "activation_function": "gelu", "dropout": 0.0, "word_embed_proj_dim": hidden}
    else:
        kind, kv_heads = "Mixtral" if experts else "Llama", number(row, "kv_heads", heads)
        ffn = number(row, "ffn") or _ffn_of(row, 2 + 2 * kv_heads / heads, (1 if tied else 2) * vocab)
        config |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn}
        config |= {"num_local_experts": experts, "num_experts_per_tok": chosen} if experts else {}
    return Shape(
        kind=kind, config=tuple(config.items()), layers=number(row, "layers"), tied=tied,
        fused_norms=family(row) != "nano",
    )  # fmt: skip


def vocabulary_of(row: Row, gpt: bool) -> int:
    """Rows of the table of words: GPT-2 has 50,257; nanotron pads to a multiple of `tp`, Megatron of 128 `tp`."""
    tp = number(row, "tp", 1)
    found, multiple = number(row, "vocab") or (50257 if gpt or "gpt2" in row["source"] else 32000), 128
    if stack_of(row) in HAND_FUSED:
        multiple = 128 * tp
    elif family(row) == "nano":
        multiple = tp
    elif number(row, "vocab"):
        multiple = 1
    return -(-found // multiple) * multiple


def experts_of(row: Row) -> tuple[int, int]:
    """How many experts a layer has, and how many of them compute each token; (0, 0) without."""
    named = says(row, "model", r"(\d+) experts top-(\d+)")
    return (int(named[1]), int(named[2])) if named else (0, 0)


def _ffn_of(row: Row, squares: float, words: int) -> int:
    """The width of a gated MLP: what the parameters leave, or the usual one.

    `squares`: of the hidden size, in the attention of a layer; `words`: rows of all tables of words.
    """
    hidden, layers, (experts, _) = number(row, "hidden"), number(row, "layers"), experts_of(row)
    usual = -(-8 * hidden // 3 // 256) * 256
    if not row["params_b"] or (not experts and says(row, "model", r"opt|phi|gpt")):
        return usual
    left = float(row["params_b"]) * 1e9 - words * hidden - layers * squares * hidden * hidden
    found = round(left / layers / (3 * hidden * max(1, experts)) / 64) * 64
    return found if hidden // 4 <= found <= 8 * hidden else usual


@functools.cache
def work_of(shape: Shape) -> ModelWork:
    """Build a decoder of a few layers on meta, fold it, and count its layer as often as the model has it."""
    given = dict(shape.config)
    config = getattr(transformers, f"{shape.kind}Config")(
        **given, num_hidden_layers=TRACED_LAYERS, use_cache=False, attn_implementation="sdpa",
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{shape.kind}ForCausalLM")(config).to(torch.bfloat16)
        # In place of norms that are written as six element-wise ops: training stacks have one kernel for it.
        fused = functools.partial(torch.nn.RMSNorm, given["hidden_size"], dtype=torch.bfloat16)
        for path, norm in list(model.named_modules()) if shape.fused_norms else ():
            if type(norm).__name__.endswith("RMSNorm"):
                model.set_submodule(path, fused(eps=norm.variance_epsilon))
    seq = given["max_position_embeddings"]
    ids = torch.zeros(2, seq, dtype=torch.long)
    workload = autoshard.Workload(batch_size=2, sequence_length=seq)
    work = trace(model, {"input_ids": ids, "labels": ids.clone()}, workload).work
    refuse(sum(block.layer for block in work.blocks) != 1, "its layers are not all alike")
    # Tied embeddings are cut along the vocabulary as others are; they are counted once.
    tied = given["vocab_size"] * given["hidden_size"] if shape.tied else 0
    blocks = tuple(
        replace(block, count=shape.layers) if block.layer
        else replace(block, shared=tied) if block.path == "last" else block
        for block in work.blocks
    )  # fmt: skip
    return replace(work, blocks=blocks)


def stack_of(row: Row) -> Any:
    """Who made the kernels."""
    if says(row, "source", SERVED):
        return "compiled"
    if family(row) in ("sc21", "mb", "mlm", "mk22"):
        return "fused"
    named = (stack for stack, pattern in STACKS.items() if says(row, "source", pattern))
    return next(named, "compiled" if row["compile"] in ("yes", "thunder") else "eager")


def recipe_of(row: Row) -> Recipe:
    """The recipe as given. Raises `Unpriced` where it does not determine a run."""
    refuse(says(row, "dtype", r"fp8|nvfp4|nf4|int\d"), f"computes in {row['dtype']}")
    refuse(not row["dtype"] and says(row, "source", r"quantis|nemo"), "computes in a precision that is not given")
    refuse("lora" in row["optimizer"].lower(), "trains adapters")
    gpus, tp, pp, cp, ep = (number(row, name, 1) for name in ("gpus", "tp", "pp", "cp", "ep"))
    rest = max(1, gpus // (tp * pp * cp))
    stack = stack_of(row)
    fused = stack in HAND_FUSED
    if row["fsdp"] and not (fused and row["fsdp"] == "1"):
        fsdp = number(row, "fsdp", rest)
        refuse(ep > 1 and fsdp * tp * pp * cp * ep == gpus, "ranks of experts that compute the same samples")
    else:
        fsdp = 1 if row["dp"] or fused else rest
    dp = max(1, rest // max(1, fsdp))
    refuse(dp * fsdp * tp * pp * cp != gpus, "the degrees do not multiply to the GPUs")
    refuse(gpus // pp % ep, "the degree of experts does not divide the ranks")
    refuse(not number(row, "micro_batch") and not (pp > 1 and row["global_batch"]), "no micro_batch")
    micro, batch = number(row, "micro_batch") or 1, number(row, "global_batch")
    accumulated = re.search(r"accumulation (?:or micro-batches )?(\d+)", row["source"])
    if batch:
        count = max(1, round(batch / (micro * dp * fsdp)))
    else:
        count = int(accumulated[1]) if accumulated else 1 if pp == 1 else 4 * pp
    own = family(row) in ("kf", "kfc")
    unfused = bool(says(row, "source", UNFUSED)) and not row["recompute"].startswith("selective")
    whole_sequences = family(row) in ("bs", "sc21") or ("unless PP" in row["source"] and pp > 1)
    return Recipe(
        dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=micro, num_microbatches=count,
        schedule="1f1b" if count >= pp else "gpipe", recompute=recompute_of(row), stack=stack,
        precision=precision_of(row), sequence_parallel=not whole_sequences,
        zero=0 if fsdp > 1 or "ZeRO-0" in row["optimizer"] else int(fused or "ZeRO-1" in row["optimizer"]),
        loss_parallel=not own, unfused_attention=unfused,
        accumulate_unsharded=own, balanced_stages=family(row) == "nano", regathers=own,
        logit_bytes=8 if fused or family(row) == "nano" or (own and not experts_of(row)[0]) else 16,
    )  # fmt: skip


def recompute_of(row: Row) -> Any:
    """What is computed again; Megatron's selective recomputation is of what fused attention never keeps."""
    text = row["recompute"]
    refuse("every" in text, "recomputes some layers")
    if family(row) == "sc21" or text == "full":
        return "full"
    return "selective" if text.startswith("selective") and stack_of(row) not in HAND_FUSED else "none"


def precision_of(row: Row) -> Precision:
    """Bytes per element, from what the dtype and the optimizer say."""
    if "pure" in row["dtype"] or "states bf16" in row["optimizer"]:
        reduce = 4 if "reduced in fp32" in row["optimizer"] else 2
        # Sums over micro-batches are kept in the precision that they are reduced in, also where nothing is sharded.
        gradients = 2 if number(row, "fsdp") > 1 else reduce
        return Precision(parameters=2, compute=2, gradients=gradients, reduce=reduce, moments=2)
    if stack_of(row) in HAND_FUSED or "ZeRO-1" in row["optimizer"]:
        summed = "fp32 gradient" in row["dtype"]  # besides those of 16 bits that a backward makes
        # Megatron sums gradients of bfloat16 in float32, those of float16 as they are.
        megatron = stack_of(row) == "fused" and "bf16" in row["dtype"].lower()
        gradients = 6 if summed else 4 if megatron or "fp32" in row["optimizer"] else 2
        return Precision(parameters=2, compute=2, gradients=gradients, reduce=min(4, gradients), master=4, moments=4)
    return Precision()


def serving_of(row: Row) -> tuple[Recipe, int, int, int]:
    """The recipe of a generation as given; sequences, tokens of a prompt, new tokens."""
    quantised = next((size for name, size in QUANTISED.items() if row["dtype"].startswith(name)), 0.0)
    refuse(row["dtype"].startswith("nf4") and row["metric"] in DECODE, "kernels that dequantise on the fly")
    refuse("fp8" in row["dtype"], f"computes in {row['dtype']}")
    outside = says(row, "source", r"cpu|dram|offload") and "lowest level gpu" not in row["source"]
    refuse(outside, "weights outside of the cards")
    gpus, tp, pp = (number(row, name, 1) for name in ("gpus", "tp", "pp"))
    refuse(gpus % (tp * pp), "the degrees do not multiply to the GPUs")
    size = quantised or (4.0 if "32" in row["dtype"] else 2.0)
    precision = Precision(parameters=size, compute=4 if size == 4 else 2)
    sequences = number(row, "global_batch") or number(row, "micro_batch", 1)
    prompt = re.search(r"(\d+)-token prompt|input (\d+)|prompt (\d+)", row["source"])
    new = re.search(r"output (\d+)|(\d+) new", row["source"])
    return (
        Recipe(dp=gpus // tp // pp, tp=tp, pp=pp, stack=stack_of(row), precision=precision, sequence_parallel=False),
        sequences,
        int(next(filter(None, prompt.groups()))) if prompt else number(row, "seq", 128),
        int(next(filter(None, new.groups()))) if new else 128,
    )


hosts_of = functools.cache(parse_devices)
"""Hosts of a card as the hardware table has them."""


def named_card(row: Row) -> Any:
    """The card in the hardware table; what its power or the size of its memory are is no part of its name there."""
    return find_hardware(re.sub(r"^DGX-| ?\(.*\)|-\d+W$| \d+W$|-HBM2e.*|-96GB", "", row["gpu"]))


def hardware_of(row: Row) -> tuple[Card, Topology]:
    """The card, and how the row's cards are connected."""
    text = row["gpu"]
    try:
        known = named_card(row)
    except AutoshardError as error:
        raise Unpriced(f"the card {text!r} is not in the table") from error
    watts, bandwidth, size = (re.search(found, text) for found in (r"(\d+) ?W", r"([\d.]+) TB/s", r"(\d+)GB"))
    gpus = number(row, "gpus", 1)
    per_host = min(gpus, number(row, "gpus_per_node", 8))
    cluster = hosts_of(f"2 hosts of {per_host}x{known.name}")
    card, topology = card_of(cluster.devices[0]), topology_of(cluster)
    assert topology is not None, "hosts of equally many cards"
    full_watts = {"sm90": 700, "sm80": 400}.get(known.arch, 0)
    if watts and full_watts:
        card = replace(card, flops_per_second=card.flops_per_second * min(1.0, int(watts[1]) / full_watts))
    if bandwidth:
        card = replace(card, bytes_per_second=float(bandwidth[1]) * 1e12)
    if size and int(size[1]) != known.nominal_gb:
        card = replace(card, memory_bytes=int(int(size[1]) * 2**30 * 0.985))
    topology = replace(topology, hosts=-(-gpus // per_host))
    if known.name.startswith("A100") and family(row) == "bs":
        topology = replace(topology, local_bytes_per_second=JEAN_ZAY_BYTES_PER_SECOND)
    gbits = network_gbits(row, per_host)
    return card, replace(topology, network_bytes_per_second=gbits * 1e9 / 8) if gbits else topology


def network_gbits(row: Row, per_host: int) -> float:
    """Gb/s of network per device, as far as a row says it; 0 where it does not."""
    text = row["interconnect"] + " " + row["source"]
    if each := re.search(r"(\d+) Gb/s per (?:GPU|HDR)", text) or re.search(r"NDR (\d+) Gb/s", text):
        return float(each[1])
    if host := re.search(r"(\d{3,4}) ?Gb(?:ps|/s) node", text):
        return float(host[1]) / 8
    # BigScience trained on Jean Zay, whose hosts of eight have four Omni-Path adapters.
    if re.search(r"4 Omni-Path|4 x 100", text) or family(row) == "bs":
        return 4 * 100 / per_host
    return 0.0


def too_large(row: Row, *, serves: bool) -> bool:
    """Whether weights alone, or with gradients and moments in 16 bits, are more than all cards hold, sharded evenly."""
    if says(row, "dtype", r"fp8|nf4|int\d|fp4"):
        return False
    named = says(row, "model", r"(\d+(?:\.\d+)?)b\b")
    parameters = 1e9 * float(row["params_b"] or (named[1] if named else 0))
    adapters = "lora" in f"{row['optimizer']} {row['id']}".lower()
    per_parameter = 2 if serves or adapters else 8
    return parameters * per_parameter > number(row, "gpus", 1) * hardware_of(row)[0].memory_bytes


def price(row: Row, *, serves: bool) -> float:
    """The predicted figure of a row."""
    if row["metric"] == "fits" and too_large(row, serves=serves):
        return 0.0
    recipe, *asked = serving_of(row) if serves else (recipe_of(row),)
    shape = shape_of(row)
    return figure_of(row, estimated(shape, recipe, *hardware_of(row), *asked), work_of(shape), *asked[:1])


@functools.cache
def estimated(shape: Shape, recipe: Recipe, card: Card, topology: Topology, *asked: int) -> RecipeEstimate:
    """Price a training step, or an answer for so many sequences, tokens of a prompt and new tokens.

    Who changes the table of efficiencies has to clear the cache.
    """
    if not asked:
        return price_step(work_of(shape), recipe, card, topology)
    sizes = dict(zip(("batch", "prompt_tokens", "new_tokens"), asked, strict=True))
    return price_generation(work_of(shape), recipe, card, topology, **sizes)


def figure_of(row: Row, estimate: RecipeEstimate, work: ModelWork, sequences: int = 0) -> float:
    """The figure of a row's metric, in its unit; `sequences`: that are generated at once, 0 for training."""
    metric, unit, recipe, gpus = row["metric"], row["unit"], estimate.recipe, estimate.recipe.devices
    known = (*(DECODE if sequences else THROUGHPUT), *MEMORY, "fits")
    refuse(metric not in known, f"the metric {metric} is of one source alone")
    if metric == "fits":
        return float(estimate.fits)
    if metric in MEMORY and sequences:
        return estimate.memory.allocated / UNITS[unit]
    if metric == "allocated_between_steps":
        return estimate.memory.curve[0].total / UNITS[unit]
    if metric in MEMORY:
        meter = {"peak_allocated_per_gpu": "allocated", "peak_reserved_per_gpu": "reserved"}.get(metric)
        return getattr(estimate.memory, meter or METERS.get(family(row), "reserved")) / UNITS[unit]
    if metric in ("step_time", "ms_per_token_per_sequence", "s_per_token"):
        seconds = estimate.token_seconds if sequences else estimate.seconds
        return seconds * (1e3 if unit.startswith("ms") or metric.startswith("ms") else 1)
    if metric == "decode_tokens_per_s":
        return sequences / estimate.token_seconds
    if metric in TFLOPS:
        again = 4 / 3 if metric[0] in "hp" and recipe.recompute == "full" else 1
        # FLOPs of forward and backward, as model FLOPs are counted: all products, and attention, three times.
        counted = [(block.count, sums_of(block)) for block in work.blocks]
        flops = 3 * sum(count * one.flops for count, sums in counted for one in (*sums.products, *sums.attentions))
        rate = flops * recipe.global_batch / work.samples * again / estimate.seconds / gpus
        return rate / 1e12 if metric.endswith("_gpu") else 100 * rate / named_card(row).flops_per_second["bfloat16"]
    return estimate.tokens_per_second / (gpus if metric.endswith("_per_gpu") else 1)
