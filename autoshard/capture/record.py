"""The recorder: a dispatch mode that runs every ATen op through an engine and writes it into the log.

It sees ops below autograd, forward and backward alike, in the order in which they run. Closures that hold tensors would
keep them alive and falsify the lifetimes, so nothing here keeps a tensor beyond the op it belongs to.
"""

import gc
import operator
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from autoshard import nested
from autoshard.capture.allocations import AllocationLog
from autoshard.capture.calls import Calls
from autoshard.capture.decode import state_tensors
from autoshard.capture.fake import VALUE_ERRORS, ValueEngine
from autoshard.capture.flops import formulas
from autoshard.capture.graph import FOUND, UNKNOWN, Function, Op
from autoshard.capture.nodes import Nodes
from autoshard.capture.traits import Traits, swap_tensors, tensors_of, traits_of, written_by
from autoshard.capture.user_code import calling_code
from autoshard.common.packed import is_packed, is_packed_type, named_stored, stored_tensors
from autoshard.common.progress import tell
from autoshard.errors import CaptureError
from autoshard.torch_private import (
    DispatchMode,
    autograd_node,
    is_composite,
    no_modes,
    overrides_are_off,
    run_composite,
    untransformed,
)

_DEVICE = torch.ops.prim.device.default
_DETACH = torch.ops.aten.detach.default
_NONZERO = torch.ops.aten.nonzero.default
_CPU = torch.device("cpu")
TOLD_OPS = 64
"""Progress is told once in so many ops."""
LIFT_BYTES = 1 << 26
"""A constant up to this size is copied into the graph; a larger one is recorded without its content."""


class Recorder(DispatchMode):
    """Records ops, module calls and saved tensors into `log`.

    Attributes:
        calls: module calls.
        backward: set when backward begins; from then on ops are attributed through autograd.
        device_source: what `Op.device_source` of a factory called now would be; kept by `sources.DeviceSources`.
        moving: the op that comes next stands for a move to `device_source`; kept by the same.
        busy: an op is being run; what reads devices now is not the model.
        composite: composite ops come whole, those of `traits.WHOLE`; the paths of arguments and outputs are kept.
        state: values of the state that the last step of a generation returned.
        unpacked: address of the tensor that autograd just got back from a saved-tensor hook.
        call_log: set if calls and readings are noted, too.
        added_ops: ops that ran where no torch function is overridden.
        elsewhere: what other threads did of the run, in words.
    """

    def __init__(self, engine: ValueEngine, *, composite: bool = False) -> None:
        super().__init__()
        self.engine = engine
        self.composite = composite
        self.log = AllocationLog()
        self.calls = Calls(self.log)
        self.functions: list[Function] = []
        self.backward = False
        self.device_source = UNKNOWN
        self.moving = False
        self.busy = False
        self.unpacked: int | None = None
        self.call_log: Any = None
        self.added_ops: set[int] = set()
        self.elsewhere: list[str] = []
        self._lifted: list[tuple[weakref.ref[torch.Tensor], int]] = []  # constants, and their values
        self._overwritten: set[int] = set()  # storages of constants that were written
        self._nodes = Nodes()
        self._last_reader: dict[int, int] = {}  # parameter value -> forward op that read it last
        self._last_forward = -1
        self._parameters = 0
        self._formulas = formulas(composite)
        self._ops: dict[int, _KnownOp] = {}  # by address, for ops hash slowly
        self.state: tuple[int, ...] = ()

    # ---- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _DEVICE:
            return _CPU
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            kwargs = {**kwargs, "device": _CPU}
        op = self._ops.get(id(func)) or self._met(func)
        if op.traits.prim:
            return func(*args, **kwargs)
        if any(map(is_packed_type, types)) and any(map(is_packed, tensors_of(args, kwargs))):
            return NotImplemented  # it takes the op apart, and the ops on what is behind the face come here
        if self.composite and op.traits.in_parts:
            with self:
                return run_composite(func, args, kwargs)
        busy, self.busy = self.busy, True
        try:
            return self._run(op, args, kwargs)
        except VALUE_ERRORS:
            if not (self.composite and is_composite(func)):
                raise
            with self:  # in parts, as it usually runs, it may do with the values that are known
                return run_composite(func, args, kwargs)
        finally:
            self.busy = busy

    def _met(self, func: Any) -> "_KnownOp":
        """What is known of an op that was not met before."""
        # Graphs make this of the name themselves, each time.
        name, formula = func.__name__.replace(".", "_"), self._formulas.get(func.overloadpacket)
        known = self._ops[id(func)] = _KnownOp(traits=traits_of(func), name=name, formula=formula)
        return known

    def _run(self, op: "_KnownOp", args: tuple, kwargs: dict[str, Any]) -> Any:
        traits = op.traits
        func = traits.op
        if traits.lift:
            self.value_of(args[0])
            return args[0]
        unpacked, self.unpacked = self.unpacked, None
        if func is _DETACH and unpacked == id(args[0]):  # autograd wraps up what it got back: the same to all others
            out = self.engine.run(func, traits, [args[0]], args, kwargs)
            self.log.alias(out, self.value_of(args[0]))
            return out
        inputs = tensors_of(args, kwargs)
        values = [self.value_of(tensor) for tensor in inputs]
        if traits.writes or traits.unmarked:
            for tensor in written_by(traits, args, kwargs):
                self._note_write(self.value_of(tensor))
        out = self.engine.run(func, traits, inputs, args, kwargs)
        if isinstance(out, (torch.Tensor, list, tuple)) or traits.writes:
            self._record(op, inputs, values, out, args, kwargs)
            if self.call_log is not None:
                self.call_log.op()
                if func is _NONZERO and not self.engine.unknown(out):
                    self.log.noted(FOUND, out.clone())
        elif self.call_log is not None and traits.reads_value:
            return self.call_log.read(args, func, out)
        return out

    def value_of(self, tensor: torch.Tensor) -> int:
        """The value a tensor stands for; a tensor never seen before is a constant from outside and is copied.

        Modules called inside `torch.func.vmap` are given wrappers of what its ops work on.
        """
        value = self.log.find(tensor)
        if value is None:
            inner = untransformed(tensor)
            value = self._lift(tensor) if inner is tensor else self.value_of(inner)
        return value

    def enter(self, tensor: torch.Tensor, kind: Any, name: str) -> int:
        """Enter a parameter, buffer or input before the run."""
        node = self.log.fx_graph.placeholder(f"{kind}_{name}".replace(".", "_").replace("-", "_"))
        value = self.log.add(tensor, node, kind=kind, name=name)
        node.meta.update(kind=kind, name=name, value=value)
        if tensor.requires_grad:
            self.log.mark_differentiable(value)
        self._parameters = value + 1
        for path, stored in named_stored(tensor) if is_packed(tensor) else ():
            self.enter(stored, kind, f"{name}.{path}")
        return value

    def _lift(self, tensor: torch.Tensor) -> int:
        log = self.log
        if self.engine.made(tensor) and not log.knows_memory(tensor):
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} was made by operations that can't be recorded, in another "
                "thread or with modes switched off. Make it in the thread that calls forward, with modes as they are."
            )
        for stored in stored_tensors(tensor) if is_packed(tensor) else ():
            self.value_of(stored)
        content = None
        if type(tensor) is torch.Tensor and not tensor.is_meta and tensor.numel() * tensor.element_size() <= LIFT_BYTES:
            with no_modes():  # it may be met between ops: handed to a module, or returned by one
                content = tensor.detach().clone()
        node = log.constant_node()
        value = log.add(tensor, node, born=log.now, kind="constant")
        node.meta.update(kind="constant", name="", value=value)
        self._lifted.append((weakref.ref(tensor), value))
        if content is not None:
            log.contents[value] = content
        return value

    def _note_write(self, value: int) -> None:
        """Note a write into a tensor from outside; refuse it if its contents were too large to keep."""
        log = self.log
        storage = log.storage_of_value(value)
        if log.kind_of(storage) == "constant":
            lifted = [one for _, one in self._lifted if log.storage_of_value(one) == storage]
            if log.contents.keys().isdisjoint(lifted):
                where = self.calls.path_of(self.calls.current) or "the model"
                raise CaptureError(
                    f"{where} writes in place into a large tensor that is neither a parameter nor a buffer. Register "
                    "it as a buffer."
                )
            self._overwritten.add(storage)

    def restore_constants(self) -> None:
        """Write back what tensors from outside of the model held before ops wrote into them."""
        log = self.log
        with no_modes(), torch.no_grad():
            for reference, value in reversed(self._lifted):
                tensor, content = reference(), log.contents.get(value)
                if tensor is not None and content is not None and log.storage_of_value(value) in self._overwritten:
                    tensor.data.copy_(content)

    def refuse_elsewhere(self) -> None:
        """Raise CaptureError if other threads ran parts of the model."""
        if self.elsewhere:
            raise CaptureError(
                f"{self.elsewhere[0]}, which can't be recorded. Do this work in the thread that calls forward, and "
                "call the model in no other thread while it is planned for."
            )

    def _record(
        self, op: "_KnownOp", inputs: list[torch.Tensor], values: list[int], out: Any, args: tuple,
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        log, traits = self.log, op.traits
        index = log.now
        if index % TOLD_OPS == 0:
            tell("ops", index)
        if self.composite and overrides_are_off():
            self.added_ops.add(index)
        call, forward = self._attribute(index, values)
        self._note_history(inputs, values)
        lookup = {id(tensor): log.nodes[value] for tensor, value in zip(inputs, values, strict=True)}

        def node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
            return lookup[id(tensor)]

        # Arguments are set afterwards, since `create_node` looks for symbolic numbers among those that it is given.
        node = log.fx_graph.create_node("call_function", traits.op, name=op.name)
        # Nor does the node's own way of setting them look up what nodes of this kind there are.
        object.__setattr__(node, "args", tuple([swap_tensors(value, node_of) for value in args]))
        if kwargs:
            object.__setattr__(node, "kwargs", {name: swap_tensors(value, node_of) for name, value in kwargs.items()})
        written = written_by(traits, args, kwargs) if traits.writes or traits.unmarked else ()
        mutates = tuple([self.value_of(tensor) for tensor in written])
        for value in mutates:
            self._nodes.written(log.storage_of_value(value), index)
        outputs = []
        for position, result in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
            if not isinstance(result, torch.Tensor):
                continue
            known = log.find(result)
            if known is None:
                made = node
                if result is not out:
                    made = log.fx_graph.create_node("call_function", operator.getitem)
                    made.args = (node, position)
                known = log.add(result, made, op=index, born=index)
                if not traits.view and result.layout is torch.strided and not result.is_nested:
                    made.meta["stride"] = result.stride()
            outputs.append(known)
        log.ops.append(
            Op(
                index=index,
                target=traits.op,
                call=call,
                inputs=tuple(values),
                outputs=tuple(outputs),
                mutates=mutates,
                backward=self.backward,
                forward=forward,
                node=node,
                code=("", 0, "") if self.backward else calling_code(),
                device_source=self.device_source if self.moving or not inputs else UNKNOWN,
                flops=int(op.formula(*args, **kwargs, out_val=out)) if op.formula is not None else 0,
            )
        )

    def _attribute(self, index: int, values: list[int]) -> tuple[int, int]:
        """(call, forward op) of the op about to be recorded. An active module during backward is a recompute."""
        if not self.backward or self.calls.running:
            for value in values:
                if value < self._parameters:
                    self._last_reader[value] = index
            return self.calls.current, -1
        forward = self.op_of_node()
        if forward is None:
            variable = getattr(autograd_node(), "variable", None)
            known = self.log.find(variable) if variable is not None else None
            forward = self._last_forward if known is None else self._last_reader.get(known, self._last_forward)
        if forward < 0:
            return self.calls.root, -1
        self._last_forward = forward
        return self.log.ops[forward].call, forward

    def _note_history(self, inputs: list[torch.Tensor], values: list[int]) -> None:
        """Note which of the tensors that an op reads are differentiable, and for which ops their nodes were made."""
        enabled = torch.is_grad_enabled() or self.backward
        for tensor, value in zip(inputs, values, strict=True):
            if tensor.requires_grad:
                self.note_node(tensor, value)
                if enabled:
                    self.log.mark_differentiable(value)

    def note_node(self, tensor: torch.Tensor, value: int) -> None:
        """Note for which op the node of a tensor was made, also for those that are run again in a backward."""
        op = self._nodes.last_op(self.log.storage_of_value(value), self.log.op_of_value(value))
        if op >= 0 and self.log.ops[op].forward < 0 and tensor.grad_fn is not None:
            self._nodes.note(tensor.grad_fn, op)

    def op_of_node(self) -> int | None:
        """The op for which the node was made that runs now; None outside of a backward, and where that is not known."""
        node = autograd_node()
        return None if node is None else self._nodes.op_of(node)

    def alive_after(self, gradients: Iterable[int]) -> tuple[int, ...]:
        """Values made by ops that are still there: outputs, what modules keep, but not the parameters' gradients."""
        values = self.log.values()
        gone = {values[value].storage for value in gradients}
        return tuple(v for v in self.log.alive() if values[v].op >= 0 and values[v].storage not in gone)

    def refuse_kept(self) -> None:
        """Raise CaptureError if somebody still has a tensor without values that an op made: the next forward would."""
        left = [row for tensor, row in self.log.tensors_of_ops() if self.engine.unknown(tensor)]
        if left:
            gc.collect()  # most are in cycles that nobody has
            left = [row for tensor, row in self.log.tensors_of_ops() if self.engine.unknown(tensor)]
        if left:
            value = self.log.values()[left[0]]
            op = self.log.ops[value.op]
            where = self.calls.path_of(op.call) or "the model"
            raise CaptureError(
                f"a tensor of shape {value.shape} that {op.target} made in {where} was kept outside of the model while "
                "it was recorded, where it has no values. Call the model once before, so that this is filled already, "
                "or keep it on a module."
            )

    def note_function(self, begin: int, args: tuple, kwargs: dict[str, Any], attends: bool = False) -> None:
        """Remember a torch function that ran ops from `begin` on, if they don't tell its tensor arguments."""
        if self.backward and not self.calls.running:
            return
        tensors = nested.flat_tensors((args, kwargs) if kwargs else args)
        if len(tensors) > 1:
            inputs = tuple(value for tensor in tensors if (value := self.log.find(tensor)) is not None)
            if len(inputs) > 1 and (self.log.now > begin + 1 or inputs != self.log.ops[begin].inputs):
                self.functions.append(Function(begin=begin, end=self.log.now, inputs=inputs, attends=attends))

    def saved(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(value, op that comes next) of what autograd hands to a pack hook.

        It hands over the tensor or a detached alias of it; such a `detach` is no op of the model's and is taken back.
        """
        log = self.log
        value = self.value_of(tensor)
        last = log.ops[-1] if log.ops else None
        if last is not None and last.target is _DETACH and last.outputs == (value,):
            log.drop_last_op(tensor)
            value = last.inputs[0]
            log.alias(tensor, value)
        return value, log.now

    # ---- module calls

    def begin_call(self, path: str, args: tuple, kwargs: dict[str, Any]) -> int:
        direct = {self.value_of(t) for item in (*args, *kwargs.values()) for t in _direct(item)}
        inputs = tuple([self.value_of(tensor) for tensor in nested.flat_tensors((args, kwargs))])
        paths = tuple([path for path, _ in nested.tensors_in((args, kwargs))]) if self.composite else ()
        contained = tuple([value for value in inputs if value not in direct])
        return self.calls.begin(path, inputs, contained, paths, self.backward)

    def end_call(self, row: int, output: Any) -> int:
        """Close a call and return its first op; one that raised has no outputs."""
        outputs = []
        for tensor in nested.flat_tensors(output):
            value = self.value_of(tensor)
            outputs.append(value)
            if tensor.requires_grad:
                self.log.mark_differentiable(value)
        paths = tuple([path for path, _ in nested.tensors_in(output)]) if self.composite else ()
        return self.calls.end(row, tuple(outputs), paths)

    def note_state(self, module: torch.nn.Module, output: Any) -> None:
        """Remember the state in the output of a call that just ended, if it was called from outside all modules."""
        if not self.calls.running and output is not None:
            found = [self.log.find(tensor) for tensor in state_tensors(module, output)]
            self.state = tuple([value for value in found if value is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownOp:
    """An op: what its schema says, what its nodes are called, and what its FLOPs are, if it has any."""

    traits: Traits
    name: str
    formula: Any


def _direct(item: Any) -> list[torch.Tensor]:
    """The tensors that hooks move: an argument itself, or in nested tuples of it."""
    if isinstance(item, torch.Tensor):
        return [item]
    return [tensor for part in item for tensor in _direct(part)] if isinstance(item, tuple) else []
