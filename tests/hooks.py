"""Whether something is left on a model that a plan, or a measurement, has put there."""

from autoshard.runtime.around import layers_of


def is_hooked(model, other_than=None):
    """Whether a module has hooks, or something around its forward; one may have hooks of the test."""
    return any(
        bool(layers_of(module))
        or (module is not other_than and bool(module._forward_hooks or module._forward_pre_hooks))
        for module in model.modules()
    )
