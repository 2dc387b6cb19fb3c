"""Apply plans to models, in place, and undo it. Reads a plan and a module; knows nothing of planning."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.runtime.dispatch import apply_device_map, apply_plan, is_applied, remove

__all__ = ["apply_device_map", "apply_plan", "is_applied", "remove"]


def __getattr__(name: str) -> Any:
    """Find one of the names above where it is used first: who plans, or only imports autoshard, needs none of this."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autoshard.runtime import dispatch

    return getattr(dispatch, name)
