"""What `autoshard verify` does between reading its options and printing."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from autoshard.common.sizes import format_bytes
from autoshard.errors import PlanError

if TYPE_CHECKING:
    from autoshard.cli.target import Target

COPIES = 3
"""The original, the split copy and their activations are in memory at once."""


def check_room(skeleton: "Target") -> None:
    """Refuse a model that this machine can't run whole, before its weights are allocated. Raises `PlanError`."""
    from autoshard.cluster.detect import free_host_bytes
    from autoshard.integrations.skeleton import parameter_bytes

    needed, free = COPIES * parameter_bytes(skeleton.model), free_host_bytes()
    if needed > free:
        raise PlanError(
            f"verifying runs the model whole and split, which takes about {format_bytes(needed)} of memory; "
            f"{format_bytes(free)} are free. Verify a smaller configuration of the same architecture."
        )


def build(load: "Callable[[bool], Target]") -> "Target":
    """Build the model with its weights if this machine has room for it; `load` is given whether to allocate them."""
    from autoshard.integrations.skeleton import has_weights

    skeleton = load(False)
    check_room(skeleton)
    return skeleton if has_weights(skeleton.model) else load(True)
