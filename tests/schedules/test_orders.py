"""Orders are those that torch runs."""

from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autoshard.engine.price import in_flight
from autoshard.engine.recipe import Recipe
from autoshard.errors import SpecError
from autoshard.schedules.orders import PipeAction, make_order


class Stage:
    """What a schedule of torch asks of a stage; it notes what it is told to do."""

    def __init__(self, index: int, count: int, devices: int):
        self.stage_index, self.num_stages = index, count
        self.group_size, self.group_rank, self.group = devices, index % devices, None
        self.is_first, self.is_last, self.has_backward = index == 0, index == count - 1, True
        self.submod, self.device, self.stage_index_to_group_rank = None, "cpu", {}
        self.done: list[PipeAction] = []

    def __getattr__(self, name):
        if name.startswith("get_"):
            return lambda *args: []
        return lambda *args, **kwargs: None

    def forward_one_chunk(self, index, *args, **kwargs):
        self.done.append(PipeAction("F", self.stage_index, index))

    def backward_one_chunk(self, index, *args, **kwargs):
        self.done.append(PipeAction("B", self.stage_index, index))


def run_single(kind: type, devices: int, microbatches: int) -> list[tuple[PipeAction, ...]]:
    rows = []
    for device in range(devices):
        stage = Stage(device, devices, devices)
        schedule = kind(stage, microbatches, loss_fn=lambda output, target: None, scale_grads=False)
        schedule._initialize_stage = lambda *args: None
        schedule._maybe_compute_loss = schedule._maybe_get_loss = schedule._update_losses = lambda *args: None
        parts = [()] * microbatches
        schedule._step_microbatches(parts, [{}] * microbatches, parts)
        rows.append(tuple(stage.done))
    return rows


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 4), (4, 4), (4, 9)])
@pytest.mark.parametrize(
    ("name", "kind"), [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)]
)
def test_one_stage_per_device_runs_as_in_torch(name, kind, devices, microbatches):
    assert list(make_order(name, devices, microbatches)) == run_single(kind, devices, microbatches)


@pytest.mark.parametrize(
    ("devices", "microbatches", "per_device"),
    [(1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 4, 1), (2, 6, 3), (3, 2, 2), (3, 6, 2), (4, 4, 2), (4, 10, 2), (4, 12, 3)],
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("interleaved", torch_schedules.ScheduleInterleaved1F1B),
        ("zero-bubble", torch_schedules.ScheduleInterleavedZeroBubble),
    ],
)
def test_several_stages_per_device_are_ordered_as_in_torch(name, kind, devices, microbatches, per_device):
    stages = [Stage(i * devices, per_device * devices, devices) for i in range(per_device)]
    for stage in stages:
        stage.submod = SimpleNamespace()
    rows = kind(stages, microbatches).pipeline_order
    made = make_order(name, devices, microbatches, stages_per_device=per_device)
    for device, row in enumerate(made):
        theirs = [a for a in rows[device] if a is not None]
        assert list(row) == [PipeAction(a.computation_type.value, a.stage_index, a.microbatch_index) for a in theirs]


def test_inference_runs_forwards_only():
    for name in ("gpipe", "1f1b", "interleaved"):
        (row, _) = (
            make_order(name, 2, 3, stages_per_device=1, training=False)
            if name != "interleaved"
            else make_order(name, 2, 4, stages_per_device=2, training=False)
        )
        assert {action.kind for action in row} == {"F"}


def test_one_device_can_have_several_stages_only_where_they_are_interleaved():
    with pytest.raises(SpecError, match='use "interleaved"'):
        make_order("gpipe", 2, 4, stages_per_device=2)


def test_numbers_that_torch_would_refuse_are_refused_with_what_works():
    with pytest.raises(SpecError, match="at least as many micro-batches as stages: 2 are less than 4"):
        make_order("1f1b", 4, 2)
    with pytest.raises(SpecError, match="such as 8"):
        make_order("interleaved", 4, 9, stages_per_device=2)


def most_in_flight(order):
    """Per device, the most micro-batches of a stage between their forward and their backward."""
    found = []
    for row in order:
        ahead, most = Counter(), 0
        for kind, stage, _ in row:
            ahead[stage] += {"F": 1, "B": -1}[kind]
            most = max(most, ahead.total())
        found.append(most)
    return found


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("microbatches", [4, 8, 12])
def test_the_engine_counts_the_micro_batches_that_a_rank_keeps(name, chunks, microbatches):
    """Those of all of its stages together, as parts of all of its layers."""
    recipe = Recipe(pp=4, num_microbatches=microbatches, schedule=name, stages_per_rank=chunks)
    counted = most_in_flight(make_order(name, 4, microbatches, stages_per_device=chunks))
    assert [in_flight(recipe, rank) * chunks for rank in range(4)] == counted
