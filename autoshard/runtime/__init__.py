"""Apply plans to models, in place, and undo it. Reads a plan and a module; knows nothing of planning."""

from autoshard.runtime.apply import adopt
from autoshard.runtime.dispatch import apply_device_map, apply_plan, is_applied, remove

__all__ = ["adopt", "apply_device_map", "apply_plan", "is_applied", "remove"]
