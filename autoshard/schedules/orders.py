"""Orders: per device, the static list of forwards and backwards of each schedule.

They are those of `torch.distributed.pipelining` (a test compares with its classes), so what is simulated is what runs:

    gpipe         ScheduleGPipe                    4 micro-batches on 2 devices
    1f1b          Schedule1F1B                     0: F0 F1 B0 F2 B1 F3 B2 B3
    interleaved   ScheduleInterleaved1F1B          1: F0 B0 F1 B1 F2 B2 F3 B3
    zero-bubble   ScheduleInterleavedZeroBubble

Stage i is on device i mod p.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from autoshard.errors import SpecError

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward, and its two halves: gradients of what came in, and those of parameters."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class PipeAction(NamedTuple):
    """What a device does at one time: a forward or (a half of) a backward of one stage for one micro-batch."""

    kind: Kind
    stage: int
    microbatch: int


Order = tuple[tuple[PipeAction, ...], ...]
"""Per device, its actions from first to last."""


def make_order(
    schedule: str, num_devices: int, num_microbatches: int, *, stages_per_device: int = 1, training: bool = True
) -> Order:
    """Return what every device does and in which order; in inference forwards only.

    Raises `SpecError` if the schedule does not exist or can't have these numbers.
    """
    check_schedule(schedule, num_devices, num_microbatches, stages_per_device=stages_per_device, training=training)
    shape = num_devices, num_microbatches, stages_per_device
    rows = []
    for device in range(num_devices):
        if schedule == "gpipe":
            row = [PipeAction(kind, device, i) for kind in ("F", "B") for i in range(num_microbatches)]
        elif schedule == "1f1b":
            row = _one_forward_one_backward(device, min(num_microbatches, num_devices - device), num_microbatches)
        else:
            row = _interleaved(device, *shape, split=schedule == "zero-bubble")
        rows.append(tuple(action for action in row if training or action.kind == "F"))
    return tuple(rows)


def check_schedule(
    schedule: str, num_devices: int, num_microbatches: int, *, stages_per_device: int = 1, training: bool = True
) -> None:
    """Raise `SpecError` if the schedule does not exist or can't have these numbers, as torch has it."""
    if schedule not in SCHEDULES:
        raise SpecError(f"unknown schedule {schedule!r}: use one of {', '.join(SCHEDULES)}.")
    if num_devices < 1 or num_microbatches < 1 or stages_per_device < 1:
        raise SpecError("a pipeline needs at least one device, one stage on each and one micro-batch.")
    if schedule in ("gpipe", "1f1b") and stages_per_device > 1:
        raise SpecError(
            f'the schedule "{schedule}" has one stage per device, not {stages_per_device}: use "interleaved".'
        )
    if schedule == "1f1b" and training and num_microbatches < num_devices:
        raise SpecError(
            f'the schedule "1f1b" needs at least as many micro-batches as stages: {num_microbatches} are less than '
            f'{num_devices}. Use "gpipe", or more micro-batches.'
        )
    if schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, num_microbatches // num_devices)
        if num_microbatches % rounds:
            raise SpecError(
                f'the schedule "{schedule}" runs {num_microbatches} micro-batches on {num_devices} devices in {rounds} '
                f"rounds, and they must be equal: use a multiple of {rounds}, such as {rounds * num_devices}."
            )


def _one_forward_one_backward(device: int, ahead: int, microbatches: int) -> list[PipeAction]:
    """Some forwards ahead (as many as there are stages from here on), then a backward for each further one."""
    row = [PipeAction("F", device, i) for i in range(ahead)]
    for i in range(microbatches):
        row.append(PipeAction("B", device, i))
        if ahead + i < microbatches:
            row.append(PipeAction("F", device, ahead + i))
    return row


def _interleaved(device: int, devices: int, microbatches: int, per_device: int, *, split: bool) -> list[PipeAction]:
    """Rounds of micro-batches through the first local stage, then through the next, …; backward the other way round.

    With `split` backward is I at first, and W follows `device` backwards later, where the pipeline would wait.
    """
    in_round = microbatches // max(1, microbatches // devices)
    total = per_device * microbatches
    warmup = min(total, (per_device - 1) * in_round + (1 if split else 2) * (devices - 1 - device))
    forwards = deque(_rounds(device, devices, microbatches, in_round, range(per_device)))
    backwards = deque(_rounds(device, devices, microbatches, in_round, range(per_device - 1, -1, -1)))
    row = [PipeAction("F", *forwards.popleft()) for _ in range(warmup)]
    pending: deque[tuple[int, int]] = deque()
    for count in range(total):
        if forwards:
            row.append(PipeAction("F", *forwards.popleft()))
        stage, microbatch = backwards.popleft()
        row.append(PipeAction("I" if split else "B", stage, microbatch))
        if split:
            pending.append((stage, microbatch))
            if count >= device:
                row.append(PipeAction("W", *pending.popleft()))
    return row + [PipeAction("W", *one) for one in pending]


def _rounds(device: int, devices: int, microbatches: int, in_round: int, local: Sequence[int]) -> list[tuple[int, int]]:
    """(stage, micro-batch): a round of micro-batches on each local stage in turn, then the next round."""
    return [
        (index * devices + device, begin + i)
        for begin in range(0, microbatches, in_round) for index in local for i in range(in_round)
    ]  # fmt: skip
