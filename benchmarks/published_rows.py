"""Read a row of published runs: its model, its recipe, its hardware, as given; what is not given by stated defaults."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from autoshard.axes.walk import walk_over
from autoshard.capture.capture import capture
from autoshard.cluster.hardware import find_hardware
from autoshard.cluster.parse import parse_devices
from autoshard.cluster.topology import Topology, topology_of
from autoshard.engine.blocks import ModelWork, model_work
from autoshard.engine.recipe import Precision, Recipe
from autoshard.engine.timing import Card
from autoshard.errors import AutoshardError
from autoshard.plan.workload import Workload

Row = Mapping[str, str]
RATES = ("tokens_per_s_per_gpu", "tokens_per_s_total", "tokens_per_s", "step_time")
TFLOPS = ("hardware_tflops_per_gpu", "model_tflops_per_gpu", "mfu", "hfu", "percent_of_peak")
THROUGHPUT = (*RATES, *TFLOPS)
MEMORY = ("peak_mem_per_gpu", "peak_allocated_per_gpu", "peak_reserved_per_gpu", "allocated_between_steps")
DECODE = ("decode_tokens_per_s", "ms_per_token_per_sequence", "s_per_token", "generation_tokens_per_s")
TRACED_LAYERS = 3
"""Layers that are built of each model: all of them are alike, and one more costs a capture more time."""
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}
GPT_LIKE = re.compile(r"\b(gpt|mpt|opt|bloom|bigscience|megatron|turing)", re.I)
"""Models with learned positions, LayerNorm, a plain MLP of four times the width and tied embeddings."""
HAND_FUSED = ("fused", "deepspeed")
DEEPSPEED = re.compile(r"megatron-deepspeed|bigscience", re.I)
"""Megatron's kernels run by DeepSpeed."""
MEGATRON = re.compile(r"megatron|nemo|transformer.?engine|\bTE\b", re.I)
"""Sources whose layers are made of hand-fused kernels."""
UNFUSED = re.compile(r"bigscience|2104\.04473|2205\.05198", re.I)
"""Sources of 2021 and 2022, before fused attention."""
EARLY = re.compile(r"mosaicml|llm-foundry", re.I)
"""Sources of 2023: torch 1.13 or 2.0 and the first fused attention, made for the A100."""
SERVED = re.compile(r"vllm|sglang|tensorrt|trt-llm|lmdeploy|tgi", re.I)
JEAN_ZAY_BYTES_PER_SECOND = 4 * 25e9
"""Of one A100 to the others of its host: "NVLink 4 inter-gpu connects" (BLOOM, arXiv 2211.05100)."""
QUANTISED = {"int8": 1.0, "int4": 0.625, "nf4-dq": 0.516, "nf4": 0.5625, "fp4": 0.5625, "awq": 0.53, "gptq": 0.53}
"""Bytes per parameter, scales of groups included."""


class Unpriced(Exception):
    """A row that can't be priced; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """A decoder: `kind` "gpt" or "llama"; `experts` of which `chosen` compute each token.

    `fused_norms`: not with nanotron, whose peaks show about 6 bytes more per token and column than the tensors that are
    known to be kept; norms that are written op by op stand for them, with 8. What they are was not found.
    """

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    tied: bool
    experts: int = 0
    chosen: int = 0
    fused_norms: bool = True


def number(row: Row, name: str, default: int = 0) -> int:
    """A whole number of a row, `default` where the cell is empty or says "on"."""
    return int(float(row[name])) if row[name] not in ("", "on") else default


def family(row: Row) -> str:
    """The source's short name, which begins the id."""
    return row["id"].split("-")[0]


def run_of(row: Row) -> str:
    """The run that a row is a figure of."""
    return row["id"].split(":")[0]


def dimensions_of(row: Row) -> Dimensions:
    """The model of a row. Raises `Unpriced` where dimensions are missing."""
    missing = [name for name in ("hidden", "layers") if not row[name]]
    if missing:
        raise Unpriced(f"no {', '.join(missing)}")
    if re.search(r"cut to \d+ layers", row["model"]):
        raise Unpriced("a model cut to its first layers")
    text = f"{row['model']} {row['source']}"
    gpt = bool(GPT_LIKE.search(row["model"])) or family(row) in ("mpt", "bs")
    hidden, layers = number(row, "hidden"), number(row, "layers")
    heads = number(row, "heads") or max(1, hidden // 128)
    kv_heads = number(row, "kv_heads", heads)
    experts, chosen = experts_of(row)
    if not experts and re.search(r"moe|mixtral|x\d+b\b|-a\d+b|deepseek|gpt.oss|kimi", row["model"], re.I):
        raise Unpriced("a mixture whose experts are not given")
    vocab = vocabulary_of(row, gpt)
    shape = hidden, layers, heads, kv_heads, vocab, experts
    tied = gpt or bool(re.search(r"\btied\b", text))
    ffn = number(row, "ffn") or _ffn_of(row, gpt, tied, *shape)
    seq = number(row, "seq") or (512 if row["metric"] in (*DECODE, *MEMORY) else 0)
    if not seq:
        raise Unpriced("no seq")
    return Dimensions(
        kind="gpt" if gpt else "llama", hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, ffn=ffn,
        vocab=vocab, seq=seq, tied=tied, experts=experts, chosen=chosen, fused_norms=family(row) != "nano",
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
    named = re.search(r"(\d+) experts top-(\d+)", row["model"])
    return (int(named[1]), int(named[2])) if named else (0, 0)


def _ffn_of(
    row: Row, gpt: bool, tied: bool, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, experts: int
) -> int:
    """The width of the MLP: what is left of the parameters, or the usual one."""
    if gpt:
        return 4 * hidden
    usual = -(-8 * hidden // 3 // 256) * 256
    if not row["params_b"] or (not experts and re.search(r"opt|phi|gpt", row["model"], re.I)):
        return usual
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    left = float(row["params_b"]) * 1e9 - (1 if tied else 2) * vocab * hidden - layers * attention
    found = round(left / layers / (3 * hidden * max(1, experts)) / 64) * 64
    return found if hidden // 4 <= found <= 8 * hidden else usual


def with_fused_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Replace norms that are written as six element-wise ops by torch's own: training stacks have one kernel for it."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, torch.nn.RMSNorm):
                setattr(
                    module,
                    name,
                    torch.nn.RMSNorm(
                        child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype, device="meta"
                    ),
                )
    return model


@functools.cache
def work_of(shape: Dimensions) -> ModelWork:
    """Build a decoder of a few layers on meta, fold it, and count its layer as often as the model has it."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocab, "use_cache": False, "attn_implementation": "sdpa", "tie_word_embeddings": False,
        "num_attention_heads": shape.heads, "num_hidden_layers": TRACED_LAYERS, "hidden_size": shape.hidden,
        "max_position_embeddings": shape.seq, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    decoder = {"num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn}
    if shape.kind == "gpt":
        config: Any = transformers.OPTConfig(
            ffn_dim=shape.ffn, activation_function="gelu", dropout=0.0, word_embed_proj_dim=shape.hidden, **common
        )
        make: Any = transformers.OPTForCausalLM
    elif shape.experts:
        config = transformers.MixtralConfig(
            num_local_experts=shape.experts, num_experts_per_tok=shape.chosen, **decoder, **common
        )
        make = transformers.MixtralForCausalLM
    else:
        config, make = transformers.LlamaConfig(**decoder, **common), transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = make(config).to(torch.bfloat16)
        if shape.fused_norms:
            model = with_fused_norms(model)
    ids = torch.zeros(2, shape.seq, dtype=torch.long)
    workload = Workload(batch_size=2, sequence_length=shape.seq)
    graph = capture(model, {"input_ids": ids, "labels": ids.clone()}, workload=workload, composite=True)
    work = model_work(walk_over(graph, graph.ops), 2, shape.seq)
    if sum(block.layer for block in work.blocks) != 1:
        raise Unpriced("its layers are not all alike")
    # Tied embeddings are cut along the vocabulary as others are; they are counted once.
    tied = shape.vocab * shape.hidden if shape.tied else 0
    blocks = tuple(
        replace(block, count=shape.layers) if block.layer
        else replace(block, shared=tied) if block.path == "last" else block
        for block in work.blocks
    )  # fmt: skip
    return replace(work, blocks=blocks)


def stack_of(row: Row) -> Any:
    """Who made the kernels."""
    if SERVED.search(row["source"]):
        return "compiled"
    if family(row) in ("sc21", "mb", "mlm", "mk22"):
        return "fused"
    if DEEPSPEED.search(row["source"]):
        return "deepspeed"
    if MEGATRON.search(row["source"]):
        return "fused"
    if EARLY.search(row["source"]):
        return "early"
    return "compiled" if row["compile"] in ("yes", "thunder") else "eager"


def recipe_of(row: Row) -> Recipe:
    """The recipe as given. Raises `Unpriced` where it does not determine a run."""
    _refuse_dtype(row)
    if "lora" in row["optimizer"].lower():
        raise Unpriced("trains adapters")
    gpus, tp, pp, cp, ep = (number(row, name, 1) for name in ("gpus", "tp", "pp", "cp", "ep"))
    rest = max(1, gpus // (tp * pp * cp))
    stack = stack_of(row)
    fused = stack in HAND_FUSED
    if row["fsdp"] and not (fused and row["fsdp"] == "1"):
        fsdp = number(row, "fsdp", rest)
        if ep > 1 and fsdp * tp * pp * cp * ep == gpus:
            raise Unpriced("ranks of experts that compute the same samples")
        dp = max(1, rest // max(1, fsdp))
    elif row["dp"] or fused:
        fsdp, dp = 1, rest
    else:
        fsdp, dp = rest, 1
    if dp * fsdp * tp * pp * cp != gpus:
        raise Unpriced("the degrees do not multiply to the GPUs")
    if gpus // pp % ep:
        raise Unpriced("the degree of experts does not divide the ranks")
    micro = number(row, "micro_batch")
    if not micro and not (pp > 1 and row["global_batch"]):
        raise Unpriced("no micro_batch")
    micro = micro or 1
    batch, accumulated = (
        number(row, "global_batch"),
        re.search(r"accumulation (?:or micro-batches )?(\d+)", row["source"]),
    )
    count = max(1, round(batch / (micro * dp * fsdp))) if batch else 1 if pp == 1 else 4 * pp
    if not batch and accumulated:
        count = int(accumulated[1])
    own = family(row) in ("kf", "kfc")
    unfused = bool(UNFUSED.search(row["source"])) and not row["recompute"].startswith("selective")
    whole_sequences = family(row) in ("bs", "sc21") or ("unless PP" in row["source"] and pp > 1)
    return Recipe(
        dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=micro, num_microbatches=count,
        reshard="SHARD_GRAD_OP" not in row["source"],
        schedule="1f1b" if count >= pp else "gpipe", recompute=recompute_of(row), stack=stack,
        precision=precision_of(row), sequence_parallel=not whole_sequences,
        zero=0 if fsdp > 1 or "ZeRO-0" in row["optimizer"] else int(fused or "ZeRO-1" in row["optimizer"]),
        loss_parallel=not own, unfused_attention=unfused,
        accumulate_unsharded=own, balanced_stages=family(row) == "nano", regathers=own,
        logit_bytes=8 if family(row) == "nano" or (own and not experts_of(row)[0]) else 0,
    )  # fmt: skip


def _refuse_dtype(row: Row) -> None:
    if re.search(r"fp8|mxfp8|nvfp4|nf4|int\d", row["dtype"].lower()):
        raise Unpriced(f"computes in {row['dtype']}")
    if not row["dtype"] and re.search(r"quantis|nemo", row["source"], re.I):
        raise Unpriced("computes in a precision that is not given")


def recompute_of(row: Row) -> Any:
    """What is computed again; Megatron's selective recomputation is of what fused attention never keeps."""
    text = row["recompute"]
    if "every" in text:
        raise Unpriced("recomputes some layers")
    if family(row) == "sc21" or text == "full":
        return "full"
    return "selective" if text.startswith("selective") and stack_of(row) not in HAND_FUSED else "none"


def precision_of(row: Row) -> Precision:
    """Bytes per element, from what the dtype and the optimizer say."""
    if "pure" in row["dtype"] or "states bf16" in row["optimizer"]:
        reduce = 4 if "reduced in fp32" in row["optimizer"] else 2
        # Sums over micro-batches are kept in the precision that they are reduced in, also where nothing is sharded.
        return Precision(
            parameters=2, compute=2, gradients=2 if number(row, "fsdp") > 1 else reduce, reduce=reduce, moments=2
        )
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
    if row["dtype"].startswith("nf4") and row["metric"] in DECODE:
        raise Unpriced("kernels that dequantise on the fly")
    if "fp8" in row["dtype"]:
        raise Unpriced(f"computes in {row['dtype']}")
    if re.search(r"cpu|dram|offload", row["source"], re.I) and "lowest level gpu" not in row["source"]:
        raise Unpriced("weights outside of the cards")
    gpus, tp, pp = (number(row, name, 1) for name in ("gpus", "tp", "pp"))
    if gpus % (tp * pp):
        raise Unpriced("the degrees do not multiply to the GPUs")
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


def hardware_of(row: Row) -> tuple[Card, Topology]:
    """The card, and how the row's cards are connected."""
    text = row["gpu"]
    name = re.sub(r"^DGX-| ?\(.*\)|-\d+W$| \d+W$|-HBM2e.*", "", text)
    try:
        known = find_hardware(re.sub(r"-96GB", "", name))
    except AutoshardError as error:
        raise Unpriced(f"the card {text!r} is not in the table") from error
    watts = re.search(r"(\d+) ?W", text)
    full_watts = {"sm90": 700, "sm80": 400}.get(known.arch, 0)
    power = min(1.0, int(watts[1]) / full_watts) if watts and full_watts else 1.0
    bandwidth = re.search(r"([\d.]+) TB/s", text)
    size = re.search(r"(\d+)GB", text)
    gigabytes = int(size[1]) if size else known.nominal_gb
    rates = known.flops_per_second
    card = Card(
        generation=known.arch,
        flops_per_second=(rates.get("bfloat16") or rates.get("float16") or rates["float32"]) * power,
        bytes_per_second=float(bandwidth[1]) * 1e12 if bandwidth else known.bytes_per_second,
        memory_bytes=known.memory_bytes if gigabytes == known.nominal_gb else int(gigabytes * 2**30 * 0.985),
    )
    gpus = number(row, "gpus", 1)
    per_host = min(gpus, number(row, "gpus_per_node", 8))
    topology = replace(usual_topology(known.name, per_host), hosts=-(-gpus // per_host))
    if known.name.startswith("A100") and family(row) == "bs":
        topology = replace(topology, local_bytes_per_second=JEAN_ZAY_BYTES_PER_SECOND)
    gbits = network_gbits(row, per_host)
    return card, replace(topology, network_bytes_per_second=gbits * 1e9 / 8) if gbits else topology


@functools.cache
def usual_topology(card: str, per_host: int) -> Topology:
    """Hosts of a card as the hardware table has them."""
    found = topology_of(parse_devices(f"2 hosts of {per_host}x{card}"))
    if found is None:
        raise Unpriced(f"hosts of {card} are not equal")
    return found


def network_gbits(row: Row, per_host: int) -> float:
    """Gb/s of network per device, as far as a row says it; 0 where it does not."""
    text = row["interconnect"] + " " + row["source"]
    each = re.search(r"(\d+) Gb/s per (?:GPU|HDR)", text) or re.search(r"NDR (\d+) Gb/s", text)
    if each:
        return float(each[1])
    host = re.search(r"(\d{3,4}) ?Gb(?:ps|/s) node", text)
    if host:
        return float(host[1]) / 8
    # BigScience trained on Jean Zay, whose hosts of eight have four Omni-Path adapters.
    if re.search(r"4 Omni-Path|4 x 100", text) or family(row) == "bs":
        return 4 * 100 / per_host
    return 0.0


def find_peak(row: Row) -> float:
    """The published peak that a share of it is counted against."""
    known = find_hardware(re.sub(r"^DGX-| ?\(.*\)|-\d+W$| \d+W$|-HBM2e.*|-96GB", "", row["gpu"]))
    return known.flops_per_second["bfloat16"]
