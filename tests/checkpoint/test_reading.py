"""What is read into targets equals what the safetensors library loads, and every byte is read once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from autoshard import simulate
from autoshard.checkpoint.data import Checkpoint, Piece, Source, Target
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.reading import read_into
from autoshard.errors import CheckpointError
from autoshard.runtime.pinned import Uploads
from autoshard.sharding import even_shares, kept


def plain(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> dict[str, Source]:
    """Sources of a model that is exactly its checkpoint."""
    return {
        name: Source(shape=entry.shape, dtype=dtype or entry.dtype, pieces=(Piece(entry=name),))
        for name, entry in checkpoint.entries.items()
    }


def empty(source: Source, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for a source with bytes that are not those of any weight."""
    return torch.full(source.shape, 77, dtype=torch.float32).to(dtype or source.dtype).to(device)


def runs_of(axis: str, degree: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    index = kept(axis, even_shares(size, degree), rank).tolist()
    starts = [i for i in index if i - 1 not in index]
    stops = [i + 1 for i in index if i + 1 not in index]
    return tuple(zip(starts, stops, strict=True))


def write(path: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file(tensors, path)
    return open_checkpoint(path)


def test_all_dtypes_arrive_bit_for_bit(tmp_path):
    bits = torch.randint(0, 255, (6, 8), dtype=torch.uint8)
    dtypes = [torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    dtypes += [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint32]
    tensors = {str(dtype): bits.clone().view(dtype) for dtype in dtypes} | {
        "bool": bits > 100,
        "scalar": torch.tensor(3.5),
    }
    checkpoint = write(tmp_path / "model.safetensors", **tensors, none=torch.zeros(0, 3))
    sources = plain(checkpoint)
    first = {name: empty(source) for name, source in sources.items()}
    again = {name: empty(source) for name, source in sources.items()}  # two of each: through a buffer
    read_into(checkpoint, sources, [Target(source=name, tensor=tensor) for name, tensor in first.items()])
    both = [Target(source=name, tensor=one[name]) for name in sources for one in (first, again)]
    report = read_into(checkpoint, sources, both)
    assert report.bytes_read == sum(entry.nbytes for entry in checkpoint.entries.values())
    for name, value in tensors.items():
        for got in (first[name], again[name]):
            assert torch.equal(got.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def test_tensors_at_odd_places_of_a_file_arrive(tmp_path):
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    data = bytes([7]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    checkpoint = open_checkpoint(tmp_path)
    targets = [torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    read_into(checkpoint, plain(checkpoint), [Target(source="b", tensor=tensor) for tensor in targets])
    assert all(tensor.tolist() == [1.5, -2.0] for tensor in targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_values_are_cast_as_torch_casts(tmp_path, dtype):
    value = torch.randn(300, 70).to(torch.bfloat16)
    checkpoint = write(tmp_path / "m.safetensors", w=value)
    sources = plain(checkpoint, dtype)
    got = empty(sources["w"])
    read_into(checkpoint, sources, [Target(source="w", tensor=got)])
    assert torch.equal(got, value.to(dtype))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_runs_along_any_dimension_equal_slices(tmp_path, data):
    """For one rank alone and for all of them at once, of any axis, type of device and cast."""
    axis, size = data.draw(st.sampled_from([("*6x4", 6), ("2x*4x3", 4), ("(*8x2|*4|4)", 0), ("*24", 24), ("24x*1", 1)]))
    size = size or 8
    axis = "(*8x2|8)" if axis.startswith("(") else axis
    shape = list(data.draw(st.sampled_from([(24,), (24, 5), (5, 24), (3, 24, 2), (24, 24), (2, 3, 24)])))
    dim = data.draw(st.sampled_from([d for d, n in enumerate(shape) if n == 24]))
    degree = data.draw(st.integers(1, 4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    value = torch.randn(shape)
    checkpoint = write(tmp_path / "m.safetensors", pad=torch.zeros(3), w=value)
    sources = plain(checkpoint, dtype)
    ranks = data.draw(st.sampled_from([[0], list(range(degree)), [*range(degree), 0]]))
    targets = []
    for rank in ranks:
        runs = runs_of(axis, degree, rank, size)
        shape[dim] = sum(stop - start for start, stop in runs)
        targets.append(Target(source="w", tensor=torch.full(shape, 77, dtype=dtype), dim=dim, runs=runs))
    report = read_into(checkpoint, sources, targets)
    needed = set()
    for rank, target in zip(ranks, targets, strict=True):
        index = torch.from_numpy(kept(axis, even_shares(size, degree), rank).copy())
        assert torch.equal(target.tensor, value.index_select(dim, index).to(dtype))
        needed |= set(index.tolist())
    assert value.nbytes * len(needed) // 24 <= report.bytes_read <= value.nbytes


def test_pieces_fill_one_tensor_from_many(tmp_path):
    """Fused experts: gate and up of each expert one above the other, transposed, behind each other."""
    gates = {f"{kind}.{i}": torch.randn(5, 4) for i in range(3) for kind in ("gate", "up")}
    checkpoint = write(tmp_path / "m.safetensors", **gates)
    pieces = tuple(
        Piece(
            entry=f"{kind}.{i}", views=(("transpose", 0, 1), ("unsqueeze", 0)), region=((i, 1), (0, 4), (5 * column, 5))
        )
        for i in range(3)
        for column, kind in enumerate(("gate", "up"))
    )
    sources = {"fused": Source(shape=(3, 4, 10), dtype=torch.float32, pieces=pieces)}
    wanted = torch.stack([torch.cat([gates[f"gate.{i}"], gates[f"up.{i}"]]).T for i in range(3)])
    whole, part = torch.empty(3, 4, 10), torch.empty(3, 4, 4)
    runs = ((3, 5), (6, 8))
    report = read_into(
        checkpoint,
        sources,
        [Target(source="fused", tensor=whole), Target(source="fused", tensor=part, dim=2, runs=runs)],
    )
    assert torch.equal(whole, wanted)
    assert torch.equal(part, wanted[:, :, [3, 4, 6, 7]])
    assert report.bytes_read == 6 * 80


def test_what_is_no_view_is_computed(tmp_path):
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    checkpoint = write(tmp_path / "m.safetensors", a=a, b=b)

    def spoil(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        first += second  # may write into what it is given
        return first * 2

    sources = {
        "x": Source(shape=(4, 6), dtype=torch.bfloat16, compute=(("a", "b"), spoil)),
        "y": Source(shape=(4, 6), dtype=torch.float32, compute=(("a", "b"), torch.sub)),
    }
    x, y, part = torch.empty(4, 6, dtype=torch.bfloat16), torch.empty(4, 6), torch.empty(4, 2)
    targets = [Target(source="x", tensor=x), Target(source="y", tensor=y)]
    targets.append(Target(source="y", tensor=part, dim=1, runs=((1, 2), (4, 5))))
    assert read_into(checkpoint, sources, targets).bytes_read == 4 * 96  # of each that is computed
    assert torch.equal(x, ((a + b) * 2).bfloat16())
    assert torch.equal(y, a - b)
    assert torch.equal(part, (a - b)[:, [1, 4]])
    wrong = {"x": Source(shape=(6, 4), dtype=torch.float32, compute=(("a", "b"), torch.add))}
    with pytest.raises(CheckpointError, match=r"x has the shape \[6, 4\], and what .* gives \[4, 6\]"):
        read_into(checkpoint, wrong, [Target(source="x", tensor=torch.empty(6, 4))])


def test_simulated_devices_are_filled_and_counted(tmp_path):
    value = torch.randn(40, 30)
    checkpoint = write(tmp_path / "m.safetensors", w=value)
    sources = plain(checkpoint, torch.bfloat16)
    with simulate({f"cpu:{i}": "1MB" for i in range(3)}) as devices:
        targets = [Target(source="w", tensor=empty(sources["w"], device)) for device in devices]
        report = read_into(checkpoint, sources, targets)
        assert report.bytes_read == value.nbytes
        assert [devices.memory(device)[0] for device in devices] == [2400] * 3
    for target in targets:
        assert torch.equal(target.tensor.to("cpu"), value.bfloat16())


def test_parameters_are_filled_also_in_inference_mode(tmp_path):
    checkpoint = write(tmp_path / "m.safetensors", w=torch.ones(3))
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    read_into(checkpoint, plain(checkpoint), [Target(source="w", tensor=parameter)])
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.requires_grad
    with torch.inference_mode():
        inner = torch.zeros(3, dtype=torch.float64)
        read_into(checkpoint, plain(checkpoint), [Target(source="w", tensor=inner)])
    assert inner.tolist() == [1, 1, 1]


@pytest.mark.parametrize("columns", [None, (0, 64)])
def test_a_file_that_gets_shorter_or_goes_is_named(tmp_path, columns):
    checkpoint = write(tmp_path / "m.safetensors", w=torch.randn(400, 128))
    if columns is None:
        target = Target(source="w", tensor=torch.empty(400, 128))
    else:
        target = Target(source="w", tensor=torch.empty(400, 64), dim=1, runs=(columns,))
    os.truncate(tmp_path / "m.safetensors", 60_000)
    with pytest.raises(CheckpointError, match=r"m\.safetensors became shorter"):
        read_into(checkpoint, plain(checkpoint), [target])
    os.unlink(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*m\.safetensors: No such file"):
        read_into(checkpoint, plain(checkpoint), [target])


def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path):
    checkpoint = write(tmp_path / "m.safetensors", w=torch.ones(4, 6))

    def source(*pieces: Piece) -> dict[str, Source]:
        return {"w": Source(shape=(4, 6), dtype=torch.float32, pieces=pieces)}

    half = ((0, 2), (0, 6))
    narrow = (("narrow", 0, 0, 2),)
    wrong = [
        (source(), Target(source="w", tensor=torch.zeros(4, 6)), "do not fill"),
        (source(Piece(entry="v")), Target(source="w", tensor=torch.zeros(4, 6)), "no tensor 'v'"),
        (source(Piece(entry="w", region=half)), Target(source="w", tensor=torch.zeros(4, 6)), "do not fill"),
        (source(Piece(entry="w", views=narrow)), Target(source="w", tensor=torch.zeros(4, 6)), "room for"),
        (source(Piece(entry="w")), Target(source="w", tensor=torch.zeros(6, 4)), "needs the shape"),
        (source(Piece(entry="w")), Target(source="w", tensor=torch.zeros(4, 2), dim=1, runs=((5, 7),)), "has no"),
        (source(Piece(entry="w")), Target(source="w", tensor=torch.zeros(4, 6, device="meta")), "no memory"),
        (
            source(Piece(entry="w", views=(("transpose", 0, 1), ("reshape", (4, 6))))),
            Target(source="w", tensor=torch.zeros(4, 6)),
            "no view",
        ),
    ]
    for sources, target, problem in wrong:
        with pytest.raises(CheckpointError, match=problem):
            read_into(checkpoint, sources, [target])
        assert target.tensor.is_meta or not target.tensor.any()


def test_progress_ends_at_the_total_and_an_interrupt_stops_the_readers(tmp_path, monkeypatch):
    checkpoint = write(tmp_path / "m.safetensors", w=torch.ones(1 << 20), v=torch.ones(3))
    seen: list[tuple[int, int]] = []
    targets = [Target(source=name, tensor=empty(source)) for name, source in plain(checkpoint).items()]
    read_into(checkpoint, plain(checkpoint), targets, progress=lambda *bytes_: seen.append(bytes_))
    total = (1 << 22) + 12
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    finished = []  # copies that are on their way are waited for: whoever catches this may free the targets
    monkeypatch.setattr(Uploads, "finish", lambda uploads: finished.append(uploads))
    with pytest.raises(KeyboardInterrupt):
        read_into(checkpoint, plain(checkpoint), targets, progress=interrupt)
    assert len(finished) == 1


MEASURED = """
import sys, torch
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.data import Piece, Source, Target
from autoshard.checkpoint.reading import read_into

def counters():
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024, int(status["VmRSS"].split()[0]) * 1024

checkpoint = open_checkpoint(sys.argv[1])
for dtype in (torch.bfloat16, torch.float32):
    sources = {n: Source(shape=e.shape, dtype=dtype, pieces=(Piece(entry=n),)) for n, e in checkpoint.entries.items()}
    tensors = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in sources.items()}
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak
    _, before = counters()
    read_into(checkpoint, sources, [Target(source=n, tensor=t) for n, t in tensors.items()])
    peak, _ = counters()
    print(peak - before - sum(t.nbytes for t in tensors.values()))
    tensors.clear()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_beyond_the_model(tmp_path):
    """As the system counts it, in a process of its own: little more than the model has."""
    tensors = {f"w{i}": torch.full((1 << 20, 12), float(i), dtype=torch.bfloat16) for i in range(12)}
    write(tmp_path / "m.safetensors", **tensors)
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for line in done.stdout.splitlines():
        assert int(line) <= 5 * tensors["w0"].nbytes  # what four threads have in their files


def test_a_file_that_is_written_meanwhile_is_named(tmp_path):
    checkpoint = write(tmp_path / "m.safetensors", w=torch.randn(1 << 20))
    target = Target(source="w", tensor=torch.empty(1 << 20))
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        read_into(
            checkpoint, plain(checkpoint), [target], progress=lambda *_: os.utime(tmp_path / "m.safetensors", ns=(5, 5))
        )
    read_into(checkpoint, plain(checkpoint), [target])


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
