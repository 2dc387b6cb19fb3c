"""What loading.py compares: ways of loading a checkpoint, each run once in a process of its own, and what it cost."""

import gc
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autoshard.checkpoint.data import Entry

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "dtype": "bfloat16",
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip

WIDE = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LARGE_GIGABYTES = 4
LAYER_PARAMETERS = {2048: 44_044_288, 8192: 855_654_400}


def sized(gigabytes: float) -> dict:
    """Return the configuration of a decoder of about this size; of a large one the layers are wide."""
    config = CONFIG | (WIDE if gigabytes >= LARGE_GIGABYTES else {})
    width = config["hidden_size"]
    layers = round((gigabytes * 1e9 / 2 - 2 * config["vocab_size"] * width) / LAYER_PARAMETERS[width])
    return config | {"num_hidden_layers": max(1, layers)}


def make_checkpoint(folder: Path, config: dict) -> None:
    """Write a decoder with random weights, a file per gigabyte, without ever holding more than one of them.

    Large matrices repeat the same few numbers, for nothing here depends on them and drawing takes minutes.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    state, files, size = model.state_dict(), [{}], 0
    for name, tensor in state.items():
        if size > 1e9:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.numel() * 2
    index = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file({name: tensor_of(tensor.shape) for name, tensor in names.items()}, folder / file)
        index |= dict.fromkeys(names, file)
    total = sum(tensor.numel() * 2 for tensor in state.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )


def tensor_of(shape: torch.Size) -> torch.Tensor:
    drawn = torch.randn(min(shape.numel(), 1 << 22)).mul_(0.02).bfloat16()
    return drawn.repeat(-(-shape.numel() // len(drawn)))[: shape.numel()].view(shape)


def raw_memcpy(folder: Path) -> object:
    """Copy warm memory into fresh memory: what filling a model costs at least, in ordinary pages."""
    source = torch.zeros(64 << 20, dtype=torch.uint8)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    sizes = [len(source)] * (size // len(source)) + [size % len(source)]
    return timed(lambda: [torch.empty(size, dtype=torch.uint8).copy_(source[:size]) for size in sizes])


def raw_read(folder: Path) -> object:
    """Read the files from begin to end into one buffer."""
    buffer = memoryview(bytearray(16 << 20))

    def read() -> None:
        for file in sorted(folder.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    return timed(read)


def raw_direct(folder: Path) -> object:
    """Read the files from begin to end past the page cache: what the disk gives."""
    buffer = mmap.mmap(-1, 16 << 20)

    def read() -> None:
        for file in sorted(folder.glob("*.safetensors")):
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            position, size = 0, file.stat().st_size
            while position < size:
                position += os.preadv(descriptor, [buffer], position)
            os.close(descriptor)

    return timed(read)


def autoshard_load(folder: Path, dtype: object = "auto", mapped: bool = True) -> object:
    import autoshard

    warm_up()
    return timed(lambda: autoshard.load(folder, "cpu", dtype=dtype, mapped=mapped, progress=lambda done, total: None))


def autoshard_read(folder: Path) -> object:
    """Only the reading: every tensor of the files into memory of its own."""
    from autoshard.checkpoint.data import Target
    from autoshard.checkpoint.memory import allocate

    def read() -> object:
        checkpoint, sources = described(folder)
        tensors = {name: allocate(source.shape, source.dtype) for name, source in sources.items()}
        read_into(checkpoint, sources, [Target(source=name, tensor=tensor) for name, tensor in tensors.items()])
        return tensors

    from autoshard.checkpoint.reading import read_into

    return timed(read)


def autoshard_cut(folder: Path, dim: int, ranks: int) -> object:
    """Only the reading: one rank's equal part of every matrix, rows (dim 0) or columns (dim 1)."""
    from autoshard.checkpoint.data import Target
    from autoshard.checkpoint.memory import allocate
    from autoshard.checkpoint.reading import read_into

    gc.collect()  # not in one of them and in the other not

    def read() -> object:
        checkpoint, sources = described(folder)
        targets = []
        for name, source in sources.items():
            if len(source.shape) == 2:
                shape = list(source.shape)
                shape[dim] //= ranks
                runs = ((shape[dim], 2 * shape[dim]),)
                tensor = allocate(tuple(shape), source.dtype)
                targets.append(Target(source=name, tensor=tensor, dim=dim, runs=runs))
        read_into(checkpoint, sources, targets)
        return targets

    return timed(read)


def raw_columns(folder: Path, ranks: int) -> object:
    """What a plain program does: map the files, copy one rank's columns out of the mapping, with a thread per core."""
    from autoshard.checkpoint.header import open_checkpoint

    def columns(entry: "Entry", file: mmap.mmap) -> torch.Tensor:
        width = entry.shape[1] // ranks
        data = torch.frombuffer(file, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        return data.view(entry.dtype).view(entry.shape).narrow(1, width, width).contiguous()

    def read() -> object:
        checkpoint, files = open_checkpoint(folder), {}
        for path in checkpoint.files:
            with open(path, "rb") as opened:
                files[path] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        entries = [entry for entry in checkpoint.entries.values() if len(entry.shape) == 2]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [*pool.map(columns, entries, [files[entry.file] for entry in entries])]

    return timed(read)


def described(folder: Path) -> tuple:
    from autoshard.checkpoint.data import Piece, Source
    from autoshard.checkpoint.header import open_checkpoint

    checkpoint = open_checkpoint(folder)
    return checkpoint, {
        name: Source(shape=entry.shape, dtype=entry.dtype, pieces=(Piece(entry=name),))
        for name, entry in checkpoint.entries.items()
    }


def warm_up() -> None:
    """Import what either library imports only at the first load: load a model of a few KB with both."""
    import autoshard

    with tempfile.TemporaryDirectory() as name:
        small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
        make_checkpoint(Path(name) / "x", CONFIG | small | {"num_attention_heads": 1, "num_key_value_heads": 1})
        autoshard.load(Path(name) / "x", "cpu", progress=lambda done, total: None)
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(Path(name) / "x", dtype="auto")


def from_pretrained(folder: Path, dtype: object = "auto") -> object:
    from transformers import AutoModelForCausalLM

    warm_up()
    return timed(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


def accelerate_load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> object:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    warm_up()
    return timed(lambda: load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}, dtype=dtype))


def load_file(folder: Path) -> object:
    """The safetensors library, in memory of its own: as it is, it only maps the file, and nothing is read."""
    from safetensors.torch import load_file as load

    def read() -> object:
        return [{n: t.clone() for n, t in load(file).items()} for file in sorted(folder.glob("*.safetensors"))]

    return timed(read)


WAYS: dict[str, Callable[[Path], object]] = {
    "raw memcpy into fresh memory": raw_memcpy,
    "raw sequential read": raw_read,
    "raw direct read": raw_direct,
    "autoshard.load": autoshard_load,
    "autoshard.load, copied": lambda folder: autoshard_load(folder, mapped=False),
    "autoshard, reading only": autoshard_read,
    "from_pretrained": from_pretrained,
    "load_checkpoint_and_dispatch": accelerate_load,
    "safetensors.load_file and clone": load_file,
    "autoshard.load, float32": lambda folder: autoshard_load(folder, torch.float32),
    "from_pretrained, float32": lambda folder: from_pretrained(folder, torch.float32),
    "load_…_dispatch, float32": lambda folder: accelerate_load(folder, torch.float32),
    "raw columns of 1 of 2 ranks": lambda folder: raw_columns(folder, 2),
    "raw columns of 1 of 8 ranks": lambda folder: raw_columns(folder, 8),
    "autoshard, rows of 1 of 2 ranks": lambda folder: autoshard_cut(folder, 0, 2),
    "autoshard, columns of 1 of 2 ranks": lambda folder: autoshard_cut(folder, 1, 2),
    "autoshard, rows of 1 of 8 ranks": lambda folder: autoshard_cut(folder, 0, 8),
    "autoshard, columns of 1 of 8 ranks": lambda folder: autoshard_cut(folder, 1, 8),
}


def timed(work: Callable[[], object]) -> dict:
    """Run once; return seconds, bytes and memory, and the seconds until every weight was used.

    Libraries that only map the files have read nothing yet when they say that they are done.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before, resident = counters(), memory("VmRSS")
    begin, begin_processor = time.perf_counter(), time.process_time()
    result = work()
    loaded, processor = time.perf_counter(), time.process_time() - begin_processor
    after, peak = counters(), memory("VmHWM")
    kept = memory("RssAnon")
    use(result)
    used = time.perf_counter()
    del result
    gc.collect()
    return {
        "seconds": loaded - begin, "used": used - begin, "processor": processor,
        "asked": after["rchar"] - before["rchar"], "disk": after["read_bytes"] - before["read_bytes"],
        "peak": peak - resident, "kept": kept - memory("RssAnon"),
    }  # fmt: skip


def use(result: object) -> None:
    if isinstance(result, torch.nn.Module):
        with torch.inference_mode():
            result(input_ids=torch.arange(16)[None])
        return
    for tensor in tensors_of(result):
        tensor.detach().reshape(-1).view(torch.uint8)[::4096].sum()


def tensors_of(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.nn.Module):
        return [*result.parameters()]
    if isinstance(result, dict):
        return [value for value in result.values() if isinstance(value, torch.Tensor)]
    if isinstance(result, list):
        return [tensor for part in result for tensor in tensors_of(part)]
    return [result] if isinstance(result, torch.Tensor) else []


def counters() -> dict[str, int]:
    return {
        key: int(value) for key, value in (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    }


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(key))
    return int(line.split()[1]) * 1024
