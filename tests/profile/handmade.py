"""Write a ModelGraph by hand, op by op, with the lifetimes said out loud."""

from dataclasses import replace

import torch
import torch.fx

from autoshard.capture.graph import UNKNOWN, Call, ModelGraph, ModuleInfo, Op, Save, Storage, TensorInfo, Value

FLOAT = torch.float32


class Builder:
    """Collects rows. Sizes are numbers of float32 elements, so bytes are four times them."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.modules: list[ModuleInfo] = []
        self.tensors: list[TensorInfo] = []
        self.saves: list[Save] = []
        self.phases: list[tuple[str, int, int]] = []
        self.stack: list[int] = []
        self.backward_begin = -1
        self.gradients: list[tuple[str, int]] = []

    def module(self, path: str, **parameters: int) -> dict[str, int]:
        """Register a module with parameters of these sizes; returns name -> value."""
        made = {}
        for name, size in parameters.items():
            full = f"{path}.{name}" if path else name
            made[name] = self._value((size,), "parameter", name=full)
            value = self.values[made[name]]
            self.tensors.append(
                TensorInfo(
                    name=full, module=path, kind="parameter", value=value.index, storage=value.storage,
                    shape=value.shape, dtype=FLOAT, nbytes=value.nbytes, trainable=True,
                )
            )  # fmt: skip
        self.modules.append(ModuleInfo(path=path, class_name="Hand", tensors=tuple(parameters)))
        return made

    def tie(self, path: str, name: str, value: int) -> None:
        """Register an existing parameter under one more name."""
        row = self.values[value]
        self.tensors.append(
            TensorInfo(
                name=f"{path}.{name}", module=path, kind="parameter", value=value, storage=row.storage,
                shape=row.shape, dtype=FLOAT, nbytes=row.nbytes, trainable=True,
            )
        )  # fmt: skip

    def input(self, size: int) -> int:
        return self._value((size,), "input")

    def constant(self, size: int) -> int:
        return self._value((size,), "constant")

    def begin(self, path: str, *inputs: int, contained: tuple[int, ...] = ()) -> None:
        parent = self.stack[-1] if self.stack else -1
        call = Call(
            index=len(self.calls), path=path, parent=parent, begin=len(self.ops), end=-1, inputs=inputs, outputs=(),
            backward=self.backward_begin >= 0, contained=contained,
        )  # fmt: skip
        self.calls.append(call)
        self.stack.append(call.index)

    def end(self, *outputs: int) -> None:
        index = self.stack.pop()
        self.calls[index] = replace(self.calls[index], end=len(self.ops), outputs=outputs)

    def op(self, *inputs: int, size: int = 0, view_of: int = -1, mutates: tuple[int, ...] = (), source: int = UNKNOWN,
           flops: int = 0, forward: int = -1) -> int:  # fmt: skip
        """An op with one output of `size` elements; a view, or the mutated argument itself, if so said."""
        index = len(self.ops)
        if mutates:
            out = mutates[0]
        elif view_of >= 0:
            out = self._value((size,), "activation", storage=self.values[view_of].storage)
        else:
            out = self._value((size,), "activation")
        call = self.stack[-1] if self.stack else (self.ops[forward].call if forward >= 0 else 0)
        self.ops.append(
            Op(
                index=index, target="hand", call=call, inputs=inputs, outputs=(out,), mutates=mutates, flops=flops,
                device_source=source, backward=self.backward_begin >= 0, forward=forward,
            )
        )  # fmt: skip
        return out

    def dies(self, *values: int) -> None:
        """Python lets go of these now; a storage dies with its last value unless autograd holds it."""
        for value in values:
            self.values[value] = replace(self.values[value], died=len(self.ops))

    def save(self, value: int) -> int:
        """Autograd keeps a value for the op just written; returns the row to release."""
        self.saves.append(Save(value=value, op=len(self.ops) - 1, released=-1))
        return len(self.saves) - 1

    def release(self, *saves: int) -> None:
        for save in saves:
            self.saves[save] = replace(self.saves[save], released=len(self.ops))

    def backward(self) -> None:
        self.backward_begin = len(self.ops)

    def differentiable(self, *values: int) -> None:
        """Say that these require grad."""
        for value in values:
            self.values[value] = replace(self.values[value], requires_grad=True)

    def gradient(self, name: str, value: int) -> None:
        """Say that `value` is what backward leaves in the parameter's `.grad`."""
        self.gradients.append((name, value))

    def graph(self, *outputs: int, state: tuple[int, ...] = ()) -> ModelGraph:
        end = len(self.ops)
        values = [replace(v, died=end if v.died < 0 else v.died) for v in self.values]
        saves = [replace(s, released=end if s.released < 0 else s.released) for s in self.saves]
        died = [0] * len(self.storages)
        for value in values:
            died[value.storage] = max(died[value.storage], value.died)
        for save in saves:
            died[values[save.value].storage] = max(died[values[save.value].storage], save.released)
        storages = [replace(s, died=end if s.name else died[s.index]) for s in self.storages]
        return ModelGraph(
            fx_graph=torch.fx.Graph(), modules=tuple(self.modules), tensors=tuple(self.tensors),
            calls=tuple(self.calls), ops=tuple(self.ops), values=tuple(values), storages=tuple(storages),
            saves=tuple(saves), outputs=outputs, state=state,
            inputs=tuple(v.index for v in values if self.storages[v.storage].kind == "input"), level="fake", notes=(),
            phases=(("forward", 0, end),), fingerprint="", training=self.backward_begin >= 0,
            backward_begin=end if self.backward_begin < 0 else self.backward_begin, gradients=tuple(self.gradients),
        )  # fmt: skip

    def _value(self, shape: tuple[int, ...], kind: str, name: str | None = None, storage: int = -1) -> int:
        made = len(self.ops) if kind == "activation" else -1
        nbytes = 4 * shape[0]
        if storage < 0:
            storage = len(self.storages)
            self.storages.append(
                Storage(index=storage, nbytes=nbytes, kind=kind, born=max(made, 0), died=-1, name=name)  # type: ignore[arg-type]
            )
        index = len(self.values)
        self.values.append(
            Value(
                index=index, storage=storage, op=made, died=-1, shape=shape, dtype=FLOAT, nbytes=nbytes,
                requires_grad=kind == "parameter",
            )
        )  # fmt: skip
        return index
