"""Cuts as the axis analysis says them, before anything is checked: which is most of the time of planning."""

from collections.abc import Sequence

from autoshard.axes.groups import AxisGroup
from autoshard.plan.sharding import Cut, Refusal


def unchecked(groups: Sequence[AxisGroup], shares: Sequence[tuple[int, ...]]) -> list[Cut | Refusal]:
    """Take all cuts as they are: to see whether it would pay to check them. Their plan must not be applied."""
    return [as_cut(group, share) for group, share in zip(groups, shares, strict=True)]


def as_cut(group: AxisGroup, shares: tuple[int, ...]) -> Cut:
    """What the analysis says of a group: neither its scales are known, nor whether it is all."""
    return Cut(
        blocks=group.blocks, size=group.size, shares=shares, shards=group.shards, actions=group.actions,
        summed=group.summed, training=True,  # the mode is that in which it was found
    )  # fmt: skip
