"""A pipeline in one process: each call of the model runs in parts of its batch, one after another.

    call of the root ── RootHook: inputs go to the first device
                     ── Divide:   forward(part 0), forward(part 1) …        the first parts, inside this very call
                     ── forward(last part)
                     ── Together: the outputs of all parts become one       gradients go back to each part
                     ── Leave:    it goes to where the inputs were

Kernels and copies between accelerators are only queued, so that the first device is at part 1 while the second one
computes part 0. What is not known to be divisible runs whole, with equal results.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.batching import BatchAxis
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.runtime.chunks import AS_CALLED, Part, bind, count_rows, split, state_in, unlike
from autoshard.runtime.devices import check_copies, resolve_device, send
from autoshard.runtime.flags import changed_flag
from autoshard.runtime.given import Given
from autoshard.runtime.hooks import to_device
from autoshard.runtime.merging import merge
from autoshard.runtime.moves import set_data
from autoshard.runtime.state import Division, Runtime

OF_PARTS = "it runs in parts of its batch, of which each has its own"
"""Why changes of arguments can't be seen by the caller."""


def division_of(plan: Plan) -> Division | None:
    """How a plan divides the batch of a model that one process runs, None if it does not.

    Raises `ApplyError` where a device of a replica is not here.
    """
    replicated = plan.mesh is not None and plan.mesh.data > 1
    if plan.batch is None or (plan.num_microbatches < 2 and not replicated):
        return None
    devices: tuple[torch.device, ...] = ()
    if replicated:
        devices = tuple(resolve_device(device.name) for device in plan.devices)
        check_copies(devices)
    return Division(
        batch=plan.batch,
        count=plan.num_microbatches,
        devices=devices,
        shares=plan.mesh.shares if plan.mesh is not None else (),
    )


def hook_division(model: nn.Module, runtime: Runtime, division: Division) -> list[Any]:
    """Hook the root of an applied model, behind the hook that moves its inputs; returns handles."""
    runtime.copies.carry = send
    together = Together(runtime, division)
    return [
        model.register_forward_pre_hook(Divide(runtime, division, together), with_kwargs=True),
        model.register_forward_hook(together, prepend=True, always_call=True),
    ]


class Divide:
    """Pre-hook of the root: runs all parts of the batch but the last one, which it leaves to the call."""

    __slots__ = ("division", "runtime", "said", "together")
    undivided = "one device after another"

    def __init__(self, runtime: Runtime, division: Division, together: Any) -> None:
        self.runtime = runtime
        self.division = division
        self.together = together  # the post-hook that puts the outputs together
        self.said: set[str] = set()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if torch.compiler.is_compiling():  # torch.compile of the whole model; of its parts it goes with this
            return None
        call, *around = reversed(self.runtime.local.calls)
        if any(other.parts is not None for other in around) or torch_private.autograd_node() is not None:
            return None
        parts = self.parts(module, args, kwargs)
        if len(parts) < 2 or not self.is_next_to_forward(module):
            return None
        outputs: list[Any] = []
        written = Written(self.division.batch.written, module)
        call.parts = parts, outputs, written.close
        for part in parts[:-1]:
            written.begin()
            given = Given(part.args, part.kwargs)
            outputs.append(module.forward(*part.args, **part.kwargs))
            given.check(type(module).__name__, OF_PARTS)
        written.begin()
        return parts[-1].args, parts[-1].kwargs

    def is_next_to_forward(self, module: nn.Module) -> bool:
        """Let the user's own hooks of the root see whole calls: none may come between the dividing and the forward.

        A pre-hook that was registered after these is moved before them, which holds from the next call on; this one
        runs whole.
        """
        torch_private.put_hook_first(module, self.together)
        return torch_private.put_hook_last(module, self)

    def shares(self, rows: int) -> int | Sequence[int]:
        """Into how many parts so many rows are divided, or the rows of each."""
        return min(rows, self.division.count)

    def parts(self, module: nn.Module, args: tuple, kwargs: dict) -> list[Part]:
        """Divide a call; none where it has to run whole."""
        division = self.division
        try:
            bound = bind(module, args, kwargs)
        except TypeError:
            return []  # the forward itself says what is wrong with its arguments
        if state_in(bound):
            return []
        problem, advice = why_whole(division.batch, module), "Set it back, or plan again as it is."
        if not problem:
            problem, advice = unlike(division.batch, module, bound), AS_CALLED
        try:
            rows = 0 if problem else count_rows(division.batch, bound)
            if not problem:
                return split(division.batch, module, args, kwargs, self.shares(rows)) if rows > 1 else []
        except PlanError as error:
            problem = str(error).removesuffix(f" {AS_CALLED}").rstrip(".")
        if problem not in self.said:
            self.said.add(problem)
            text = f"this call of {type(module).__name__} runs undivided, {self.undivided}"
            warnings.warn(f"autoshard: {text}: {problem}. {advice}", RuntimeWarning, stacklevel=5)
        return []

    def __getstate__(self) -> tuple[Runtime, Division, Any]:
        return self.runtime, self.division, self.together

    def __setstate__(self, state: tuple[Runtime, Division, Any]) -> None:
        (self.runtime, self.division, self.together), self.said = state, set()


class Together:
    """Post-hook of the root, also called when its forward raises: puts the outputs of the parts together."""

    __slots__ = ("division", "runtime")

    def __init__(self, runtime: Runtime, division: Division) -> None:
        self.runtime = runtime
        self.division = division

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        call = self.runtime.local.calls[-1] if self.runtime.local.calls else None
        if call is None or call.parts is None:
            return None
        (parts, outputs, close), call.parts = call.parts, None
        close()
        if len(outputs) < len(parts) - 1 or output is None:  # one of them raised
            return None
        if not self.division.devices:
            return merge(self.division.batch, [*outputs, output], parts)
        home = call.output_device or self.division.devices[0]
        return merge(self.division.batch, [to_device(one, home) for one in (output, *outputs)], parts)


def why_whole(batch: BatchAxis, model: nn.Module) -> str:
    """Say why no call of a model may be divided as it is now, "" if calls may be."""
    for path in batch.frozen:
        if any(module.training for module in model.get_submodule(path).modules()):
            return f"{path or 'the model'} was in evaluation mode at planning, and in training mode it may mix rows"
    return changed_flag(batch.flags, model)


class Written:
    """Buffers that parts write: each part begins with what the call began with, the values of the last one stay.

    Every part has tensors of its own in their places, since autograd refuses what was written after it was saved. At
    the end the model has its own again. What a forward puts into such a place by itself stays there.
    """

    def __init__(self, names: Sequence[str], model: nn.Module) -> None:
        self.places: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.lent: dict[int, torch.Tensor] = {}
        wanted = {id(buffer) for name, buffer in model.named_buffers() if name in names}
        for module in model.modules() if wanted else ():
            own = module.named_buffers(recurse=False, remove_duplicate=False)
            self.places += [(module, name, buffer) for name, buffer in own if id(buffer) in wanted]

    def begin(self) -> None:
        """Before each part."""
        lent = {id(buffer): buffer.detach().clone() for _, _, buffer in self.places}
        for module, name, buffer in self.places:
            if getattr(module, name) is self.lent.get(id(buffer), buffer):
                setattr(module, name, lent[id(buffer)])
        self.lent = lent

    def close(self) -> None:
        """After the last part, or where one failed."""
        for module, name, buffer in self.places:
            lent = self.lent.get(id(buffer))
            if lent is not None and getattr(module, name) is lent:
                set_data(buffer, lent)
                setattr(module, name, buffer)
