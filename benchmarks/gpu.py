"""Everything that only a GPU can show, in one run: is it equal, and do predictions agree with what is measured?

    python benchmarks/gpu.py -o results.json          one GPU, about 15 minutes; nothing is downloaded
    python benchmarks/gpu.py --dry -o results.json    the same parts with small models on simulated devices

Parts (choose some with --only), each with a predicted and a measured figure and their ratio, or with an error:

    equal     placement on GPU and CPU, a cut over both, offload to CPU and to disk, loading: largest relative error
    memory    eight models, inference and training: bytes against those that the allocator counted
    kernels   seconds of matrix products and attention
    runs      of a decoder's prompt, its tokens (op by op, and compiled with CUDA graphs), a training step
    links     bytes per second between host and GPU, pinned and not, against what is assumed
"""

import gc
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from common import decoder, device_map, print_header, print_row, run_command
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import autoshard
from autoshard.capture.backward import training_loss
from autoshard.cluster.parse import parse_devices
from autoshard.engine.efficiency import efficiency_of
from autoshard.engine.local import Attention, Product, Share, Volume
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import attention_seconds, card_of, product_seconds
from autoshard.runtime.hooks import to_device

PRODUCTS = ((8192, 4096, 4096), (8192, 14336, 4096), (2048, 4096, 4096), (512, 4096, 4096), (64, 4096, 14336),
            (1, 4096, 4096), (8192, 128256, 4096))  # fmt: skip
"""m, n and k of matrix products: those of decoders, with many rows and with few."""
ATTENTIONS = ((1, 32, 8192, 128), (4, 32, 2048, 128), (16, 16, 512, 64))
"""Batch, heads, tokens and columns of a head of causal attention."""


@dataclass(frozen=True, slots=True)
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


class Machine:
    """What is measured on: a GPU and the CPU beside it, or two simulated devices; `home` computes.

    `scale`: how many times as wide as the smallest the models are. `cluster`: `home`, as a plan knows it.
    """

    def __init__(self, devices: Any = None) -> None:
        self.devices, self.real = devices, devices is None
        self.home, self.other, self.scale = ("cuda:0", "cpu", 8) if self.real else ("cpu:0", "cpu:1", 1)
        self.cluster = parse_devices("auto" if self.real else "1x64GiB")

    def seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """The mean of repeated runs, after two that warm up; the device is waited for."""
        return Timer("run()", globals={"run": run}).timeit(repeats).mean

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most bytes of tensors during the second of two runs: the first makes what stays."""
        reset = torch.cuda.reset_peak_memory_stats if self.real else self.devices.reset_peak
        run()
        reset()
        run()
        return torch.cuda.max_memory_allocated() if self.real else self.devices.memory(self.home)[1]


def models(scale: int) -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    """Eight kinds of models with inputs."""
    sizes = {
        "vocab_size": 4000 * scale, "hidden_size": 128 * scale, "intermediate_size": 352 * scale,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=4000 * scale, d_model=128 * scale, d_kv=16 * scale, d_ff=352 * scale, num_layers=4, num_heads=8,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 4000, (2, 256))
    text, pair = {"input_ids": ids, "use_cache": False}, {"decoder_input_ids": ids[:, :64]}
    vit = transformers.ViTConfig(**sizes, image_size=64, patch_size=8)
    auto, width, eight = transformers.AutoModelForCausalLM.from_config, 256 * scale, range(8)

    def convolution(index: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(32 if index else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())

    return {
        "decoder": lambda: (auto(transformers.LlamaConfig(**sizes)), text),
        "decoder, tied": lambda: (auto(transformers.Qwen2Config(**sizes, tie_word_embeddings=True)), text),
        "mixture of experts": lambda: (auto(transformers.MixtralConfig(**sizes, num_local_experts=4)), text),
        "encoder": lambda: (transformers.AutoModel.from_config(transformers.BertConfig(**sizes)), {"input_ids": ids}),
        "encoder-decoder": lambda: (transformers.T5ForConditionalGeneration(t5), text | pair),
        "vision": lambda: (transformers.ViTForImageClassification(vit), {"pixel_values": torch.randn(8, 3, 64, 64)}),
        "convolutions": lambda: (nn.Sequential(*map(convolution, eight)), {"input": torch.randn(8, 3, 64, 64)}),
        "linear layers": lambda: (
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in eight)),
            {"input": torch.randn(64, width)},
        ),
    }


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest number."""
    return float((found.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def backward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    """Make gradients, and return the output."""
    model.zero_grad(set_to_none=True)
    output = model(**inputs)
    training_loss(output, "model").backward()
    return output


def equal(machine: Machine) -> Iterator[Row]:
    """Each way to apply a plan, against the model on the CPU in float32: rounding is about 1e-6, TF32 is off."""
    home, other = machine.home, machine.other
    sizes, split = {home: "1GiB", other: "1GiB"}, device_map([home] * 4 + [other] * 4, home, other)
    disk = autoshard.Plan.from_device_map(device_map(["disk"] * 8, home, home))
    cpu = replace(disk, offloaded=dict.fromkeys(disk.offloaded, "cpu"))
    ways: dict[str, Callable[[nn.Module, str], nn.Module]] = {
        "placed on two devices": lambda model, folder: autoshard.apply(model, split),
        "cut over two devices": lambda model, folder: autoshard.apply(
            model, sizes, inputs=models(1)["decoder"]()[1], strategy="column-parallel"
        ),
        "offloaded to the CPU": lambda model, folder: autoshard.apply(model, cpu),
        "offloaded to disk": lambda model, folder: autoshard.load(folder, plan=disk, progress=False),
        "loaded": lambda model, folder: autoshard.load(folder, sizes, progress=False),
    }
    for way, run in ways.items():
        torch.manual_seed(0)
        model, inputs = models(1)["decoder"]()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.save_pretrained(folder)
            expected = model.eval()(**inputs).logits
            found = run(model, folder)(**to_device(inputs, torch.device(home))).logits
            yield Row("equal", way, error=relative_error(found, expected))
    model, inputs = models(1)["decoder"]()
    inputs["labels"] = inputs["input_ids"]
    backward(model, inputs)
    gradients = {name: one.grad for name, one in model.named_parameters()}
    backward(autoshard.apply(model, split), to_device(inputs, torch.device(home)))
    errors = (relative_error(one.grad, gradients[name]) for name, one in model.named_parameters())
    yield Row("equal", "trained on two devices", error=max(errors))


def memory(machine: Machine) -> Iterator[Row]:
    """The peak of a run, whole and split over two devices."""
    gc.collect()
    for name, make in models(machine.scale).items():
        model, inputs = make()
        for mode in ("inference", "training"):
            workload = autoshard.Workload(mode=mode)
            model.train(mode == "training")
            profile = autoshard.profile(model, inputs, workload=workload)
            for how, names in (("", (machine.home,)), (", split", (machine.home, machine.other))):
                plan = autoshard.plan(
                    model, dict.fromkeys(names, 2 * profile.peak_bytes + 2**30), inputs=inputs, workload=workload,
                    strategy="balanced", objective="memory",
                )  # fmt: skip
                device = autoshard.estimate(plan, profile).devices[0]
                autoshard.apply(model, plan)
                first = next(model.parameters()).device  # where the estimate has the inputs
                measured = machine.peak_bytes(pass_of(model, to_device(inputs, first), mode))
                autoshard.remove(model)
                model.zero_grad(set_to_none=True)
                gc.collect()
                predicted = device.peak_bytes - device.overhead_bytes
                yield Row("memory", f"{name}, {mode}{how}", "bytes", predicted, measured)


def pass_of(model: nn.Module, inputs: dict[str, torch.Tensor], mode: str, **settings: Any) -> Callable[[], object]:
    """A function that computes once, or trains a step with AdamW."""
    if mode == "inference":
        return torch.no_grad()(partial(model, **inputs))
    optimizer = torch.optim.AdamW(model.parameters(), **settings)

    def step() -> None:
        output = backward(model, inputs)
        optimizer.step()
        del output  # a training loop has it until then

    return step


def kernels(machine: Machine) -> Iterator[Row]:
    """Kernels in bfloat16, op by op."""
    card = card_of(machine.cluster.devices[0])
    reached = efficiency_of(card.generation, "eager")
    share, shrink = Share(samples=1.0), 1 if machine.real else 32
    make = partial(torch.randn, dtype=torch.bfloat16, device=machine.home)
    for sizes in PRODUCTS:
        m, n, k = (max(1, size // shrink) for size in sizes)
        moved = Volume(whole=2.0 * (m * k + k * n + m * n))
        product = Product(flops=2.0 * m * n * k, m=m, n=n, k=k, batch=False, cut="", experts=0,
                          weight_elements=k * n, frozen=False, moved=moved)  # fmt: skip
        predicted = product_seconds(product, share, card, reached, padded=False)
        measured = machine.seconds(partial(torch.mm, make(m, k), make(k, n)))
        yield Row("kernels", f"{m} x {k} by {k} x {n}", "s", predicted, measured)
    for batch, heads, tokens, width in ATTENTIONS:
        tokens //= shrink
        elements = float(batch * heads * tokens * width)
        attention = Attention(flops=4 * elements * tokens, cut=False, causal=True, drops=False, width=width,
                              keys=(), moved=Volume(rows=8 * elements))  # fmt: skip
        predicted, _ = attention_seconds(attention, share, Recipe(), card, reached)
        run = partial(scaled_dot_product_attention, *make(3, batch, heads, tokens, width), is_causal=True)
        yield Row("kernels", f"attention {batch} x {heads} x {tokens} x {width}", "s", predicted, machine.seconds(run))


def runs(machine: Machine) -> Iterator[Row]:
    """A decoder of about a billion parameters (a toy on simulated devices), as a plan for one device prices it."""
    tokens, new, batch = (2048, 64, 8) if machine.real else (32, 4, 2)
    torch.manual_seed(0)
    width = 256 * machine.scale
    model = decoder(width, 16, 2000 * machine.scale, kv_heads=max(4, width // 64), dtype=torch.bfloat16)
    asked = autoshard.Workload(batch_size=batch, sequence_length=tokens, new_tokens=new)
    priced = {compiled: _estimated(machine, model, asked, compiled=compiled) for compiled in (False, True)}
    trained = replace(asked, mode="training", new_tokens=0)
    step = _estimated(machine, model, trained, precision="pure", recompute="none", micro_batch=batch)
    model.eval().to(machine.home)
    ids = torch.randint(0, 2000, (batch, tokens), device=machine.home)

    def generate(count: int, repeats: int, **more: Any) -> float:
        call = partial(model.generate, ids, max_new_tokens=count, do_sample=False, min_new_tokens=1, pad_token_id=0,
                       eos_token_id=None, **more)  # fmt: skip
        return machine.seconds(call, repeats)

    with torch.no_grad():
        first = generate(1, 5)
        yield Row("runs", f"prompt of {batch} x {tokens}", "s", priced[False].prompt_seconds, first)
        each = (generate(new + 1, 3) - first) / new
        yield Row("runs", "token, eager", "s", priced[False].token_seconds, each)
        if machine.real:
            two, many = (generate(count, 3, cache_implementation="static") for count in (2, new + 2))
            yield Row("runs", "token, compiled", "s", priced[True].token_seconds, (many - two) / new)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    train = pass_of(model.train(), inputs, "training", fused=machine.real)
    yield Row("runs", "training step", "s", step.latency_seconds, machine.seconds(train, 5))


def _estimated(machine: Machine, model: nn.Module, workload: autoshard.Workload, **wishes: Any) -> autoshard.Estimate:
    plan = autoshard.plan(model, machine.cluster, workload=workload, launch="processes", mesh="dp=1", **wishes)
    return autoshard.estimate(plan, autoshard.profile(model, workload=workload), machine.cluster)


def links(machine: Machine) -> Iterator[Row]:
    """Copies of large tensors between host and device."""
    nbytes = 1 << (28 if machine.real else 20)
    home, other = machine.home, machine.other
    cluster = parse_devices({home: "1GiB", other: "1GiB"})
    for pinned in (False, True) if machine.real else (False,):
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        device = torch.empty(nbytes, dtype=torch.uint8, device=home)
        for source, target, to, of in ((other, home, device, host), (home, other, host, device)):
            case, seconds = f"{source} to {target}{', pinned' * pinned}", cluster.link(source, target).seconds(nbytes)
            measured = machine.seconds(partial(to.copy_, of, non_blocking=True))
            yield Row("links", case, "bytes/s", nbytes / seconds, nbytes / measured)


PARTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "equal": equal, "memory": memory, "kernels": kernels, "runs": runs, "links": links,
}  # fmt: skip


def run_parts(machine: Machine, names: Sequence[str]) -> list[Row]:
    """Run some parts and print their rows; what fails is a row, and the others go on."""
    rows: list[Row] = []
    print_header("part", "case", "predicted", "measured", "ratio")
    for name in names:
        try:
            for row in PARTS[name](machine):
                rows.append(row)
                ratio = f"{row.ratio:.2f}" if row.error is None else f"error {row.error:.1e}"
                figures = (f"{row.predicted:.4g} {row.unit}", f"{row.measured:.4g}") if row.error is None else ("", "")
                print_row(name, row.case, *figures, ratio)
        except Exception as error:
            traceback.print_exc()
            rows.append(Row(name, "stopped", failed=f"{type(error).__name__}: {error}"))
            print_row(name, "stopped", rows[-1].failed, "", "")
    return rows


def main(
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None, dry: bool = False,
    only: list[str] = list(PARTS),  # noqa: B006
) -> None:  # fmt: skip
    if not dry and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: run the same parts on simulated devices with --dry.")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with autoshard.simulate("2x64GiB") if dry else nullcontext() as devices:
        rows = run_parts(Machine(devices), only)
    if output is not None:
        card = "simulated" if dry else torch.cuda.get_device_name()
        found = {"torch": torch.__version__, "device": card, "rows": [asdict(row) for row in rows]}
        output.write_text(json.dumps(found, indent=1) + "\n")
    failed = [row for row in rows if row.failed or (row.error is not None and not row.error < 1e-3)]
    raise SystemExit(f"{len(failed)} of {len(rows)} rows failed" if failed else 0)


if __name__ == "__main__":
    run_command(__doc__, main)
