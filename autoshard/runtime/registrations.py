"""Notice that modules or parameters were registered somewhere, so that an applied model looks for new ones.

torch calls a hook at every registration in the process. It costs a counter there, and one comparison per forward here;
the hooks are in place only while some applied model is alive.
"""

import weakref
from typing import Any

from torch.nn.modules import module as torch_module


class _Registrations:
    """Counts registrations while there are followers."""

    def __init__(self) -> None:
        self.count = 0
        self._followers = 0
        self._handles: list[Any] = []

    def follow(self, follower: Any) -> None:
        """Count from now on, until the follower is gone or gives up through `unfollow`."""
        if self._followers == 0:
            self._handles = [
                torch_module.register_module_module_registration_hook(_count),
                torch_module.register_module_parameter_registration_hook(_count),
            ]
        self._followers += 1
        follower.unfollow = weakref.finalize(follower, self._release)
        follower.unfollow.atexit = False

    def _release(self) -> None:
        self._followers -= 1
        if self._followers == 0:
            for handle in self._handles:
                handle.remove()
            self._handles = []


def _count(module: Any, name: str, registered: Any) -> None:
    registrations.count += 1


registrations = _Registrations()
