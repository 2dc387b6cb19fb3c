"""Gradients of parameters that several ranks have: a tied table on two stages, every parameter of a replica.

    position 0   embed.weight  grad a        after the step both have a + b, so that both copies step alike
    position 1   embed.weight  grad b

What was in `.grad` before the step is put aside and added afterwards: it was summed then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import ApplyError
from autoshard.runtime.collectives import ProcessRanks, lost
from autoshard.runtime.dtensors import own_part
from autoshard.runtime.moves import named_tensors, set_data
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.staged import whole_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Some positions of a pipeline, which add up through the first of them: mostly there are two.

    A group of their own would need a name, and torch counts the groups of a process for it: those who are in several
    of them would wait under other names than those who are in one.
    """

    across: ProcessRanks
    pp_ranks: tuple[int, ...]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over these positions, each of which calls it. Raises `RankError` if one is gone."""
        first, *others = self.pp_ranks
        tensor = tensor.contiguous()
        group = self.across.group
        try:
            if self.across.rank != first:
                dist.send(tensor, group=group, group_dst=first)
                dist.recv(tensor, group=group, group_src=first)
                return tensor
            for pp_rank in others:
                part = torch.empty_like(tensor)
                dist.recv(part, group=group, group_src=pp_rank)
                tensor += part
            for pp_rank in others:
                dist.send(tensor, group=group, group_dst=pp_rank)
        except RuntimeError as error:
            raise lost(self.across, error) from error
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Parameters whose gradients are summed over some ranks."""

    ranks: ProcessRanks | Holders
    parameters: tuple[nn.Parameter, ...]


def adopt_stage_parameters(
    model: nn.Module, record: PipelineRecord, stage_parameters: Mapping[str, tuple[int, ...]]
) -> None:
    """Give every position the parameters that its stages read though others have them; all positions call it.

    `stage_parameters`: name -> stages. A module that runs in two stages is placed in one.
    """
    pp_ranks = record.plan.mesh.pp if record.plan.mesh is not None else 1
    tensors = named_tensors(model)
    for name, stages in stage_parameters.items():
        readers = dict.fromkeys(stage % pp_ranks for stage in stages)
        missing = [pp_rank for pp_rank in readers if pp_rank not in record.holders[name]]
        if not missing:
            continue
        if record.used is not None:
            raise ApplyError(
                f"{name} is read by stages on {len(readers)} positions of the pipeline and belongs to fewer, and "
                "parameters are sharded. Plan without fsdp and with --precision full or pure."
            )
        value = whole_value(tensors[name], name, record)
        if record.pp_rank in missing and tensors[name].is_meta:
            set_data(tensors[name], value)
        for other, tensor in tensors.items():
            if tensor is tensors[name]:
                record.holders[other] = (*record.holders[other], *missing)


def find_sums(model: nn.Module, record: PipelineRecord) -> list[Sum]:
    """What this rank sums after a step, in the same order as those it sums with."""
    tensors = named_tensors(model)
    together: dict[tuple[int, ...], dict[int, nn.Parameter]] = {}
    own: dict[int, nn.Parameter] = {}
    for name, holders in record.holders.items():
        tensor = tensors[name]
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            continue
        if len(holders) > 1:
            together.setdefault(tuple(sorted(holders)), {})[id(tensor)] = tensor
        if record.pp_rank in holders:
            own[id(tensor)] = tensor
    sums = []
    for holders in sorted(together):
        if record.pp_rank in holders:
            everyone = len(holders) == record.across.size
            ranks = record.across if everyone else Holders(across=record.across, pp_ranks=holders)
            sums.append(Sum(ranks=ranks, parameters=tuple(together[holders].values())))
    if record.replicas is not None and record.used is None:
        sums.append(Sum(ranks=record.replicas, parameters=tuple(own.values())))
    return sums


class SavedGradients:
    """Gradients from before a step, put aside: either `add_up` or `put_back` follows."""

    def __init__(self, parameters: Iterable[nn.Parameter], sums: Sequence[Sum]) -> None:
        self.sums = sums
        every = [*parameters, *(parameter for one in sums for parameter in one.parameters)]
        self.before = {parameter: parameter.grad for parameter in every}
        for parameter in self.before:
            parameter.grad = None

    def add_up(self) -> None:
        """Sum what the step made over ranks, then add it, as autograd does, into the gradient that was there."""
        for one in self.sums:
            _sum(one)
        for parameter, before in self.before.items():
            if before is not None:
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before

    def put_back(self) -> None:
        """Forget what the step made."""
        for parameter, before in self.before.items():
            parameter.grad = before


def _sum(one: Sum) -> None:
    """Sum gradients over ranks; a parameter has one afterwards if it has one on any of them."""
    if not one.parameters:
        return
    device = one.parameters[0].device
    there = torch.tensor([float(parameter.grad is not None) for parameter in one.parameters], device=device)
    with torch.no_grad():
        for parameter, count in zip(one.parameters, one.ranks.all_reduce(there).tolist(), strict=True):
            if count:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                own = own_part(grad)
                own.copy_(one.ranks.all_reduce(own))
                parameter.grad = grad
