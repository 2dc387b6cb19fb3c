"""What Accelerate would do with a model on the same devices: its own functions, its own answers."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from autoshard.cluster.cluster import Cluster
from autoshard.errors import first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMap:
    """A device map of a peer, or in `refused` why it has none."""

    name: str
    device_map: dict[str, str] = field(default_factory=dict)
    refused: str = ""


def peer_maps(model: nn.Module, cluster: Cluster) -> tuple[PeerMap, ...]:
    """Ask Accelerate for its maps of a model, which may be on meta, on devices that need not be here.

    Modules that must not be split are those that the model itself lists for that library, if it does.
    """
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    devices = [device for device in cluster.devices if device.name not in ("cpu", "disk")]
    names: dict[int | str, str] = {index: device.name for index, device in enumerate(devices)}
    room: dict[int | str, int] = {index: device.budget_bytes for index, device in enumerate(devices)}
    for spill in cluster.devices:
        if spill.name in ("cpu", "disk"):
            names[spill.name], room[spill.name] = spill.name, spill.memory_bytes
    if not devices:
        return ()
    whole = list(getattr(model, "_no_split_modules", None) or ())
    found: list[PeerMap] = []
    for kind in ("balanced", "balanced_low_0", "sequential"):
        name = f"Accelerate {kind}"
        try:
            with _quiet():
                limits = dict(room)
                if kind != "sequential":
                    limits = get_balanced_memory(model, dict(room), whole, low_zero=kind == "balanced_low_0")
                made = infer_auto_device_map(model, dict(limits), whole)
        except (ValueError, RuntimeError, LookupError, AttributeError, TypeError) as error:
            found.append(PeerMap(name=name, refused=first_line(error)))
            continue
        spilled = [path for path, device in made.items() if device not in names]
        if spilled:
            where = sorted({str(made[path]) for path in spilled})
            found.append(PeerMap(name=name, refused=f"{len(spilled)} modules would be on {' and '.join(where)}"))
        else:
            found.append(PeerMap(name=name, device_map={path: names[device] for path, device in made.items()}))
    return tuple(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """It warns that the devices are not here, which is known."""
    logger = logging.getLogger("accelerate.utils.modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
