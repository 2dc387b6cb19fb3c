"""Parameters that are cut and off their device between calls: each rank keeps, and brings, its own parts only.

    model.safetensors   ···[ q.weight   rows of rank 0 │ rows of rank 1 ]···     rank 1 maps the second half of it
    cuda:1                       two modules' parts at a time: rank 1's

What a rank has of a tensor in a file must be one stretch of it, so that it is a view: nothing is copied or written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.errors import ApplyError
from autoshard.runtime.copies import Copies
from autoshard.runtime.devices import CPU
from autoshard.runtime.mapped import file_of
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.resting import check_ties, streamed_module
from autoshard.runtime.slices import CutTensor, Kept, runs_of
from autoshard.runtime.streaming import Streams, hook_streams


@dataclass(slots=True)
class CutStreams:
    """What brings the parts of one cut model, and what takes it off again."""

    streams: Streams
    handles: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Put every part home and take the hooks off."""
        self.streams.close()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def kept_parts(
    model: nn.Module,
    streamed: Mapping[str, str],
    cuts: Mapping[str, CutTensor],
    rank: int,
    in_file: Mapping[str, torch.Tensor],
) -> Kept:
    """Say what of a model is in CPU memory between calls, and give this rank's parts of what is on disk.

    `in_file`: whole tensors in their files, of parameters that have no memory yet. Raises `PlanError` for a tied
    parameter that is kept elsewhere under another name, and `ApplyError` for what can't be kept in a file.
    """
    tensors = named_tensors(model)
    if not streamed:
        return Kept()
    check_ties(tensors, dict.fromkeys(tensors, CPU), streamed)
    kept: set[str] = set()
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        path = streamed_module(name, streamed)
        if path is None or not isinstance(tensor, nn.Parameter):
            continue
        kept.add(name)
        if streamed[path] == "disk" and tensor.numel():
            parts[name] = _file_part(name, in_file.get(name, tensor).detach(), cuts.get(name), rank)
    return Kept(names=frozenset(kept), in_file=parts)


def _file_part(name: str, whole: torch.Tensor, cut: CutTensor | None, rank: int) -> torch.Tensor:
    """This rank's part of a tensor in a file, as a view of it: pages of rows that others have are never touched."""
    if file_of(whole) is None:
        raise ApplyError(
            f"the plan keeps {name} on disk, but this model has it in memory, not in a file. Save the model with "
            "autoshard.save(model, directory), then autoshard.load(directory, plan=plan)."
        )
    if cut is None:
        return whole
    runs = runs_of(cut, rank)
    if len(runs) != 1:
        raise ApplyError(
            f"the plan keeps {name} on disk and cuts it into parts that are {len(runs)} stretches of its dimension "
            f"{cut.dim} each, which can't be used where they lie in the file. Keep its module in the memory of the cpu."
        )
    begin, end = runs[0]
    return whole.narrow(cut.dim, begin, end - begin)


def stream_parts(model: nn.Module, streamed: Mapping[str, str], device: torch.device | None) -> CutStreams | None:
    """Have the parts of the streamed modules brought to a device for their calls; None where nothing is to be brought.

    What is in CPU memory and computes there stays where it is.
    """
    target = device or CPU
    brought = {path: target for path, store in streamed.items() if target != CPU or store == "disk"}
    if not brought:
        return None
    streams = Streams.of(model, brought)
    streams.pin()
    streams.copies = runs = Copies()
    handles = [
        model.register_forward_pre_hook(lambda module, args: runs.begin()),
        model.register_forward_hook(lambda module, args, output: runs.end(), always_call=True),
    ]
    return CutStreams(streams, handles + hook_streams(dict(model.named_modules()), streams, ()))
