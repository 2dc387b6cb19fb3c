"""Lanes: a program of events on the devices of a plan, which work at the same time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.engine.estimate import Event, Transfer
from autoshard.engine.programs import Task, play
from autoshard.flow import Copy


@dataclass(slots=True)
class Lanes:
    """A program of events on the devices of a plan, each device a stream of its own."""

    tasks: list[Task] = field(default_factory=list)
    drawn: list[Event] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)

    def add(self, event: Event, after: Sequence[int] = (), stream: str = "") -> None:
        """Add what happens on the event's device, or on another stream, once some tasks have ended."""
        stream = stream or event.device
        self.last[stream] = len(self.tasks)
        self.tasks.append(Task(name="", stream=stream, seconds=event.end_seconds, after=tuple(after)))
        self.drawn.append(event)

    def ends(self) -> tuple[int, ...]:
        """The last task of every stream."""
        return tuple(self.last.values())

    @property
    def seconds(self) -> float:
        """Until the last event ends."""
        return play(self.tasks).seconds

    def played(self) -> Iterator[Event]:
        """The events at their times."""
        yield from map(Event.starting, self.drawn, play(self.tasks).begins)


def timed(device: str, kind: str, seconds: float, **more: str | int) -> Event:
    """An event that has not begun: it ends after so many seconds."""
    return Event(device=device, kind=kind, begin_seconds=0.0, end_seconds=seconds, **more)  # type: ignore[arg-type]


def copied(one: Copy | Transfer, seconds: float) -> Event:
    """A copy that has not begun."""
    label = f"{one.producer or '(model)'} -> {one.consumer or '(model)'}"
    return timed(one.destination, "transfer", seconds, source=one.source, nbytes=one.nbytes, label=label)


def waiting(device: str, seconds: float) -> Event:
    """A device that waits, as one thread launches the ops of all."""
    return timed(device, "launch", seconds, label="one thread launches the ops of all devices")
