"""What random planned decoders cost, against the plain model and other libraries, in turns.

    python benchmarks/decoders.py overhead [--rounds N]
    python benchmarks/decoders.py tensor-parallel [--dtype float32] [--rounds 15] [--hidden 1024 --hidden 2048]
    python benchmarks/decoders.py loading [--layers 22] [--rounds 5] [--cold] [--folder DIR]
    python benchmarks/decoders.py offload [--rounds N] [--layers N] [--tokens N] [--folder DIR] [--quick]

"overhead": what runs around forwards, in one process and one thread. A decoder of 32 small layers; "one device" wraps
the forward of the root only; "two devices" that of every layer, and both names are the plain CPU, so nothing is copied.
Accelerate's dispatch_model runs on the same maps. "empty hooks" are ones that do nothing, on every wrapped module.

"tensor-parallel": two gloo ranks of one thread, each bound to a processor of its own, as launchers of ranks do (else
both are on one now and then), each with one random decoder: cut by autoshard's plan for the measured devices, by
`from_pretrained(tp_plan="auto")`, and whole, "alone" on rank 0 only, or "together" on both ranks at once: half of that
is the time of ideal halves.

    prefill    a forward of 128, or 512, tokens    decode    one token with a cache of 64, mean of 16 steps

"loading", "offload": a bfloat16 decoder (22 layers, 1.1 billion parameters) is saved once as safetensors. "warm": its
files are in the page cache before; "cold": they are dropped from it.

"loading": to CPU memory, every run in a process of its own, so that memory is fresh; the ways take turns. Where no
dtype changes both libraries only map the files. "with use": until every weight was used once, by a forward of 16
tokens. "processor": seconds of all cores until loaded, which say more on a busy machine.

"offload": in one process, one thread and in turns, passes of some tokens with all layers on disk, embedding and head in
memory (Accelerate not with --quick); "in memory" is what computing takes; "read" brings the bytes of the files into a
few small buffers, by four plain reads at a time. Printed are medians with quartiles and their ratio to the bound,
max(computing, reading) of the same run.
"""

import copy
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from common import decoder, device_map, print_header, print_row, run_command

import autoshard
from autoshard.cluster.calibrate import calibrate
from autoshard.cluster.files import write_cluster
from autoshard.cluster.parse import parse_devices
from autoshard.runtime.around import layers_of
from autoshard.runtime.dispatch import apply_plan

FOLDER = Path(tempfile.gettempdir()) / "autoshard-benchmarks"
"""Where checkpoints are written once."""
LAYERS = 32
TWO_DEVICES = device_map(["cpu:0"] * (LAYERS // 2) + ["cpu:1"] * (LAYERS // 2), "cpu:0", "cpu:1")
PROMPTS, CACHED, STEPS = (128, 512), 64, 16
CUT_LAYERS = {1024: 4, 2048: 2, 4096: 1}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""What rounding makes of the logits, as a part of the largest."""
NAMES = ("alone", "together", "tp_plan", "autoshard")


def take_turns(
    cases: Mapping[Any, Callable[[], object]], rounds: int, before: Callable[[Any], object] = lambda name: None
) -> dict[Any, list[float]]:
    """Seconds of each case in each round, after one that warms up.

    Each round begins with another case, so that a slow moment of the machine hits all. `before` isn't timed.
    """
    times: dict[Any, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for index in range(-1, rounds):
        turn = index % len(order)
        for name in order[turn:] + order[:turn]:
            before(name)
            start = time.perf_counter()
            cases[name]()
            if index >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def spread(found: list[float], unit: float = 1.0, places: int = 3) -> str:
    """The median with the quartiles, in a unit of so many seconds."""
    low, middle, high = (f"{one / unit:.{places}f}" for one in statistics.quantiles(found, n=4))
    return f"{middle} ({low} to {high})"


def ratio(found: list[float], other: list[float]) -> float:
    """The median of the ratios of the same round: drift of the machine cancels out."""
    return statistics.median(a / b for a, b in zip(found, other, strict=True))


def hooked(model: torch.nn.Module) -> list[str]:
    """The modules whose forward autoshard wraps."""
    return [path for path, module in model.named_modules() if layers_of(module)]


@torch.no_grad()
def overhead(rounds: int = 200) -> None:
    torch.set_num_threads(1)
    small = partial(decoder, 64, LAYERS, 256, kv_heads=4)
    models = {name: small() for name in ("plain", "plain again", "one device", "two devices", "empty hooks")}
    apply_plan(models["one device"], autoshard.Plan.from_device_map({"": "cpu:0"}))
    apply_plan(models["two devices"], autoshard.Plan.from_device_map(TWO_DEVICES))
    for path in hooked(models["two devices"]):
        module = models["empty hooks"].get_submodule(path)
        module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    for name, placed in (("accelerate, one", {"": "cpu"}), ("accelerate, two", dict.fromkeys(TWO_DEVICES, "cpu"))):
        models[name] = accelerate.dispatch_model(small(), placed, main_device="cpu", force_hooks=True)
    inputs = {"input_ids": prompt(16), "use_cache": False}
    times = take_turns({name: partial(model, **inputs) for name, model in models.items()}, rounds)
    print_header("", "ms", "ratio to the plain model", "wrapped modules")
    for name, found in times.items():
        print_row(name, spread(found, 1e-3, 2), f"{ratio(found, times['plain']):.3f}", len(hooked(models[name])))


def prompt(tokens: int) -> torch.Tensor:
    return torch.arange(tokens).reshape(1, tokens)


def decode(model: Any, cache: Any) -> None:
    """Some tokens after those of the cache, which is then as it was."""
    for step in range(STEPS):
        model(input_ids=prompt(CACHED)[:, step : step + 1], past_key_values=cache, use_cache=True)
    cache.crop(-STEPS)


def build(folder: str, dtype: str) -> dict[str, Any]:
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=getattr(torch, dtype))
    whole, ours = load().eval(), load().eval()
    inputs = {"input_ids": prompt(PROMPTS[0]), "use_cache": False}
    autoshard.apply(ours, f"{folder}/cluster.json", inputs=inputs, strategy="column-parallel")
    models = {"autoshard": ours, "tp_plan": load(tp_plan="auto").eval()}
    wanted = whole(**inputs).logits
    for name, model in models.items():
        off = (model(**inputs).logits - wanted).abs().max() / wanted.abs().max()
        assert off < TOLERANCE[dtype], f"{name} is off by {off:.1e}"
    return models | {"alone": whole, "together": whole}


def measure(models: dict[str, Any], rounds: int) -> None:
    """Run on this rank, and print what rank 0 found."""
    cases = {}
    for name in NAMES:
        model = models[name]
        for tokens in PROMPTS:
            cases[f"prefill of {tokens}", name] = partial(model, input_ids=prompt(tokens), use_cache=False)
        cache = model(input_ids=prompt(CACHED), use_cache=True).past_key_values
        cases["decode", name] = partial(decode, model, cache)
    if dist.get_rank():
        cases |= {key: lambda: None for key in cases if key[1] == "alone"}
    times = take_turns(cases, rounds, lambda key: dist.barrier())
    if dist.get_rank():
        return
    print_header("", *NAMES, "autoshard / tp_plan", "of ideal")
    for kind in dict.fromkeys(kind for kind, _ in cases):
        found = {name: [one / (STEPS if kind == "decode" else 1) for one in times[kind, name]] for name in NAMES}
        ideal = ratio(found["together"], found["autoshard"]) / 2
        cells = (f"{spread(found[name], 1e-3, 1)} ms" for name in NAMES)
        print_row(kind, *cells, f"{ratio(found['autoshard'], found['tp_plan']):.2f}", f"{ideal:.0%}")


@torch.no_grad()
def rank_main(rank: int, folder: str, dtype: str, rounds: int) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # with the threads of gloo, which are not made yet
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    measure(build(folder, dtype), rounds)
    dist.destroy_process_group()


def tensor_parallel(dtype: str = "float32", rounds: int = 15, hidden: list[int] = list(CUT_LAYERS)) -> None:  # noqa: B006
    torch.set_num_threads(1)
    cluster = calibrate(parse_devices({"cpu:0": "8GiB", "cpu:1": "8GiB"}))
    for size in hidden:
        layers = CUT_LAYERS.get(size, 1)
        print(f"hidden size {size:,}, {layers} layers, {dtype}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            transformers.set_seed(0)
            decoder(size, layers, 4096, kv_heads=size // 128, dtype=getattr(torch, dtype)).save_pretrained(folder)
            write_cluster(cluster, f"{folder}/cluster.json")
            torch.multiprocessing.spawn(rank_main, (folder, dtype, rounds), nprocs=2)


CHUNK_BYTES, READERS = 4 << 20, 4
load = partial(autoshard.load, devices="cpu", progress=False)
from_pretrained = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype="auto")
WAYS: dict[str, Callable[[Path], torch.nn.Module]] = {
    "autoshard.load": load,
    "from_pretrained": from_pretrained,
    "autoshard.load, float32": partial(load, dtype="float32"),
    "from_pretrained, float32": partial(from_pretrained, dtype=torch.float32),
}


def saved_decoder(folder: Path, layers: int) -> Path:
    """A directory with a bfloat16 decoder of 44 million parameters per layer, written at the first call."""
    folder = folder / str(layers)
    if not folder.exists():
        model = decoder(2048, layers, 32000, kv_heads=4, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="1GB")
    return folder


def drop_cache(folder: Path) -> None:
    """Drop all files of a folder from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_once(way: str, folder: Path, small: Path) -> tuple[float, float, float]:
    """Seconds, with the first forward, and of the processor; what libraries do at a first load only comes before.

    So does getting memory for all of it in float32, which takes some machines three times as long if it is fresh.
    """
    WAYS[way](small)
    torch.ones(sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2)
    begin, processor = time.perf_counter(), time.process_time()
    model = WAYS[way](folder)
    seconds, busy = time.perf_counter() - begin, time.process_time() - processor
    with torch.inference_mode():
        model(input_ids=torch.arange(16)[None])
    return seconds, time.perf_counter() - begin, busy


def loading(layers: int = 22, rounds: int = 5, cold: bool = False, folder: Path = FOLDER) -> None:
    small, large = saved_decoder(folder, 1), saved_decoder(folder, layers)
    prepare = partial(drop_cache, large) if cold else read_all(large)
    runs: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            prepare()
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                runs[way].append(process.submit(run_once, way, large, small).result())
    print_header("cold" if cold else "warm", "seconds", "with use", "processor")
    for way, found in runs.items():
        columns = (sorted(column) for column in zip(*found, strict=True))
        print_row(way, *(f"{statistics.median(one):.2f} ({one[0]:.2f} to {one[-1]:.2f})" for one in columns))


def read_all(directory: Path) -> Callable[[], object]:
    """Return a function that reads all files, a part at a time for each of a few threads, and keeps nothing.

    A buffer of its own would be fresh memory for each, which costs more than reading.
    """
    files = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in directory.glob("*.safetensors")]
    parts = [(file, start) for file, size in files for start in range(0, size, CHUNK_BYTES)]
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(READERS)]

    def read_one(part: tuple[int, int]) -> None:
        buffer = buffers.pop()
        os.preadv(part[0], [buffer], part[1])
        buffers.append(buffer)

    threads = ThreadPoolExecutor(READERS)
    return lambda: list(threads.map(read_one, parts))


@torch.no_grad()
def offload(rounds: int = 9, layers: int = 22, tokens: int = 16, quick: bool = False, folder: Path = FOLDER) -> None:
    torch.set_num_threads(1)
    directory = saved_decoder(folder, layers)
    drop_cache(directory)  # who has just written a file has it in memory in small pages
    inputs = {"input_ids": torch.arange(tokens)[None], "use_cache": False}
    # in memory of its own: a file that is mapped anywhere stays in the page cache
    plain = load(directory, mapped=False)
    placed = device_map(["disk"] * layers, "cpu", "cpu")
    models = {"autoshard disk": autoshard.load(directory, plan=autoshard.Plan.from_device_map(placed), progress=False)}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not quick:
            models["accelerate disk"] = accelerate.dispatch_model(copy.deepcopy(plain), placed, offload_dir=scratch)
        for name, model in models.items():
            assert torch.equal(plain(**inputs).logits, model(**inputs).logits), f"{name}: other logits"
        read = read_all(directory)
        cases: dict[str, Callable[[], object]] = {"in memory": partial(plain, **inputs)}
        for state in ("warm", "cold"):
            cases[f"read, {state}"] = read
            cases |= {f"{name}, {state}": partial(model, **inputs) for name, model in models.items()}

        def prepare(name: str) -> None:
            if name.endswith("warm"):
                read()
            elif name.endswith("cold"):
                drop_cache(directory)
                drop_cache(Path(scratch))

        times = take_turns(cases, rounds, prepare)
    middle = {name: statistics.median(found) for name, found in times.items()}
    print_header("", "seconds per pass", "over the bound")
    for name, found in times.items():
        bound = max(middle["in memory"], middle["read, cold" if name.endswith("cold") else "read, warm"])
        print_row(name, spread(found), f"{middle[name] / bound:.2f}")


if __name__ == "__main__":
    run_command(__doc__, overhead, tensor_parallel, loading, offload)
