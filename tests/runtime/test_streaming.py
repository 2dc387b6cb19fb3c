"""Offloaded modules: the same bits as in memory, two of them on the device at a time, everything home between calls."""

import copy
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.reading import map_entries
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut
from autoshard.runtime.dispatch import apply_plan, is_applied, remove
from autoshard.runtime.mapped import file_of
from autoshard.runtime.pinned import pin
from autoshard.runtime.prefetcher import Carrier
from autoshard.runtime.streaming import Streams, hook_streams
from autoshard.strategies.offloadable import divisions
from tests.hooks import is_hooked
from tests.models import HF_CASES, over

WIDTH = 64
BLOCKS = [f"blocks.{index}" for index in range(5)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net():
    torch.manual_seed(0)
    return Net().eval()


def rows(seed=1):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))


def streaming(model, device, place, paths=BLOCKS, **changes):
    """A plan that puts everything on one device and streams `paths`."""
    tops = {path.partition(".")[0] for path in paths}
    rest = [name for name, _ in model.named_children() if name not in tops]
    inside = [
        f"{top}.{name}" for top in tops for name, _ in model.get_submodule(top).named_children() if top not in paths
    ]
    placements = {path: device for path in [*rest, *inside, *(path for path in paths if path in tops)]}
    plan = Plan.from_device_map(placements)
    return dataclasses.replace(plan, offloaded={path: place for path in paths}, **changes)


def on_disk(model, directory):
    """Save a model and let its parameters be the file."""
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for parameter, mapped in zip(parameters, map_entries([checkpoint.entries[name] for name in names]), strict=True):
        parameter.data = mapped
    return model


def parameter_bytes(module):
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


@pytest.fixture(params=["cpu:0 from cpu", "cpu:0 from disk", "cpu from disk"])
def offloaded(request, tmp_path):
    """(model with a plan applied, its untouched twin)"""
    device, _, place = request.param.partition(" from ")
    with autoshard.simulate("1x16MiB"):
        model = on_disk(net(), tmp_path) if place == "disk" else net()
        yield apply_plan(model, streaming(model, device, place)), net()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_same_bits_as_in_memory_and_full_reversal(offloaded, mode):
    model, original = offloaded
    objects, names = list(model.parameters()), list(model.state_dict())
    with mode():
        for seed in range(3):
            assert torch.equal(model(rows(seed)), original(rows(seed)))
    assert names == list(original.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), original.state_dict()[name])
    for block in model.blocks:
        assert all(parameter.device == torch.device("cpu") for parameter in block.parameters())
    remove(model)
    assert not is_applied(model) and not is_hooked(model)
    assert all(old is new for old, new in zip(objects, model.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(rows()), original(rows()))


@pytest.mark.parametrize("autocast", [False, True])
def test_two_modules_are_on_the_device_at_a_time(autocast):
    """There is no room for three, nor for what torch casts of all parameters until the outermost autocast ends."""
    model, original = net(), net()
    block, rest = parameter_bytes(model.blocks[0]), parameter_bytes(model.first) + parameter_bytes(model.last)
    rest += 5 * WIDTH * 4  # buffers
    room = rest + 2 * block * (3 if autocast else 2) // 2 + 8 * 1024  # with halves in bfloat16
    with autoshard.simulate({"cpu:0": room}) as devices, torch.no_grad(), bfloat16(autocast):
        apply_plan(model, streaming(model, "cpu:0", "cpu"))
        for _ in range(3):
            assert torch.equal(model(rows()), original(rows()))
            live, peak = devices.memory("cpu:0")
            assert autocast or (live == rest and rest + 2 * block < peak)
        remove(model)
        assert autocast or devices.memory("cpu:0")[0] == 0


def bfloat16(enabled):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def test_nothing_is_copied_where_the_cpu_computes_from_disk(tmp_path):
    model = on_disk(net().to(torch.bfloat16), tmp_path)
    apply_plan(model, streaming(model, "cpu", "disk"))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        model(rows().bfloat16())
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert all(file_of(parameter) for parameter in model.blocks.parameters())


class Log(nn.Module):
    """Calls its parts in an order that changes, some of them twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self.parts[index](x))
        return x


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_any_order_of_modules(place, tmp_path):
    torch.manual_seed(0)
    original = Log()
    with autoshard.simulate("1x1MiB"), torch.no_grad():
        model = copy.deepcopy(original)
        model = on_disk(model, tmp_path) if place == "disk" else model
        apply_plan(model, streaming(model, "cpu:0", place, [f"parts.{index}" for index in range(4)]))
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 1, 1], [2], [1, 3, 1, 3, 1], [], [0, 1, 2, 3]):
            assert torch.equal(model(rows(), order), original(rows(), order)), order


def test_writes_between_runs_are_seen(offloaded):
    """Counted ones, and those through `.data`, also to modules that are on the device already."""
    model, original = offloaded
    with torch.no_grad():
        for change in (
            lambda weight: weight.mul_(2),
            lambda weight: weight.data.add_(1),
            lambda weight: setattr(weight, "data", weight.data * 3),
            # the same memory and size, in another order
            lambda weight: setattr(weight, "data", weight.data.reshape(-1).view(weight.shape[::-1]).t()),
        ):
            for index in range(5):
                model(rows())
                for each in (model, original):
                    change(each.blocks[index].up.weight)
                assert torch.equal(model(rows()), original(rows()))
        state = {name: tensor.cpu() + 1 for name, tensor in original.state_dict().items()}
        model.load_state_dict(state)
        original.load_state_dict(state)
        assert torch.equal(model(rows()), original(rows()))


class Counting(nn.Module):
    """Writes to its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.weight.add_(1)
        return x * self.weight


class Position(nn.Module):
    """Keeps a view of its parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.randn(6, 8)), None

    def forward(self, x):
        self.kept = self.weight[: len(x)]
        return x + self.kept


class Recurrent(nn.LSTM):
    """Holds its parameters in a list of its own."""

    def __init__(self):
        super().__init__(8, 8, num_layers=2, batch_first=True)

    def forward(self, x):
        return super().forward(x[None])[0][0]


@pytest.mark.parametrize("kind", [Counting, Position, Recurrent])
def test_what_modules_do_with_their_parameters(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(4)))
    original = copy.deepcopy(model)
    with autoshard.simulate("1x1MiB"), torch.no_grad():
        apply_plan(model, streaming(model, "cpu:0", "cpu", ["0", "1", "2", "3"]))
        for seed in range(2):
            assert torch.equal(model(rows(seed)), original(rows(seed)))
            for ours, theirs in zip(model, original, strict=True):
                assert kind is not Position or torch.equal(ours.kept.cpu(), theirs.kept)
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), original.parameters(), strict=True)
    )


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_in_the_forward_everything_is_home(offloaded, error):
    """After an interrupt at the next run: torch runs no hooks then."""
    model, original = offloaded

    def fail(module, args):
        raise error("on purpose")

    handle = model.blocks[2].down.register_forward_pre_hook(fail)
    with pytest.raises(error, match="on purpose"):
        model(rows())
    handle.remove()
    assert torch.equal(model.blocks[2].up.weight.cpu(), original.blocks[2].up.weight)
    home = all(parameter.device == torch.device("cpu") for parameter in model.blocks.parameters())
    assert home or error is KeyboardInterrupt
    assert torch.equal(model(rows()), original(rows()))
    remove(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_several_threads(tmp_path):
    model, original, found = on_disk(net(), tmp_path), net(), {}
    apply_plan(model, streaming(model, "cpu", "disk"))

    def run(seed):
        with torch.no_grad():
            found[seed] = [model(rows(seed)) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    with torch.no_grad():
        assert all(torch.equal(one, original(rows(seed))) for seed, many in found.items() for one in many)


def test_a_deep_copy_runs(offloaded):
    model, original = offloaded
    with torch.no_grad():
        model(rows())
        twin = copy.deepcopy(model)
        twin.blocks[1].up.weight.zero_()
        assert torch.equal(model(rows()), original(rows()))
        assert not torch.equal(twin(rows()), original(rows()))


def test_the_model_is_freed_without_the_garbage_collector():
    with autoshard.simulate("1x16MiB") as devices, torch.no_grad():
        model = apply_plan(net(), streaming(net(), "cpu:0", "cpu"))
        model(rows())
        alive = weakref.ref(model)
        gc.disable()
        try:
            del model
            assert alive() is None and devices.memory("cpu:0")[0] == 0
        finally:
            gc.enable()


def test_gradients_from_disk_on_the_cpu_are_right(tmp_path):
    """Nothing is copied there, so there is nothing to refuse; what an optimizer writes stays in this process."""
    model, original = on_disk(net(), tmp_path), net()
    before = (tmp_path / "model.safetensors").read_bytes()
    apply_plan(model, streaming(model, "cpu", "disk"))
    for each in (model, original):
        for seed in range(3):
            each.zero_grad()
            each(rows(seed)).square().sum().backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.01 * parameter.grad
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_refusals(tmp_path):
    model = net()
    with pytest.raises(ApplyError, match=r"keeps blocks\.0\.up\.weight on disk, but this model has it in memory"):
        apply_plan(model, streaming(model, "cpu", "disk"))
    tied = net()
    tied.blocks[1].up.weight = tied.blocks[0].up.weight
    with autoshard.simulate("2x1MiB"):
        with pytest.raises(PlanError, match=r"blocks\.0\.up\.weight and blocks\.1\.up\.weight are one tensor"):
            apply_plan(tied, streaming(tied, "cpu:0", "cpu", BLOCKS[:1]))
        mixed = dict.fromkeys(["first", "last", "blocks.0.up", "blocks.0.scale", *BLOCKS[1:]], "cpu:0")
        mixed["blocks.0.down"] = "cpu:1"
        plan = dataclasses.replace(Plan.from_device_map(mixed), offloaded={"blocks.0": "cpu"})
        with pytest.raises(PlanError, match=r"streams 'blocks.0' .* several devices"):
            apply_plan(model, plan)
        training = streaming(model, "cpu:0", "cpu", workload=autoshard.Workload(mode="training"))
        with pytest.raises(PlanError, match="this plan is for training"):
            apply_plan(model, training)
        halves = Cut(blocks=("blocks.0",), size=128, shares=(64, 64), shards=())
        with pytest.raises(PlanError, match="can't be done at once"):
            autoshard.apply(model, dataclasses.replace(streaming(model, "cpu:0", "cpu"), cuts=(halves,)))
        moved = apply_plan(net(), streaming(model, "cpu:0", "cpu"))
        with pytest.raises(ApplyError, match=r"no gradients through 'blocks.4'"):
            moved(rows()).sum().backward()
        moved.blocks[0].to("cpu:1")
        with pytest.raises(ApplyError, match=r"moved after autoshard\.apply"):
            moved(rows())
    assert not is_applied(model) and not is_hooked(model)


def test_a_file_that_changes_under_a_model_is_noticed(tmp_path):
    model = on_disk(net(), tmp_path)
    apply_plan(model, streaming(model, "cpu", "disk"))
    with torch.no_grad():
        model(rows())
        with open(tmp_path / "model.safetensors", "r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\0\0")
        with pytest.raises(ApplyError, match=r"model\.safetensors was changed"):
            model(rows())


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_way_of_gpus_on_the_streams_of_the_cpu(place, tmp_path):
    """What copies for GPUs, on torch's stand-ins for streams and events: chunks, threads and order, not overlap."""
    model = on_disk(net(), tmp_path) if place == "disk" else net()
    for block in model.blocks:
        block.up.weight.data = block.up.weight.data.t().contiguous().t()  # not row by row
    original = copy.deepcopy(model)
    streams = Streams(dict.fromkeys(BLOCKS, torch.device("cpu")), model)
    carrier = Carrier(torch.device("cpu"), by_stream=True)
    streams.streamers[torch.device("cpu")].carrier = carrier
    hook_streams(dict(model.named_modules()), streams)
    seen = set()
    model.blocks[1].up.register_forward_pre_hook(lambda module, args: seen.add(module.weight.data_ptr()))
    home = model.blocks[1].up.weight.data_ptr()
    with torch.no_grad():
        for seed in range(3):
            assert torch.equal(model(rows(seed)), original(rows(seed)))
            model.blocks[0].up.weight.mul_(1.5)
            original.blocks[0].up.weight.mul_(1.5)
    assert home not in seen and model.blocks[1].up.weight.data_ptr() == home
    streams.close()


def test_copies_larger_than_the_staging_buffers(monkeypatch):
    monkeypatch.setattr("autoshard.runtime.pinned.BUFFER_BYTES", 1000)
    carrier = Carrier(torch.device("cpu"), by_stream=True)
    stored = [
        torch.randn(50, 33),
        torch.randn(3).bfloat16(),
        torch.tensor(2.0),
        torch.empty(0, 4),
        torch.randn(700).half(),
    ]
    for made, home in zip(carrier.take(carrier.begin(stored)), stored, strict=True):
        assert (torch.equal(made, home) and made.data_ptr() != home.data_ptr()) or not home.numel()


def test_memory_is_locked_where_it_is_and_unlocked_when_it_is_freed(monkeypatch):
    monkeypatch.setattr("autoshard.runtime.pinned.LEAST_BYTES", 1)
    model, locked = net(), {}

    def lock(address, nbytes):
        locked[address] = nbytes
        return lambda: locked.pop(address)

    model.blocks[3].up.weight = model.blocks[2].up.weight  # one object, locked once
    pin([parameter for module in model.modules() for parameter in module.parameters()], lock)
    assert locked == {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    kept = model.blocks[0].up.weight.data
    del model
    gc.collect()
    assert locked == {kept.data_ptr(): kept.nbytes}
    del kept
    assert not locked


GENERATING = [case for case in HF_CASES if case.name in ("llama-tied", "deepseek-v3", "t5")]


@over(GENERATING, ("llama-tied", "t5"))
def test_generate_is_token_equal_with_everything_streamed(case, tmp_path):
    """Also where code around the forward calls an encoder by itself, with inputs on the CPU."""
    given = {name: value for name, value in case.example().items() if name != "decoder_input_ids"}

    def generate(model):
        with torch.no_grad():
            return model.generate(**given | {"use_cache": True}, max_new_tokens=6, do_sample=False)

    expected = generate(case.model())
    division = divisions(autoshard.capture(case.model(), case.example()))[-1]
    for device, place in (("cpu:0", "disk"), ("cpu", "disk")):
        with autoshard.simulate("1x16MiB"):
            model = case.model()
            plan = Plan.from_device_map({"": device})
            plan = dataclasses.replace(plan, offloaded={unit.path: place for unit in division})
            apply_plan(on_disk(model, tmp_path), plan)
            assert torch.equal(generate(model), expected), (device, place)
