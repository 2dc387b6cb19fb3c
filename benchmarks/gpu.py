"""Everything that only a GPU can show, in one run: is it equal, and do predictions agree with what is measured?

    python benchmarks/gpu.py -o results.json          one GPU, about 15 minutes; nothing is downloaded
    python benchmarks/gpu.py --dry -o results.json    the same parts with small models on simulated devices

Parts (choose some with --only):

    equal     placement on GPU and CPU, a cut over both, offload to CPU and to disk, loading: largest relative error
    memory    eight models, inference and training: predicted bytes against those that the allocator counted
    kernels   matrix products and attention: predicted seconds against measured ones
    runs      a decoder's prompt, its tokens (op by op, and compiled with CUDA graphs), a training step
    links     bytes per second between host and GPU, pinned and not, against what is assumed

Each row has a predicted and a measured figure and their ratio; rows of "equal" have an error. Times are medians of
repeated runs with the clock read after the device is done.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import autoshard
from autoshard.capture.backward import training_loss
from autoshard.cluster.parse import parse_devices
from autoshard.engine.cards import card_of
from autoshard.engine.efficiency import efficiency_of
from autoshard.engine.local import Attention, Product, Share, Volume
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import attention_seconds, product_seconds
from autoshard.nested import map_tensors

PRODUCTS = ((8192, 4096, 4096), (8192, 14336, 4096), (2048, 4096, 4096), (512, 4096, 4096), (64, 4096, 14336),
            (1, 4096, 4096), (8192, 128256, 4096))  # fmt: skip
"""m, n and k of matrix products: those of decoders, with many rows and with few."""
ATTENTIONS = ((1, 32, 8192, 128), (4, 32, 2048, 128), (16, 16, 512, 64))
"""Batch, heads, tokens and columns of a head of causal attention."""
REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: `predicted` and `measured` in `unit`, or the largest relative `error` of what must be equal."""

    part: str
    case: str
    unit: str = ""
    predicted: float = 0.0
    measured: float = 0.0
    error: float | None = None
    failed: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured if self.measured else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is measured on: `home` computes, `other` is the CPU beside it, or another simulated device.

    `scale`: how many times as wide as the smallest the models are. `devices`: the simulated ones.
    """

    home: str
    other: str
    scale: int
    devices: Any = None

    @property
    def real(self) -> bool:
        """Whether it is a GPU."""
        return self.devices is None

    @property
    def cluster(self) -> Any:
        """The device that computes, as a plan knows it."""
        return parse_devices("auto") if self.real else parse_devices("1x64GiB")

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.real:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], repeats: int = REPEATS) -> float:
        """The median of repeated runs, after two that warm up."""
        times = []
        for index in range(repeats + 2):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            if index > 1:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def reset_peak(self) -> None:
        """Begin to count the peak of the memory anew."""
        if self.real:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.devices.reset_peak()

    def peak_bytes(self) -> int:
        """The most bytes of tensors since then."""
        return torch.cuda.max_memory_allocated() if self.real else self.devices.memory(self.home)[1]


def models(scale: int) -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Eight kinds of models with inputs."""
    words = 4000 * scale
    text = {
        "vocab_size": words, "hidden_size": 128 * scale, "intermediate_size": 352 * scale,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    tower = {**text, "image_size": 64, "patch_size": 8}
    pairs = {
        "vocab_size": words, "d_model": 128 * scale, "d_kv": 16 * scale, "d_ff": 352 * scale, "num_layers": 4,
        "num_heads": 8, "decoder_start_token_id": 0,
    }  # fmt: skip
    ids = {"input_ids": torch.randint(0, 4000, (2, 256))}
    decoder = {**ids, "use_cache": False}
    auto = transformers.AutoModelForCausalLM.from_config
    width = 256 * scale
    return {
        "decoder": (auto(transformers.LlamaConfig(**text)), decoder),
        "decoder, tied": (auto(transformers.Qwen2Config(**text, tie_word_embeddings=True)), decoder),
        "mixture of experts": (auto(transformers.MixtralConfig(**text, num_local_experts=4)), decoder),
        "encoder": (transformers.AutoModel.from_config(transformers.BertConfig(**text)), ids),
        "encoder-decoder": (
            transformers.AutoModelForSeq2SeqLM.from_config(transformers.T5Config(**pairs)),
            {**decoder, "decoder_input_ids": ids["input_ids"][:, :64]},
        ),
        "vision": (
            transformers.AutoModelForImageClassification.from_config(transformers.ViTConfig(**tower)),
            {"pixel_values": torch.randn(8, 3, 64, 64)},
        ),
        "convolutions": (
            nn.Sequential(*(nn.Sequential(nn.Conv2d(3 if not i else 32, 32, 3, padding=1), nn.BatchNorm2d(32),
                                          nn.ReLU()) for i in range(8))),
            {"input": torch.randn(8, 3, 64, 64)},
        ),
        "linear layers": (
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))),
            {"input": torch.randn(64, width)},
        ),
    }  # fmt: skip


def on_device(inputs: Any, device: str | torch.device) -> Any:
    """The same inputs on a device."""
    return map_tensors(inputs, lambda tensor: tensor.to(device))


def first_tensor(output: Any) -> torch.Tensor:
    """The first tensor of an output, on the CPU."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if hasattr(output, "values") else output))
    return output.detach().float().cpu()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def halves(layers: int, first: str, second: str) -> dict[str, str]:
    """A device map of a decoder: half of the layers on each of two devices."""
    rest = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": second}
    return rest | {f"model.layers.{i}": first if i < layers // 2 else second for i in range(layers)}


# ---- equal


def equal(machine: Machine) -> Iterator[Row]:
    """Each way to apply a plan, against the model on the CPU in float32: rounding is about 1e-6, TF32 is off."""
    with tempfile.TemporaryDirectory() as folder:
        for way, run in (
            ("placed on two devices", _placed), ("cut over two devices", _cut), ("offloaded to the CPU", _offloaded),
            ("offloaded to disk", _on_disk), ("loaded", _loaded), ("trained on two devices", _trained),
        ):  # fmt: skip
            torch.manual_seed(0)
            model, inputs = models(1)["decoder"]
            model.eval()
            with torch.no_grad():
                expected = first_tensor(model(**inputs))
            yield Row(part="equal", case=way, error=run(machine, model, inputs, expected, Path(folder) / way))
            gc.collect()


def _applied(machine: Machine, model: nn.Module, inputs: dict[str, Any], expected: torch.Tensor, plan: Any) -> float:
    autoshard.apply(model, plan)
    with torch.no_grad():
        return relative_error(first_tensor(model(**on_device(inputs, machine.home))), expected)


def _placed(machine: Machine, model: Any, inputs: Any, expected: torch.Tensor, folder: Path) -> float:
    return _applied(machine, model, inputs, expected, halves(8, machine.home, machine.other))


def _cut(machine: Machine, model: Any, inputs: Any, expected: torch.Tensor, folder: Path) -> float:
    devices = {machine.home: "1GiB", machine.other: "1GiB"}
    plan = autoshard.plan(model, devices, inputs=inputs, strategy="column-parallel")
    return _applied(machine, model, inputs, expected, plan)


def _streaming(machine: Machine, model: Any, store: str) -> autoshard.Plan:
    """Layers that are kept elsewhere and computed on the home device."""
    plan = autoshard.Plan.from_device_map(halves(8, machine.home, machine.home))
    return replace(plan, offloaded={f"model.layers.{index}": store for index in range(8)})


def _offloaded(machine: Machine, model: Any, inputs: Any, expected: torch.Tensor, folder: Path) -> float:
    return _applied(machine, model, inputs, expected, _streaming(machine, model, "cpu"))


def _on_disk(machine: Machine, model: Any, inputs: Any, expected: torch.Tensor, folder: Path) -> float:
    model.save_pretrained(folder)
    loaded = autoshard.load(folder, plan=_streaming(machine, model, "disk"), progress=False)
    with torch.no_grad():
        return relative_error(first_tensor(loaded(**on_device(inputs, machine.home))), expected)


def _loaded(machine: Machine, model: Any, inputs: Any, expected: torch.Tensor, folder: Path) -> float:
    model.save_pretrained(folder)
    loaded = autoshard.load(folder, {machine.home: "1GiB", machine.other: "1GiB"}, progress=False)
    with torch.no_grad():
        return relative_error(first_tensor(loaded(**on_device(inputs, machine.home))), expected)


def _trained(machine: Machine, model: Any, inputs: Any, expected: torch.Tensor, folder: Path) -> float:
    """Gradients of one step, of which each is compared."""
    labels = {**inputs, "labels": inputs["input_ids"]}
    model(**labels).loss.backward()
    whole = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    autoshard.apply(model, halves(8, machine.home, machine.other))
    model(**on_device(labels, machine.home)).loss.backward()
    return max(relative_error(one.grad.cpu(), whole[name]) for name, one in model.named_parameters())


# ---- memory


def memory(machine: Machine) -> Iterator[Row]:
    """The peak of the second of two runs, whole and split: the first makes what stays."""
    for name, (model, inputs) in models(machine.scale).items():
        for mode in ("inference", "training"):
            workload = autoshard.Workload(mode=mode)
            model.train(mode == "training")
            profile = autoshard.profile(model, inputs, workload=workload)
            room = 2 * profile.peak_bytes + 2**30
            for how, names in (("", (machine.home,)), (", split", (machine.home, machine.other))):
                devices = dict.fromkeys(names, room)
                plan = autoshard.plan(model, devices, inputs=inputs, workload=workload, strategy="balanced",
                                      objective="memory")  # fmt: skip
                device = autoshard.estimate(plan, profile).devices[0]
                autoshard.apply(model, plan)
                first = next(model.parameters()).device  # where the estimate has the inputs
                _run_twice(machine, model, on_device(inputs, first), mode == "training")
                measured = machine.peak_bytes()
                autoshard.remove(model)
                model.zero_grad(set_to_none=True)
                gc.collect()
                predicted = device.peak_bytes - device.overhead_bytes
                yield Row(part="memory", case=f"{name}, {mode}{how}", unit="bytes", predicted=predicted,
                          measured=measured)  # fmt: skip


def _run_twice(machine: Machine, model: nn.Module, inputs: dict[str, torch.Tensor], training: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters()) if training else None
    for _ in range(2):
        machine.reset_peak()
        if optimizer is None:
            with torch.no_grad():
                model(**inputs)
            continue
        optimizer.zero_grad(set_to_none=True)
        output = model(**inputs)
        training_loss(output, "model").backward()
        optimizer.step()
        del output


# ---- kernels


def kernels(machine: Machine) -> Iterator[Row]:
    """Kernels in bfloat16, op by op."""
    card = card_of(machine.cluster.devices[0])
    reached = efficiency_of(card.generation, "eager")
    share, shrink = Share(samples=1.0), 1 if machine.real else 32
    for m, n, k in PRODUCTS:
        m, n, k = (max(1, size // shrink) for size in (m, n, k))
        left, right = (torch.randn(*shape, dtype=torch.bfloat16, device=machine.home) for shape in ((m, k), (k, n)))
        moved = Volume(whole=2.0 * (m * k + k * n + m * n))
        product = Product(flops=2.0 * m * n * k, m=m, n=n, k=k, batch=False, cut="", experts=0,
                          weight_elements=k * n, moved=moved)  # fmt: skip
        yield Row(
            part="kernels", case=f"{m} x {k} by {k} x {n}", unit="s",
            predicted=product_seconds(product, share, card, reached, padded=False),
            measured=machine.seconds(lambda a=left, b=right: a @ b),
        )  # fmt: skip
    for batch, heads, tokens, width in ATTENTIONS:
        tokens = tokens // shrink
        q = torch.randn(3, batch, heads, tokens, width, dtype=torch.bfloat16, device=machine.home)
        elements = float(batch * heads * tokens * width)
        attention = Attention(flops=4 * elements * tokens, cut=False, causal=True, tokens=tokens, width=width,
                              cache_elements=2 * elements, moved=Volume(rows=8 * elements))  # fmt: skip
        yield Row(
            part="kernels", case=f"attention {batch} x {heads} x {tokens} x {width}", unit="s",
            predicted=attention_seconds(attention, share, Recipe(), card, reached)[0],
            measured=machine.seconds(lambda q=q: nn.functional.scaled_dot_product_attention(*q, is_causal=True)),
        )  # fmt: skip


# ---- runs


def runs(machine: Machine) -> Iterator[Row]:
    """A decoder of about a billion parameters (a toy on simulated devices), as a plan for one device prices it."""
    tokens, new, batch = (2048, 64, 8) if machine.real else (32, 4, 2)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2000 * machine.scale, hidden_size=256 * machine.scale, intermediate_size=704 * machine.scale,
        num_hidden_layers=16, num_attention_heads=2 * machine.scale, max_position_embeddings=2 * tokens,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, 2000, (batch, tokens))
    asked = autoshard.Workload(batch_size=batch, sequence_length=tokens, new_tokens=new)
    priced = {stack: _estimated(machine, model, asked, compiled=stack == "compiled") for stack in ("eager", "compiled")}
    trained = autoshard.Workload(mode="training", batch_size=batch, sequence_length=tokens)
    step = _estimated(machine, model, trained, precision="pure")
    model.eval().to(machine.home)
    there = ids.to(machine.home)
    settings = {"do_sample": False, "min_new_tokens": 1, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        first = machine.seconds(lambda: model.generate(there, max_new_tokens=1, **settings), 5)
        yield Row(part="runs", case=f"prompt of {batch} x {tokens}", unit="s",
                  predicted=priced["eager"].prompt_seconds, measured=first)  # fmt: skip
        for stack in ("eager", "compiled") if machine.real else ("eager",):
            more = {"cache_implementation": "static"} if stack == "compiled" else {}
            one = first if stack == "eager" else machine.seconds(
                lambda more=more: model.generate(there, max_new_tokens=2, **more, **settings), 3
            )  # fmt: skip
            many = machine.seconds(
                lambda more=more: model.generate(there, max_new_tokens=new + 2, **more, **settings), 3
            )
            each = (many - one) / (new + 1 if stack == "eager" else new)
            yield Row(part="runs", case=f"token, {stack}", unit="s", predicted=priced[stack].token_seconds,
                      measured=each)  # fmt: skip
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=machine.real)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=there, labels=there, use_cache=False).loss.backward()
        optimizer.step()

    measured = machine.seconds(train, 5)
    yield Row(part="runs", case="training step", unit="s", predicted=step.latency_seconds, measured=measured)


def _estimated(machine: Machine, model: nn.Module, workload: autoshard.Workload, **wishes: Any) -> autoshard.Estimate:
    if "precision" in wishes:
        wishes |= {"recompute": "none", "micro_batch": workload.batch_size}
    plan = autoshard.plan(model, machine.cluster, workload=workload, launch="processes", mesh="dp=1", **wishes)
    return autoshard.estimate(plan, autoshard.profile(model, workload=workload), machine.cluster)


# ---- links


def links(machine: Machine) -> Iterator[Row]:
    """Copies of large tensors between host and device."""
    nbytes = 1 << (28 if machine.real else 20)
    cluster = parse_devices({machine.home: "1GiB", machine.other: "1GiB"})
    for pinned in (False, True) if machine.real else (False,):
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        device = torch.empty(nbytes, dtype=torch.uint8, device=machine.home)
        for source, target, run in (
            (machine.other, machine.home, lambda h=host, d=device: d.copy_(h, non_blocking=True)),
            (machine.home, machine.other, lambda h=host, d=device: h.copy_(d, non_blocking=True)),
        ):
            seconds = cluster.link(source, target).seconds(nbytes)
            yield Row(
                part="links", case=f"{source} to {target}{', pinned' if pinned else ''}", unit="bytes/s",
                predicted=nbytes / seconds, measured=nbytes / machine.seconds(run),
            )  # fmt: skip


PARTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "equal": equal, "memory": memory, "kernels": kernels, "runs": runs, "links": links,
}  # fmt: skip


def run_parts(machine: Machine, names: list[str]) -> list[Row]:
    """Run some parts; what fails is a row, and the others go on."""
    rows: list[Row] = []
    for name in names:
        try:
            for row in PARTS[name](machine):
                print(line(row), flush=True)
                rows.append(row)
        except Exception as error:
            traceback.print_exc()
            rows.append(Row(part=name, case="stopped", failed=f"{type(error).__name__}: {error}"))
            print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """A row of the Markdown table."""
    if row.failed:
        return f"| {row.part} | {row.case} | {row.failed} | | |"
    if row.error is not None:
        return f"| {row.part} | {row.case} | | | error {row.error:.1e} |"
    return f"| {row.part} | {row.case} | {row.predicted:.4g} {row.unit} | {row.measured:.4g} | {row.ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--dry", action="store_true", help="small models on simulated devices")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        parser.error("there is no GPU here: run the same parts on simulated devices with --dry.")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print("| part | case | predicted | measured | ratio |\n|---|---|---:|---:|---:|")
    with autoshard.simulate("2x64GiB") if asked.dry else nullcontext() as devices:
        machine = Machine(home="cpu:0" if asked.dry else "cuda:0", other="cpu:1" if asked.dry else "cpu",
                          scale=1 if asked.dry else 8, devices=devices)  # fmt: skip
        rows = run_parts(machine, asked.only)
    if asked.output is not None:
        card = "simulated" if asked.dry else torch.cuda.get_device_name()
        found = {"torch": torch.__version__, "device": card, "rows": [asdict(row) for row in rows]}
        asked.output.write_text(json.dumps(found, indent=1) + "\n")
    failed = [row for row in rows if row.failed or (row.error is not None and not row.error < 1e-3)]
    raise SystemExit(f"{len(failed)} of {len(rows)} rows failed" if failed else 0)


if __name__ == "__main__":
    main()
