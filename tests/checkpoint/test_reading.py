"""What is read into targets equals what the safetensors library loads, and every byte is read once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from autoshard.checkpoint.boxes import Box
from autoshard.checkpoint.data import Checkpoint, Source, whole_entry
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.reading import read_into
from autoshard.checkpoint.traced import leaf, traced
from autoshard.common.progress import watched_by
from autoshard.errors import CheckpointError
from autoshard.runtime.pinned import Uploads


def plain(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> dict[str, Source]:
    """Sources of a model that is exactly its checkpoint."""
    return {name: whole_entry(entry, dtype) for name, entry in checkpoint.entries.items()}


def empty(source: Source, device: str = "cpu") -> torch.Tensor:
    """Memory for a source with bytes that are not those of any weight."""
    return torch.full(source.shape, 77, dtype=torch.float32).to(source.dtype).to(device)


def write(path: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file(tensors, path)
    return open_checkpoint(path)


def test_all_dtypes_arrive_bit_for_bit(tmp_path):
    bits = torch.randint(0, 255, (6, 8), dtype=torch.uint8)
    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
    tensors = {str(dtype): bits.clone().view(dtype) for dtype in dtypes}
    tensors |= {"bool": bits > 100, "scalar": torch.tensor(3.5)}
    checkpoint = write(tmp_path / "model.safetensors", **tensors, none=torch.zeros(0, 3))
    sources = plain(checkpoint)
    found = [{name: empty(source) for name, source in sources.items()} for _ in range(2)]
    report = read_into(checkpoint, sources, [(name, Box(one[name])) for one in found for name in one])
    assert report == sum(entry.nbytes for entry in checkpoint.entries.values())
    for name, value in tensors.items():
        assert (checkpoint.entries[name].dtype, checkpoint.entries[name].shape) == (value.dtype, tuple(value.shape))
        for one in found:
            assert torch.equal(one[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def test_tensors_at_odd_places_of_a_file_arrive(tmp_path):
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    data = bytes([7]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    checkpoint = open_checkpoint(tmp_path)
    targets = [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    read_into(checkpoint, plain(checkpoint), [("b", Box(tensor)) for tensor in targets])
    assert all(tensor.tolist() == [1.5, -2.0] for tensor in targets)


def test_boxes_are_cast_and_read_once(tmp_path):
    value = torch.randn(24, 70).to(torch.bfloat16)
    checkpoint = write(tmp_path / "m.safetensors", pad=torch.zeros(3), w=value)
    for dtype in (torch.float32, torch.float16, torch.int8):
        whole = torch.full((24, 70), 77, dtype=dtype)
        boxes = [("w", Box(whole[4 * i : 4 * i + 4, 30:], (4 * i, 30))) for i in range(1, 4)]
        twice = ("w", Box(torch.empty(4, 40, dtype=dtype), (4, 30)))
        report = read_into(checkpoint, plain(checkpoint, dtype), [*boxes, twice])
        assert torch.equal(whole[4:16, 30:], value.to(dtype)[4:16, 30:]) and (whole[:4] == 77).all()
        assert torch.equal(twice[1].value, whole[4:8, 30:])
        assert report == 12 * 40 * 2


def test_fused_tensors_are_read_from_many(tmp_path):
    parts = {f"{kind}.{i}": torch.randn(5, 4) for i in range(3) for kind in ("gate", "up")}
    checkpoint = write(tmp_path / "m.safetensors", **parts)

    def fused(tensors):
        stacks = [torch.stack([tensors[f"{kind}.{i}"] for i in range(3)]) for kind in ("gate", "up")]
        return torch.cat(stacks, dim=1).transpose(1, 2)

    made = fused({name: traced(leaf(name, (5, 4), torch.float32)) for name in parts}).expression
    sources = {"fused": Source(shape=(3, 4, 10), dtype=torch.float32, made=made)}
    whole, part = torch.empty(3, 4, 10), torch.empty(1, 4, 3)
    targets = [("fused", Box(whole)), ("fused", Box(part, (2, 0, 4)))]
    assert read_into(checkpoint, sources, targets) == 6 * 80
    assert torch.equal(whole, fused(parts)) and torch.equal(part, whole[2:, :, 4:7])


def test_a_file_that_changes_or_goes_is_named(tmp_path):
    file = tmp_path / "m.safetensors"
    checkpoint = write(file, w=torch.randn(400, 128))
    target = ("w", Box(torch.empty(400, 128)))
    touch = watched_by(lambda *_: os.utime(file, ns=(5, 5)))
    with pytest.raises(CheckpointError, match="was changed while it was read"), touch:
        read_into(checkpoint, plain(checkpoint), [target])
    os.truncate(file, 60_000)
    with pytest.raises(CheckpointError, match=r"m\.safetensors became shorter"):
        read_into(checkpoint, plain(checkpoint), [target])
    file.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*m\.safetensors: No such file"):
        read_into(checkpoint, plain(checkpoint), [target])


def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path):
    checkpoint = write(tmp_path / "m.safetensors", w=torch.ones(4, 6))
    other = {"w": Source(shape=(4, 6), dtype=torch.float32, made=leaf("v", (4, 6), torch.float32))}
    wrong = [
        (other, ("w", Box(torch.zeros(4, 6))), "no tensor 'v'"),
        (plain(checkpoint), ("w", Box(torch.zeros(6, 4))), "no box"),
        (plain(checkpoint), ("w", Box(torch.zeros(4, 5))), "needs the shape"),
        (plain(checkpoint), ("w", Box(torch.zeros(4, 2), (0, 5))), r"no box of \[4, 2\] at"),
        (plain(checkpoint), ("w", Box(torch.zeros(4, 6, device="meta"))), "no memory"),
    ]
    for sources, target, problem in wrong:
        with pytest.raises(CheckpointError, match=problem):
            read_into(checkpoint, sources, [target])
        assert target[1].value.is_meta or not target[1].value.any()


def test_progress_ends_at_the_total_and_an_interrupt_stops_the_readers(tmp_path, monkeypatch):
    checkpoint = write(tmp_path / "m.safetensors", w=torch.ones(1 << 20), v=torch.ones(3))
    seen: list[tuple[str, int, int | None]] = []
    targets = [(name, Box(empty(source))) for name, source in plain(checkpoint).items()]
    with watched_by(lambda *told: seen.append(told)):
        read_into(checkpoint, plain(checkpoint), targets)
    total = (1 << 22) + 12
    assert seen[-1] == ("bytes", total, total) and seen == sorted(seen)

    def interrupt(unit: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    finished = []  # copies that are on their way are waited for: whoever catches this may free the targets
    monkeypatch.setattr(Uploads, "finish", lambda uploads: finished.append(uploads))
    with pytest.raises(KeyboardInterrupt), watched_by(interrupt):
        read_into(checkpoint, plain(checkpoint), targets)
    assert len(finished) == 1


MEASURED = """
import sys, torch
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.boxes import Box
from autoshard.checkpoint.data import whole_entry
from autoshard.checkpoint.reading import read_into

def counters():
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024, int(status["VmRSS"].split()[0]) * 1024

checkpoint = open_checkpoint(sys.argv[1])
for dtype in (torch.bfloat16, torch.float32):
    sources = {n: whole_entry(e, dtype) for n, e in checkpoint.entries.items()}
    tensors = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in sources.items()}
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak
    _, before = counters()
    read_into(checkpoint, sources, [(n, Box(t)) for n, t in tensors.items()])
    peak, _ = counters()
    print(peak - before - sum(t.nbytes for t in tensors.values()))
    tensors.clear()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_beyond_the_model(tmp_path):
    """As the system counts it, in a process of its own: little more than the model has."""
    tensors = {f"w{i}": torch.full((1 << 19, 12), float(i), dtype=torch.bfloat16) for i in range(12)}
    write(tmp_path / "m.safetensors", **tensors)
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for line in done.stdout.splitlines():
        assert int(line) <= 5 * tensors["w0"].nbytes  # what four threads have in their files


def test_the_way_to_gpus_on_the_streams_of_the_cpu(tmp_path, monkeypatch):
    """Chunks, casts, columns and more than a buffer holds; of overlap and waiting a CPU tells nothing."""
    monkeypatch.setattr("autoshard.runtime.pinned.BUFFER_BYTES", 1000)
    for value in (torch.randn(50, 33), torch.randn(3).bfloat16(), torch.tensor(2.0), torch.empty(0, 4),
                  torch.randn(700).half(), torch.randn(2, 3, 400)[:, :, 5:300], torch.randn(40, 50).t()):  # fmt: skip
        uploads = Uploads([torch.device("cpu")])
        for dtype in (value.dtype, torch.float64):
            into = torch.zeros(value.shape, dtype=dtype)
            assert uploads.send(into, value)
            assert torch.equal(into, value.to(dtype))
    assert not Uploads([]).send(into, value)
