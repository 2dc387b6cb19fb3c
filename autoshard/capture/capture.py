"""capture: run a model once, without its weights, and hand back what it did as a `ModelGraph`.

A ladder of levels: "fake" first (floats have no values), "real" where the model branches on floats and has values,
"invented" where it has none. Composite graphs, which are analysed and compared with those of ranks that have no values,
are of the level "invented" where that works. The level used and what stopped the ones above are in the graph.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoshard import nested
from autoshard.capture.call_log import CallLog
from autoshard.capture.decode import Decoding
from autoshard.capture.fake import SMALL_FLOATS, VALUE_ERRORS, FakeFloats, Ranks, RealValues, ValueNeeded
from autoshard.capture.graph import Level, ModelGraph
from autoshard.capture.guards import Guard
from autoshard.capture.inputs import Call, as_call, derive_inputs
from autoshard.capture.material import valueless
from autoshard.capture.observe import Observer
from autoshard.capture.run import MODULE_PATH, Find, Run, record_run
from autoshard.capture.user_code import NOWHERE, calling_line, files_and_lines, place
from autoshard.common.module_paths import find_scripted
from autoshard.common.packed import stored_bytes
from autoshard.errors import AutoshardError, CaptureError, SpecError
from autoshard.plan.workload import Workload

REAL_BYTES = 2 << 30
"""Parameters of a model are copied before it is run with values only if its tensors take no more than this."""


def capture(
    model: nn.Module,
    inputs: Any = None,
    *,
    workload: Workload | None = None,
    level: Level | None = None,
    composite: bool = False,
) -> ModelGraph:
    """Record one run of `model` (forward, and backward if `workload.training`) without allocating its weights.

    `inputs` is a tensor, a tuple of positional arguments, a dict of keyword arguments, or a callable returning one of
    these; left out, it is derived from the model's `config` and the workload. The model may be on meta, fake or real;
    it and the random number generators are left as they were. `level` forces one level of the ladder. `composite` keeps
    ops such as `linear` whole and fills `ModelGraph.sites`; such a graph of a forward is for analysis only.

    Raises:
        CaptureError: the model could not be run with these inputs; the message holds its own error and the line.
        SpecError: an unknown level, or `composite` and training.
    """
    if not isinstance(workload, (Workload, type(None))):
        raise SpecError(f'workload must be a Workload, got {workload!r}: use Workload(mode="training"), for example.')
    workload = workload or Workload()
    if level not in (None, "fake", "real", "invented"):
        raise SpecError(f"unknown capture level {level!r}: use 'fake', 'real' or 'invented', or leave it out.")
    if composite and workload.training:
        raise SpecError("a composite graph holds a forward only: capture it with Workload(mode='inference').")
    return _captured(model, inputs, workload, level, composite)


def observe_calls(
    model: nn.Module, inputs: Any, workload: Workload | None, paths: Iterable[str], level: Level | None = None
) -> dict[str, list[tuple[tuple, dict[str, Any]]]]:
    """Run a forward as `capture(…, composite=True)` does and return what the modules at `paths` were called with.

    By path, (args, kwargs) of up to two calls in the first forward, with `observe.TensorSpec` for tensors; none of a
    module that was not called. `level`: of the graph, if it is known. Raises as `capture` does.
    """
    observer = Observer(model, paths)
    workload = dataclasses.replace(workload or Workload(), mode="inference")
    _captured(model, inputs, workload, level, True, observer)
    return observer.calls


def record_forward(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    grad: bool,
    real: bool = False,
    small_floats: int = SMALL_FLOATS,
    failing: Guard | None = None,
    ranks: Ranks = "all",
    most_ops: int | None = None,
    at_end: Callable[[Find], None] | None = None,
    histories: bool = False,
    backwards: bool = False,
    level: Level | None = None,
) -> tuple[ModelGraph, CallLog]:
    """Record a forward with composite ops as `capture` does, and log how modules were called and what was read.

    `grad`: whether it asks for gradients. Where the model decides by values that are not known here, they are invented,
    and the log says where. `real`: what can't be run without values, and has them, is run with them.
    `small_floats`: most elements of floats made by the code that keep their values. `failing`: a guard that is told
    what it raises an error for. `ranks`: which experts, say, are chosen where values are not known. `most_ops`: with
    more of them the run is stopped. `at_end`: as of a `Run`; `histories`, `backwards`: as of a `CallLog`; `level`: as
    of `capture`, which tells what is raised, but for `TooManyOps`.
    """
    call_log = CallLog(grad, failing, most_ops, histories, backwards)
    run = Run(model=model, args=args, kwargs=kwargs, workload=Workload(), composite=True, call_log=call_log,
              small_floats=small_floats, ranks=ranks, at_end=at_end)  # fmt: skip
    return _climb(run, level, real), call_log


def calls_of(model: nn.Module, inputs: Any, workload: Workload) -> list[Call]:
    """Arguments to try a model with, most likely first: those given, or what its configuration tells."""
    return [as_call(inputs, model)] if inputs is not None else derive_inputs(model, workload)


def _captured(
    model: nn.Module,
    inputs: Any,
    workload: Workload,
    level: Level | None,
    composite: bool,
    observer: Observer | None = None,
) -> ModelGraph:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"capture needs a torch.nn.Module, got {type(model).__name__}.")
    if (scripted := find_scripted(model)) is not None:
        raise CaptureError(
            f"{scripted or 'the model'} is TorchScript, whose weights can't be recorded or moved one by one. Give the "
            "module as it was before torch.jit.script or torch.jit.trace."
        )
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} has no shape yet, as the model is lazy: call the model once on inputs like these before."
            )
    args, kwargs = ((), {}) if inputs is None else as_call(inputs, model)
    for path, tensor in nested.tensors_in((args, kwargs)):
        if tensor.is_nested and tensor.layout is torch.strided:
            raise CaptureError(
                f"input {path.partition('.')[2]} is a nested tensor without layout=torch.jagged and has no shapes to "
                "record: make it with that layout, or give a padded tensor."
            )
    run = Run(model=model, args=args, kwargs=kwargs, workload=workload, composite=composite, observer=observer)
    return _climb(run, level) if inputs is not None else _first_that_runs(run, derive_inputs(model, workload), level)


def _first_that_runs(run: Run, calls: list[Call], level: Level | None) -> ModelGraph:
    """Capture with derived inputs: the first of several plausible calls that the model accepts."""
    refused: CaptureError | None = None
    for args, kwargs in calls:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in kwargs.items())
        try:
            graph = _climb(dataclasses.replace(run, args=args, kwargs=kwargs), level)
        except CaptureError as error:
            refused = refused or error
        else:
            return graph.with_notes((f"inputs derived from the config: {shapes}",))
    raise CaptureError(
        f"no inputs that the config suggests fit {type(run.model).__name__}; pass inputs=. {refused}"
    ) from refused


def _climb(run: Run, level: Level | None, real: bool = True) -> ModelGraph:
    """Try the levels from the top, or the one asked for; `real`: a model that has values may be run with them."""
    if level is not None:
        return _forced(run, level)
    try:
        return _at(run, "fake", ())
    except AutoshardError:
        raise
    except Exception as error:
        stopped = error
    notes: tuple[str, ...] = (f"level fake stopped at {place(stopped)}: {_reason(stopped)}",)
    by_values, empty = isinstance(stopped, VALUE_ERRORS), _without_values(run.model)
    if not real or empty:
        if not by_values:
            raise _refusal(run, stopped) from stopped
        notes += ("level real left out: the model has no values",) if empty else ()
        return _forced(run, "invented", notes)
    if run.composite and by_values:  # ranks are followed without values, as the whole then is
        with suppress(CaptureError):  # invented values led where none that the model computes do
            return _forced(run, "invented", notes)
    return _forced(run, "real", notes)


def _forced(run: Run, level: Level, notes: tuple[str, ...] = ()) -> ModelGraph:
    try:
        return _at(run, level, notes)
    except AutoshardError:
        raise
    except Exception as error:
        raise _refusal(run, error) from error


def _at(run: Run, level: Level, notes: tuple[str, ...]) -> ModelGraph:
    """One rung of the ladder."""
    assumed: dict[str, None] = {}

    call_log = run.call_log  # what is assumed may be asked by what stays: nothing of the model may be held by it

    def assume(what: str) -> None:
        assumed.setdefault(f"{what} ({calling_line()})")
        if call_log is not None:
            call_log.assumed(f"{what} ({calling_line()})")

    def record(decode: Decoding | None, level: Level = level) -> ModelGraph:
        if level == "real":
            return record_run(run, RealValues(clone), level, decode=decode)
        engine = FakeFloats(assume, invent=level == "invented", answer_argmax=decode == "generate",
                            small_floats=run.small_floats, ranks=run.ranks,
                            pass_guards=call_log is not None)  # fmt: skip
        graph = record_run(run, engine, level, decode=decode)
        if call_log is not None:
            call_log.left_out = engine.left_out
        return graph

    clone = sum(map(stored_bytes, {id(t): t for t in _tensors(run.model)}.values())) <= REAL_BYTES
    if level == "real" and _without_values(run.model):
        raise CaptureError("the level 'real' needs a model with values: this one is on meta, or fake.")
    attempts: list[tuple[Decoding, Level]] = []
    if run.workload.new_tokens and not run.workload.training:
        # What `generate` does with the logits belongs to no module: whoever analyses ops has those of forwards first.
        # Only `generate` can step a model whose state is in its modules, or whose step takes all tokens.
        attempts = [("step", level), ("generate", level)] if run.composite else [("generate", level), ("step", level)]
        if level == "fake" and clone and not run.composite and not _without_values(run.model):
            attempts.insert(1, ("generate", "real"))  # a search among beams asks for values
    for way, rung in attempts:
        try:
            return record(way, rung).with_notes((*notes, *assumed))
        except SpecError:
            raise
        except Exception as error:  # the forward alone may still be recorded; if not, that says why
            notes += (f"no cached step by {way}, level {rung}, stopped at {place(error)}: {_reason(error)}",)
    return record(None).with_notes((*notes, *assumed))


def _refusal(run: Run, error: Exception) -> CaptureError:
    """One paragraph: what the model said, where, and what would work."""
    path = getattr(error, MODULE_PATH, "")
    line = place(error)
    where = f"at {line}" if not path else f"in {path}" if line == NOWHERE else f"in {path}, at {line}"
    if isinstance(error, VALUE_ERRORS):
        advice = "Pass a model with real weights, so that it can be run."
    elif isinstance(error, NotImplementedError) and "flexattention" in str(error).lower().replace("_", ""):
        return CaptureError(
            f"{type(run.model).__name__} calls flex_attention ({where}), which can't be recorded. Use "
            'scaled_dot_product_attention; Transformers does with attn_implementation="sdpa".'
        )
    elif run.composite and any(file == torch.autograd.__file__ for file, _ in files_and_lines(error)):
        advice = "A forward that differentiates can be placed (strategy='balanced'), but not cut or divided."
    else:
        advice = f"Check that the inputs fit {type(run.model).__name__}.forward{_signature(run.model)}."
        if isinstance(error, TypeError) and run.kwargs and "keyword argument" in str(error):
            advice += " A dict of inputs is read as keyword arguments: to give the dict itself, put it in a tuple."
    return CaptureError(
        f"{type(run.model).__name__} could not be run with the inputs given: {_reason(error)} ({where}). {advice}"
    )


def _signature(model: nn.Module) -> str:
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return "(…)"
    return f"({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"


def _reason(error: BaseException) -> str:
    """The first lines of an error, as one."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 300 else text[:297] + "…"
    return text if isinstance(error, ValueNeeded) else f"{type(error).__name__}: {text}"


def _without_values(model: nn.Module) -> bool:
    return any(map(valueless, _tensors(model)))


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
