"""One recorded run of a model under one engine: forward, loss, backward, and the graph made of what was seen."""

import copy
import inspect
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.backward import saved_tensor_hooks, training_loss
from autoshard.capture.call_log import CallLog
from autoshard.capture.decode import Decoding, opaque_tensors, prompt_arguments, run_decode
from autoshard.capture.fake import SMALL_FLOATS, Ranks, RealValues, ValueEngine, silenced
from autoshard.capture.graph import Level, ModelGraph, TensorInfo
from autoshard.capture.inputs import Call
from autoshard.capture.material import placeholders, put_placeholders
from autoshard.capture.names import Row, module_table, tensor_rows
from autoshard.capture.observe import Observer
from autoshard.capture.record import Recorder
from autoshard.capture.sites import Sites
from autoshard.capture.sources import DeviceSources
from autoshard.capture.threads import watched_threads
from autoshard.capture.user_code import drop_frames
from autoshard.common.collector import no_collection
from autoshard.common.fingerprint import fingerprint
from autoshard.common.model_state import undisturbed
from autoshard.common.own_tensors import OF_EVERY_MODULE, own_tensors, put_tensor
from autoshard.common.packed import stored_bytes
from autoshard.errors import CaptureError, SpecError
from autoshard.plan.workload import Workload
from autoshard.torch_private import (
    autograd_functions,
    below_autograd,
    looks_for_hooks,
    looks_for_overrides,
    no_dispatch_modes,
    no_overrides,
)

Find = Callable[[torch.Tensor], int | None]
MODULE_PATH = "autoshard_module_path"
"""The attribute of an error that tells the module in which it came up."""
MOST_OPS = 2_000_000
"""Longer loops are not recorded: that takes some 7 minutes, and 16 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is run: a model, its arguments and what for; `composite` keeps composite ops whole.

    `observer` is told of every call of a module; `call_log`, of a forward, of more (see there).
    `small_floats`: most elements of floats made by the code that keep their values. `at_end` is called while the model
    is as the forward has left it, with what finds the values of tensors.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    workload: Workload
    composite: bool = False
    observer: Observer | None = None
    call_log: CallLog | None = None
    small_floats: int = SMALL_FLOATS
    ranks: Ranks = "all"
    at_end: Callable[[Find], None] | None = None


def record_run(run: Run, engine: ValueEngine, level: Level, *, decode: Decoding | None = None) -> ModelGraph:
    """Run a model once under a recorder and return the graph; the model is as before when this returns or raises.

    With `decode` given the run is a prompt and one step after it, else a forward, and backward if the workload trains.
    No garbage is collected, which would end lifetimes at random. Dispatch modes of others do not see runs on shapes.
    Raises CaptureError if somebody keeps a tensor without values that it made, or other threads ran parts of it.
    """
    recorder = Recorder(engine, composite=run.composite)
    try:
        with no_collection(), nullcontext() if isinstance(engine, RealValues) else no_dispatch_modes():
            recorded = partial(_recorded, run, recorder, level, decode)
            graph = undisturbed(run.model, (run.args, run.kwargs), recorded)
        if run.call_log is not None:
            run.call_log.let_go()
        recorder.refuse_elsewhere()
    except Exception as error:
        drop_frames(error)
        recorder.refuse_elsewhere()
        raise
    finally:
        torch.clear_autocast_cache()  # within the caller's autocast it has casts of what stood in for parameters
        recorder.restore_constants()
        if run.call_log is None:  # which keeps what calls gave; the same forward was recorded without one before
            recorder.refuse_kept()
    return graph


def _recorded(run: Run, recorder: Recorder, level: Level, decode: Decoding | None) -> ModelGraph:
    model, training = run.model, run.workload.training
    modules = module_table(model)
    rows = tensor_rows(model)
    mark = fingerprint(model)
    if run.observer is not None:
        run.observer.begin(recorder)
    if run.call_log is not None:
        run.call_log.begin(recorder)
    with ExitStack() as stack:
        stack.enter_context(silenced())
        stack.enter_context(own_random_numbers())
        make = placeholders(recorder.engine)  # it keeps the memory of buffers that the model replaces
        put_placeholders(model, make)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(training if run.call_log is None else run.call_log.grad))
        if run.composite:
            stack.enter_context(below_autograd())
        tensors = _enter_tensors(model, rows, recorder)
        given: Call = (run.args, run.kwargs)
        if decode is not None:
            given = _prompts(run), {}
        args, kwargs, inputs = _enter_inputs(given, recorder)
        if run.call_log is not None:
            stack.enter_context(autograd_functions(run.call_log.call_function))
        stack.enter_context(watched_threads(recorder.elsewhere.append))
        _tell_calls(model, recorder, run, decode is not None)
        stack.enter_context(applied_to_placeholders())
        sources = stack.enter_context(Sites(recorder) if run.composite else DeviceSources(recorder))
        stack.enter_context(recorder)
        if training:
            stack.enter_context(saved_tensor_hooks(recorder))
        seen = _run_model(run, recorder, args, kwargs, decode)
        if run.at_end is not None:
            run.at_end(recorder.log.find)
        return _graph_of(
            recorder, **seen, kept=_kept(model, recorder), model=weakref.ref(model), level=level, modules=modules,
            tensors=tensors, inputs=inputs, fingerprint=mark, training=training,
            sites=sources.found() if isinstance(sources, Sites) else (),
            measured=frozenset(sources.measured) if isinstance(sources, Sites) else frozenset(),
            exchanged=tuple(sources.exchanged) if isinstance(sources, Sites) else (),
        )  # fmt: skip


def _run_model(
    run: Run, recorder: Recorder, args: tuple, kwargs: dict[str, Any], decode: Decoding | None
) -> dict[str, Any]:
    """Run the forward, or the generation, and the backward; return what `ModelGraph` says of its results and phases.

    What is alive at the end stays so in the log.
    """
    model, log = run.model, recorder.log
    gradients: dict[str, int] = {}
    plain: tuple[tuple[str, Any], ...] = ()
    sealed: tuple[tuple[str, str], ...] = ()
    if decode is None:
        output = model(*args, **kwargs)
        _refuse_generator(model, output)
        phases = [("forward", 0, log.now)]
        held = list(opaque_tensors(output))
        sealed = tuple((path, type(leaf).__name__) for path, leaf in nested.sealed_in(output))
        plain = tuple((path, leaf) for path, leaf in nested.leaves_in(output) if isinstance(leaf, (int, float, str)))
    else:
        output, held = run_decode(model, list(args), decode, recorder.calls.begin_context), []
        phases = recorder.calls.prompt_and_step()
    outputs = recorder.calls.root_outputs() if decode is None else recorder.calls.step_outputs()
    if run.workload.training:
        loss = training_loss(output, type(model).__name__)
        phases = [("forward", 0, log.now)]  # the loss belongs to it
        torch.clear_autocast_cache()  # as where autocast ends, which it does before a backward
        recorder.note_node(loss, recorder.value_of(loss))
        recorder.backward = True
        torch.autograd.backward(loss)
        phases.append(("backward", phases[0][2], log.now))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = recorder.value_of(parameter.grad)
    log.close()
    found = [value for tensor in held if (value := log.find(tensor)) is not None]
    state = tuple(dict.fromkeys(found if decode is None else recorder.state))
    return {
        "outputs": outputs, "state": state, "phases": tuple(phases), "gradients": tuple(gradients.items()),
        "plain": plain, "sealed": sealed,
    }  # fmt: skip


def _graph_of(recorder: Recorder, **known: Any) -> ModelGraph:
    """Make the graph of what was recorded; `known`: fields that are known."""
    log, gradients = recorder.log, dict(known["gradients"])
    outputs = tuple(log.nodes[value] for value in known["outputs"])
    log.fx_graph.output((outputs, {name: log.nodes[value] for name, value in gradients.items()}))
    for node in log.fx_graph.nodes:
        if node.op == "placeholder" and node.meta["value"] in log.contents:
            node.meta["content"] = log.contents[node.meta["value"]]
    return ModelGraph(
        fx_graph=log.fx_graph, calls=recorder.calls.finished(), ops=tuple(log.ops), values=log.values(),
        storages=log.storages(), saves=log.saves(), notes=(), functions=tuple(recorder.functions),
        backward_begin=next((begin for name, begin, _ in known["phases"] if name == "backward"), log.now),
        alive_after=recorder.alive_after(gradients.values()), added_ops=frozenset(recorder.added_ops), **known,
    )  # fmt: skip


def _kept(model: nn.Module, recorder: Recorder) -> frozenset[int]:
    """Storages of what ops made that modules have on attributes."""
    log = recorder.log
    held = [
        item for module in model.modules() for name, item in vars(module).items()
        if name not in OF_EVERY_MODULE and isinstance(item, (torch.Tensor, list, tuple, dict))
    ]  # fmt: skip
    values = [value for tensor in nested.flat_tensors(held) if (value := log.find(tensor)) is not None]
    storages = {log.storage_of_value(value) for value in values}
    return frozenset(storage for storage in storages if log.kind_of(storage) == "activation")


def _enter_tensors(model: nn.Module, rows: list[Row], recorder: Recorder) -> tuple[TensorInfo, ...]:
    table: list[TensorInfo] = []
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    log = recorder.log
    for name, module, kind in rows:
        tensor = tensors[name]
        value = log.find(tensor)
        if value is None:
            value = recorder.enter(tensor, kind, name)
        table.append(
            TensorInfo(
                name=name,
                module=module,
                kind=kind,
                value=value,
                storage=log.storage_of_value(value),
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                nbytes=stored_bytes(tensor),
                trainable=tensor.requires_grad,
            )
        )
    return tuple(table)


def _enter_inputs(given: Call, recorder: Recorder) -> tuple[tuple, dict[str, Any], tuple[int, ...]]:
    """Make arguments the run may write into, enter their tensors; return them and the values `tensors_in` finds.

    Containers and objects of unknown classes (a cache) are copied whole, so the caller's stay as they are.
    """
    make = placeholders(recorder.engine)
    memo: dict[int, Any] = {}
    for tensor in [*(tensor for _, tensor in nested.tensors_in(given)), *opaque_tensors(given)]:
        if id(tensor) not in memo:
            memo[id(tensor)] = make(tensor, "input")
    placeholder = dict(memo)
    try:
        args, kwargs = copy.deepcopy(given, memo)
    except Exception:  # something in there can't be copied (a lock, a module with state): it is passed as it is
        args, kwargs = nested.map_tensors(given, lambda tensor: placeholder[id(tensor)])
    inputs = []
    for path, tensor in nested.tensors_in((args, kwargs)):
        value = recorder.log.find(tensor)
        inputs.append(recorder.enter(tensor, "input", path) if value is None else value)
    for tensor in opaque_tensors((args, kwargs)):
        if recorder.log.find(tensor) is None:
            value = recorder.enter(tensor, "input", "inside_an_object")
            if type(tensor) is torch.Tensor:
                recorder.log.contents[value] = tensor.detach().clone()
    return args, kwargs, tuple(inputs)


def _prompts(run: Run) -> tuple[dict[str, Any], ...]:
    """The prompt of a generation and, if that is another, the context that its last step finds."""
    new = run.workload.new_tokens
    return tuple(prompt_arguments(run.model, run.args, run.kwargs, n) for n in ((0,) if new < 3 else (0, new - 3)))


def _refuse_generator(model: nn.Module, output: Any) -> None:
    if inspect.isgenerator(output) or inspect.isasyncgen(output):
        code = output.gi_code if inspect.isgenerator(output) else output.ag_code
        raise CaptureError(
            f"{type(model).__name__}.forward returns a generator ({code.co_filename}:{code.co_firstlineno}): it "
            "has not run when forward returns, so it can't be captured. Return a list or a tuple instead."
        )


@contextmanager
def own_random_numbers(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """What is drawn inside leaves the generators of Python, NumPy and torch (CPU and `devices`) as they were."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for device in devices:
                if device.type != "cpu":
                    stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _fused(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Let a fused layer take its fused path, as without modes: in eval mode, and with nothing to differentiate."""
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
    with nullcontext() if module.training or trained else no_overrides():
        return forward(*args, **kwargs)


@contextmanager
def applied_to_placeholders() -> Iterator[None]:
    """Inside, in this thread, `.to()` of a module puts new tensors into the places of placeholders.

    torch would exchange what is fake with `swap_tensors`, whatever `torch.__future__` says: that refuses parameters
    that the log refers to weakly, or that were used already.
    """
    apply, thread = nn.Module._apply, threading.get_ident()

    def plain_apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        if threading.get_ident() != thread:
            return apply(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, tensor, kind in list(own_tensors(self)):
            with torch.no_grad():
                changed = fn(tensor)
            if changed is not tensor:
                if isinstance(tensor, nn.Parameter):
                    changed = nn.Parameter(changed, tensor.requires_grad)
                put_tensor(self, name, changed, kind)
        return self

    nn.Module._apply = plain_apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def _refuse_loop(path: str, alike: int, ops: int) -> None:
    """Raise `SpecError` if so many ops of one module are too many for all that are of its kind."""
    if ops * alike > MOST_OPS:
        raise SpecError(
            f"{path or 'the model'} runs {ops:,} ops by itself, in a loop over tokens, say, and {alike} modules are of "
            f"its kind: more than the {MOST_OPS:,} that are recorded. Give sequences (--seq) of at most "
            f"{MOST_OPS / ops / alike:.0%} of the length."
        )


def _tell_calls(model: nn.Module, recorder: Recorder, run: Run, generates: bool) -> None:
    """Have the first and the last hook of every module tell the recorder of its calls in this thread.

    Modules below one that looks for hooks get something around their forwards instead: torch's encoder layers leave
    their fused path where there are hooks. `undisturbed` takes off all of it.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    hookless = {id(part) for module in model.modules() if looks_for_hooks(module) for part in module.modules()}
    alike = Counter(map(type, model.modules()))
    notes = [one.note for one in (run.observer, run.call_log) if one is not None]
    thread = threading.get_ident()
    begun: dict[int, list[tuple[int, BaseException | None]]] = {key: [] for key in paths}

    def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        path = paths.get(id(module))
        if path is not None and threading.get_ident() != thread:
            recorder.elsewhere.append(f"{path or 'the model'} was called in another thread")
        elif path is not None:  # else a copy, which has its hooks
            for note in notes:
                note(path, args, kwargs)
            begun[id(module)].append((recorder.begin_call(path, args, kwargs), sys.exception()))

    def end(module: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() != thread or not begun.get(id(module)):
            return
        (row, handled), error, path = begun[id(module)].pop(), sys.exception(), paths[id(module)]
        if error is not handled:  # the call ends with it
            output = None
            if not hasattr(error, MODULE_PATH):  # it is the innermost one
                setattr(error, MODULE_PATH, path)
        first = recorder.end_call(row, output)
        if run.call_log is not None:
            run.call_log.ended(row, output)
        if generates:
            recorder.note_state(module, output)
        if output is not None and (recorder.log.now - first) * alike[type(module)] > MOST_OPS:
            _refuse_loop(path, alike[type(module)], sum(op.call == row for op in recorder.log.ops[first:]))

    def told(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        begin(module, args, kwargs)
        output = None
        try:
            output = forward(*args, **kwargs)
            return output
        finally:
            end(module, args, output)

    for module in model.modules():
        # Sites are what modes will see when the model runs, and a mode makes those modules leave their fused path.
        if not recorder.composite and looks_for_overrides(module):
            _surround(module, _fused)
        if id(module) in hookless:
            _surround(module, told)
        else:
            nn.Module.register_forward_pre_hook(module, begin, prepend=True, with_kwargs=True)
            nn.Module.register_forward_hook(module, end, always_call=True)


def _surround(module: nn.Module, around: Callable[..., Any]) -> None:
    """Have a function called in place of a forward, with that and the module before the arguments."""
    vars(module)["forward"] = update_wrapper(partial(around, module.forward, module), module.forward)
