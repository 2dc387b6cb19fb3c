"""check_first_batch: the first call of an applied model also runs undivided, and both outputs are compared.

first call ── copy of the model, plan as it is ──────────────────────────▶ outputs, buffers ─┐
           ── copy of the model, batch in one piece, parameters whole ──▶ outputs, buffers ─┴─ differ ─▶ VerifyError
           ── the call itself, and from then on the hook is gone

The copies share the parameters of the model and have buffers and attributes of their own, so that its state is that
before the call; random number generators are put back. A model whose parameters are cut is copied with them.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError, VerifyError, first_line
from autoshard.plan import Plan
from autoshard.plan.batching import ASSUMED
from autoshard.runtime.apply import find_runtime
from autoshard.runtime.around import layers_of
from autoshard.runtime.collectives import count_processes
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.dispatch import remove
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.microbatches import Divide
from autoshard.verify.compare import compare
from autoshard.verify.report import Difference
from autoshard.verify.run import RunResult, Work, run
from autoshard.verify.runner import run_both
from autoshard.verify.stage import is_divided


def refuse_unless_checkable(model: nn.Module, plan: Plan) -> None:
    """Raise `ApplyError` where the first batch could not be run undivided in this process."""
    if count_processes() > 1:
        raise ApplyError(
            f"check_first_batch=True runs the whole batch in one process, and {count_processes()} processes share this "
            "plan. Apply it without, and compare with autoshard.verify(model, plan) in all of them."
        )
    if not (is_divided(plan) or plan.cuts):
        return
    if plan.offloaded:
        raise ApplyError(
            "check_first_batch=True needs the whole model beside the applied one, and this plan keeps "
            f"{len(plan.offloaded)} modules off their devices. Apply it without, or compare with autoshard.verify."
        )


def check_at_first_call(model: nn.Module) -> nn.Module:
    """Hook an applied model so that its first call in parts is compared with one in one piece; returns the model.

    Nothing is hooked where the plan only places modules: it computes what the model computes, op by op.
    """
    record = cut_record(model)
    if record is None and division_of(model) is None:
        return model
    hook = FirstBatch()
    hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    if record is not None:
        record.handles.append(hook.handle)
        return model
    runtime = find_runtime(model)
    assert runtime is not None
    runtime.handles.append(hook.handle)
    return model


class FirstBatch:
    """Pre-hook of the root until a call has run in parts and was found equal; copies of the model have it switched off.

    A call that is not divided (one row) is not the one that is waited for.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.waits = True

    def __deepcopy__(self, memo: dict) -> "FirstBatch":
        made = FirstBatch()
        made.waits = False
        return made

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Compare this call in parts and in one piece. Raises `VerifyError` if they differ."""
        if not self.waits or torch.compiler.is_compiling() or torch_private.autograd_node() is not None:
            return
        divide = division_of(module)
        if divide is not None and len(divide.parts(module, args, kwargs)) < 2:
            return
        try:
            _compare(module, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise VerifyError(
                f"check_first_batch=True: {type(module).__name__} does not fit in one piece beside the applied model, "
                f"so this batch can't be compared ({first_line(error)}). Make the first call with fewer rows, or apply "
                "the plan without it."
            ) from error
        self.waits = False
        self.handle.remove()


def division_of(model: nn.Module) -> Divide | None:
    """What makes a model run in parts of its batch, None if nothing does."""
    return next((layer for layer in layers_of(model) if isinstance(layer, Divide)), None)


def _compare(model: nn.Module, args: tuple, kwargs: dict) -> None:
    record, divide = cut_record(model), division_of(model)
    work = Work(args=args, kwargs=kwargs, cut=record is not None, divided=divide is not None)
    runtime = find_runtime(model)
    placed = runtime.record.placed if runtime is not None else ()
    devices = record.ranks.devices if record is not None and isinstance(record.ranks, LocalRanks) else placed
    expected, found, work = run_both(
        lambda: run(_in_one_piece(model), work), lambda: run(_copied(model), work), work, [],
        [*devices],
    )  # fmt: skip
    errors = compare(expected, found, 0.0, work)
    if errors.first is not None:
        raise VerifyError(_message(model, divide, errors.first, expected))


def _copied(model: nn.Module, shared: bool = True) -> nn.Module:
    """A copy of an applied model, with the same parameters if `shared`; buffers and what forwards write are its own."""
    try:
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()} if shared else {})
    except Exception as error:  # whatever the model's attributes raise
        raise VerifyError(
            f"check_first_batch=True runs copies of the model, and this {type(model).__name__} can't be copied: "
            f"{first_line(error)}. Apply the plan without it."
        ) from error


def _in_one_piece(model: nn.Module) -> nn.Module:
    """A copy of an applied model that runs its batch whole, on the placed modules; where parameters are cut, whole."""
    if cut_record(model) is not None:
        return remove(_copied(model, shared=False))
    made = _copied(model)
    runtime = find_runtime(made)
    assert runtime is not None
    runtime.record = replace(runtime.record, division=None)
    divide = division_of(made)
    assert divide is not None
    divide.division = replace(divide.division, count=1, devices=divide.division.devices[:1])
    return made


def _message(model: nn.Module, divide: Divide | None, first: Difference, expected: Sequence[RunResult]) -> str:
    what = "the output" if first.output == "output" else first.output
    values = [one.value.double() for one in expected if one.output == first.output and one.value.numel()]
    most = max((float(value.abs().max()) for value in values), default=1.0)
    differing = f"{what} by up to {first.max_error:.3g} where its largest value is {most:.3g}"
    if first.message:
        differing += f": {first.message}"
    how = "with its parameters cut" if divide is None else "divided"
    assumed = f" ({ASSUMED})" if divide is not None and divide.division.batch.assumed else ""
    remedy = "without dividing the batch" if divide is not None else "without cuts"
    return (
        f"the first batch of {type(model).__name__} gives something else {how}{assumed} than in one piece. It differs "
        f'in {differing}. Plan {remedy}, for example with strategy="balanced".'
    )
