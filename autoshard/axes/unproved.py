"""Cuts as they would be if they were proved, without what proves them: most of the runtime."""

from collections.abc import Sequence

from autoshard.axes.groups import AxisGroup
from autoshard.plan_cuts import Refusal
from autoshard.sharding import Cut


def unproved(groups: Sequence[AxisGroup], shares: Sequence[tuple[int, ...]]) -> list[Cut | Refusal]:
    """Take all cuts for proved: to see whether it would pay to prove them. Their plan must not be applied."""
    return [as_cut(group, share) for group, share in zip(groups, shares, strict=True)]


def as_cut(group: AxisGroup, shares: tuple[int, ...]) -> Cut:
    """What the analysis says of a group: neither its scales are known, nor whether it is all."""
    return Cut(
        blocks=group.blocks, size=group.size, shares=shares, shards=group.shards, actions=group.actions,
        summed=group.summed, training=True,  # the mode is that in which it was found
    )  # fmt: skip
