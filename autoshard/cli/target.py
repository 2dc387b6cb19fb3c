"""TARGET of the commands: a model.py, a Hugging Face directory, config.json or name, made a model and its inputs."""

import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autoshard.errors import AutoshardError, SpecError
from autoshard.nested import tensors_in
from autoshard.plan.workload import Workload

MOST_CALLS = 4
"""Of a traceback."""
_OWN = str(Path(__file__).parents[1]) + os.sep
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]*\w").fullmatch
SHAPE_ARGUMENTS = ("batch_size", "sequence_length")


class LengthError(SpecError):
    """The inputs of the user's file can't have the length that is asked for."""


class UserCodeError(AutoshardError):
    """The user's file raised; the message holds the part of the traceback that is theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a command works on.

    Attributes:
        title: how it is called in reports.
        inputs: what capture takes; None: derived from the model's configuration and the workload.
        notes: what a person should know about how it was built.
        hint: what to do if the model can't be run.
        assumed: what was assumed of its inputs, for who is told that it does not fit.
        sizes: the workload with the batch and length of the inputs, as far as they are known and can be others.
    """

    model: nn.Module
    title: str
    inputs: Any
    workload: Workload
    notes: tuple[str, ...] = ()
    hint: str = ""
    assumed: str = ""
    sizes: Workload | None = None


def load_target(text: str, workload: Workload, *, with_weights: bool = False) -> Target:
    """Build what TARGET names, on meta unless `with_weights`.

    Raises `SpecError` for a target that makes no sense, `UserCodeError` for what the user's file raises.
    """
    head, colon, name = text.rpartition(":")
    path = Path(head) if colon and head.endswith(".py") else Path(text)
    if path.suffix == ".py" and not path.is_dir():
        return _from_file(path, name if path == Path(head) and colon else "model", workload, with_weights)
    if path.is_dir() or path.suffix == ".json":
        return _from_huggingface(path, workload, with_weights)
    if not path.exists():
        from autoshard.integrations.huggingface import cached_config

        cached = cached_config(text)
        if cached is not None:
            return replace(_from_huggingface(cached.parent, workload, with_weights), title=text)
    exists = "is neither" if path.exists() else "does not exist; a target is"
    fetch = f" A model of the hub is found once it was downloaded: hf download {text}" if _HUB_NAME(text) else ""
    raise SpecError(
        f"{text[:200]!r} {exists} a model.py, a model.py:name, a Hugging Face directory, a config.json, or the name of "
        f"a model in the Hugging Face cache.{fetch}"
    )


def _from_huggingface(path: Path, workload: Workload, with_weights: bool) -> Target:
    from autoshard.integrations.huggingface import config_file, load_model, quantization_note

    title = path.name if path.is_dir() or path.name != "config.json" else path.absolute().parent.name
    config_file(path)
    model = load_model(path, with_weights=with_weights).train(workload.training)
    note = quantization_note(model)
    shaped = _shaped(workload, model)
    notes = (note,) if note else ()
    tokens = shaped.sequence_length if workload.sequence_length is None else None
    assumed = f"Sequences of {tokens} tokens were assumed; give another length with --seq." if tokens else ""
    return Target(
        model=model, title=title or str(path), inputs=None, workload=shaped, notes=notes, assumed=assumed, sizes=shaped
    )  # fmt: skip


def _shaped(workload: Workload, model: nn.Module) -> Workload:
    """The workload with the shape that inputs derived from the configuration will have, so that it can be printed."""
    from autoshard.capture.inputs import sequence_length

    length = workload.sequence_length
    if length is None and getattr(model, "main_input_name", "") == "input_ids":
        length = sequence_length(model.config, workload)
    return replace(workload, batch_size=workload.batch_size or 1, sequence_length=length)


def _from_file(path: Path, name: str, workload: Workload, with_weights: bool) -> Target:
    from autoshard.integrations.skeleton import without_weights

    if not path.is_file():
        raise SpecError(f"{path} does not exist.")
    if not name.isidentifier():
        raise SpecError(f"{name!r} is not a name in {path}. Write {path}:model.")
    notes: tuple[str, ...] = ()
    if with_weights:
        module, model = _build(path, name)
    else:
        try:
            with without_weights() as skeleton:
                module, model = _build(path, name)
        except UserCodeError as error:
            if not skeleton.parameters:
                raise
            # It may have failed because its parameters have no values: try it as it is meant.
            module, model = _build(path, name)
            raised = str(error).splitlines()[0].partition(" raised ")[2]
            notes = (f"{path.name} was run with its weights, because without them it stopped: {raised}",)
    inputs = _inputs(path, module, workload)
    title = f"{path}:{name}" if name != "model" else str(path)
    hint = f"Define example_inputs in {path}: a value, or a function that returns one." if inputs is None else ""
    sizes = _with_defaults(module, workload)
    return Target(
        model=model, title=title, inputs=inputs, workload=workload, notes=notes, hint=hint, sizes=sizes
    )  # fmt: skip


def _build(path: Path, name: str) -> tuple[ModuleType, nn.Module]:
    """Run the file and get the model it names, an `nn.Module` or a callable that returns one."""
    module = _run_file(path)
    if not hasattr(module, name):
        models = [key for key, value in vars(module).items() if isinstance(value, nn.Module)]
        instead = f"It has {', '.join(models[:4])}: write {path}:{models[0]}." if models else f"Define {name} in it."
        raise SpecError(f"there is no {name!r} in {path}. {instead}")
    model = getattr(module, name)
    if not isinstance(model, nn.Module) and callable(model):
        model = _call(path, f"{name}()", model)
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"{name!r} in {path} is a {type(model).__name__}. "
            f"It must be an nn.Module, or a function without arguments that returns one."
        )
    return module, model


def _run_file(path: Path) -> ModuleType:
    """Import a file under its own name, with its folder on the path, as `python file` would."""
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"_autoshard_target_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    _call(path, "the code", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _inputs(path: Path, module: ModuleType, workload: Workload) -> Any:
    """`example_inputs` beside the model; if it is callable it may take batch_size and sequence_length.

    Inputs of another batch than the workload's are examples: planning repeats their rows.
    """
    given = {name: getattr(workload, name) for name in SHAPE_ARGUMENTS if getattr(workload, name) is not None}
    if not hasattr(module, "example_inputs"):
        return None
    inputs = module.example_inputs
    wanted: dict[str, int] = {}
    if inspect.isfunction(inputs):
        names = inspect.signature(inputs).parameters
        wanted = {name: value for name, value in given.items() if name in names}
        inputs = _call(path, "example_inputs()", lambda: module.example_inputs(**wanted))
    length = given.get("sequence_length")
    there = any(length in tensor.shape for _, tensor in tensors_in(inputs))  # in a plan of such inputs, say
    if length is not None and "sequence_length" not in wanted and not there:
        raise LengthError(
            f"--seq has no effect: the lengths are those of example_inputs in {path}. Leave it out, or write "
            "def example_inputs(sequence_length): there."
        )
    return inputs


def _with_defaults(module: ModuleType, workload: Workload) -> Workload:
    """The workload with the sizes that `example_inputs` has where none are given."""
    inputs = getattr(module, "example_inputs", None)
    names = inspect.signature(inputs).parameters if inspect.isfunction(inputs) else {}
    defaults = {
        name: names[name].default for name in SHAPE_ARGUMENTS
        if name in names and type(names[name].default) is int and getattr(workload, name) is None
    }  # fmt: skip
    return replace(workload, **defaults)


def of_other_size(text: str, target: Target, workload: Workload) -> Target:
    """Return a target with inputs for another batch or length. Raises what `load_target` raises."""
    return replace(target, workload=workload) if target.inputs is None else load_target(text, workload)


def _call(path: Path, what: str, run: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes one short error with its own traceback."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{what} of {path} raised {_own_traceback(error, path)}") from None


def _own_traceback(error: BaseException, path: Path) -> str:
    """What was raised, and the calls from the user's file on, without ours."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [i for i, one in enumerate(frames) if os.path.abspath(one.filename) == os.path.abspath(path)]
    frames = [one for one in frames[own[0] :] if not one.filename.startswith(_OWN)] if own else []
    if len(frames) > MOST_CALLS:  # the outermost and the innermost tell most
        frames = [*frames[: MOST_CALLS // 2], *frames[-MOST_CALLS // 2 :]]
    raised = "".join(traceback.format_exception_only(error)).strip()
    return f"{raised}\n{''.join(traceback.format_list(frames))}".rstrip()
