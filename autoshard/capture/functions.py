"""A user's autograd function, forward and backward, run as ordinary code: so the ops of both are recorded."""

from typing import Any

import torch


class Context:
    """What autograd gives to `forward` and `backward` of a function, to keep tensors and anything else on."""

    def __init__(self, args: tuple) -> None:
        self.needs_input_grad = tuple(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in args)
        self.saved_tensors: tuple = ()
        self.constants: tuple = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constants = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """For derivatives in forward mode, of which there are none."""

    def mark_dirty(self, *tensors: Any) -> None:
        """The recording sees which tensors are written."""

    def set_materialize_grads(self, value: bool) -> None:
        """All outputs have gradients here."""


def run_forward(function: Any, args: tuple) -> tuple[Any, Context]:
    """Run the forward of an autograd function; returns what it gives, and its context."""
    context = Context(args)
    with torch.no_grad():
        if not any("setup_context" in vars(kind) for kind in function.__mro__ if kind.__module__ != _HOME):
            return function.forward(context, *args), context
        output = function.forward(*args)
        function.setup_context(context, args, output)
    return output, context


def run_backward(function: Any, context: Context, output: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Run the backward with gradients that depend on what the outputs depend on; returns them, and what it gives.

    Raises what the function raises.
    """
    outputs = output if isinstance(output, tuple) else (output,)
    given: list[Any] = []
    with torch.no_grad():
        for one in outputs:
            trained = isinstance(one, torch.Tensor) and one.is_floating_point()
            constant = not trained or any(one is other for other in context.constants)
            given.append(None if constant else one.clone())
        made = function.backward(context, *given)
    return [one for one in given if one is not None], list(made) if isinstance(made, tuple) else [made]


_HOME = torch.autograd.Function.__module__
