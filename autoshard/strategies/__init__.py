"""Strategies: from a profile and a cluster to a plan. The same input always gives the same plan."""

from autoshard.strategies.make import make_plan

__all__ = ["make_plan"]
