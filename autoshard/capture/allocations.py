"""The log of a run: ops, values, storages and saves as they come, with births and deaths stamped by weak references.

Nothing here holds a tensor that the model made. A weak reference's callback stamps the time of death, which is the
number of ops seen so far, so the lifetimes are those of the run itself: Python locals, containers and what autograd
keeps.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from autoshard.capture.graph import Op, Save, Storage, StorageKind, Value
from autoshard.common.packed import stored_bytes, stored_tensors
from autoshard.torch_private import FakeTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class _Ref(weakref.ref):
    """A weak reference that knows which row it stands for. `key` is the address the row is found by."""

    __slots__ = ("key", "row")
    key: int
    row: int


class AllocationLog:
    """Rows in the making. `now` is the time: the number of ops seen. After `close` nothing changes any more."""

    def __init__(self) -> None:
        self.fx_graph = torch.fx.Graph()
        self.ops: list[Op] = []
        self.nodes: list[torch.fx.Node | None] = []  # by value
        self.contents: dict[int, torch.Tensor] = {}  # by value: copies of lifted constants
        self._values: list[list[Any]] = []  # as in Value, from `storage` on
        self._storages: list[list[Any]] = []  # [nbytes, kind, born, died, name]
        self._saves: list[list[int]] = []  # [value, op, released]
        self._tensor_refs: dict[int, _Ref] = {}
        self._devices: dict[int, tuple[torch.device, int]] = {}
        self._storage_refs: dict[int, _Ref] = {}
        self._closed = False

    @property
    def now(self) -> int:
        return len(self.ops)

    def find(self, tensor: torch.Tensor) -> int | None:
        """The value a tensor object stands for. The address alone may have been reused, so the reference is asked."""
        ref = self._tensor_refs.get(id(tensor))
        return ref.row if ref is not None and ref() is tensor else None

    def knows_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with one that was entered."""
        return id(tensor.untyped_storage()) in self._storage_refs

    def add(
        self,
        tensor: torch.Tensor,
        node: torch.fx.Node | None,
        *,
        op: int = -1,
        born: int = 0,
        kind: StorageKind = "activation",
        name: str | None = None,
    ) -> int:
        """Enter a tensor object as a new value, and its storage if that is new too."""
        row = len(self._values)
        ref = _Ref(tensor, self._tensor_died)
        ref.key, ref.row = id(tensor), row
        if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested:  # nearly all
            shape, nbytes = tuple(tensor.shape), tensor.numel() * tensor.element_size()
            whole = tensor.untyped_storage()
            known = self._storage_refs.get(id(whole))
            storage = self._new_storage([whole], born, kind, name) if known is None else known.row
        else:
            shape = () if tensor.is_nested else tuple(tensor.shape)  # ragged tensors have none
            nbytes = stored_bytes(tensor)
            storage = self._storage_of(tensor, nbytes, born, kind, name)
        self._enter(ref, tensor)
        self._values.append([storage, op, -1, shape, tensor.dtype, nbytes, False])
        self.nodes.append(node)
        return row

    def alias(self, tensor: torch.Tensor, value: int) -> None:
        """Let one more tensor object stand for a value that is already there, without touching the value's lifetime."""
        ref = _Ref(tensor, self._alias_died)
        ref.key, ref.row = id(tensor), value
        self._enter(ref, tensor)

    def _enter(self, ref: _Ref, tensor: torch.Tensor) -> None:
        self._tensor_refs[ref.key] = ref
        if type(tensor) is FakeTensor:
            self.note_device(tensor.fake_device, ref.row)

    def note_device(self, device: torch.device, value: int) -> None:
        """Let a device object stand for the device of a value, wherever that is."""
        self._devices[id(device)] = device, value  # kept, so that its address stays its own

    def value_of_device(self, device: Any, default: int) -> int:
        """The value whose device an object stands for."""
        known = self._devices.get(id(device))
        return default if known is None else known[1]

    def constant_node(self) -> torch.fx.Node:
        """A placeholder for a constant that turned up in the middle of the run, put before the first op."""
        name = f"constant_{len(self._values)}"
        first = next((op.node for op in self.ops if op.node is not None), None)
        if first is None:
            return self.fx_graph.placeholder(name)
        with self.fx_graph.inserting_before(first):
            return self.fx_graph.placeholder(name)

    def storage_of_value(self, value: int) -> int:
        return self._values[value][0]

    def op_of_value(self, value: int) -> int:
        return self._values[value][1]

    def kind_of(self, storage: int) -> StorageKind:
        return self._storages[storage][1]

    def mark_differentiable(self, value: int) -> None:
        self._values[value][6] = True

    def noted(self, name: str, what: Any) -> None:
        """Note something about the op that was recorded last."""
        node = self.ops[-1].node
        assert node is not None
        node.meta[name] = what

    def drop_last_op(self, tensor: torch.Tensor) -> Op:
        """Take back the op just recorded, which made `tensor`: for copies that only the recording itself caused."""
        op = self.ops.pop()
        del self._tensor_refs[id(tensor)], self._values[-1], self.nodes[-1]
        if op.node is not None:
            self.fx_graph.erase_node(op.node)
        return op

    def save(self, value: int, op: int) -> int:
        self._saves.append([value, op, -1])
        return len(self._saves) - 1

    def read_by(self, save: int, op: int | None) -> None:
        """The node made for this op reads what was saved. Inputs are saved before their op runs, outputs after."""
        if self._saves[save][1] - 1 == op:
            self._saves[save][1] = op

    def release(self, save: int) -> None:
        if not self._closed:
            self._saves[save][2] = len(self.ops)

    def close(self) -> None:
        """Stop the clock: what is alive now stays alive to the end."""
        self._closed = True

    def values(self) -> tuple[Value, ...]:
        end = len(self.ops)
        return tuple(
            Value(
                index=index,
                storage=storage,
                op=op,
                died=end if died < 0 else died,
                shape=shape,
                dtype=dtype,
                nbytes=nbytes,
                requires_grad=grad,
            )
            for index, (storage, op, died, shape, dtype, nbytes, grad) in enumerate(self._values)
        )

    def alive(self) -> tuple[int, ...]:
        """Values that are still there."""
        return tuple(index for index, row in enumerate(self._values) if row[2] < 0)

    def tensors_of_ops(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Tensor objects made by ops that are still there, with their values."""
        for ref in list(self._tensor_refs.values()):
            tensor = ref()
            if tensor is not None and self._values[ref.row][1] >= 0:
                yield tensor, ref.row

    def storages(self) -> tuple[Storage, ...]:
        end = len(self.ops)
        return tuple(
            Storage(index=index, nbytes=nbytes, kind=kind, born=born, died=end if died < 0 else died, name=name)
            for index, (nbytes, kind, born, died, name) in enumerate(self._storages)
        )

    def saves(self) -> tuple[Save, ...]:
        end = len(self.ops)
        return tuple(Save(value=value, op=op, released=end if out < 0 else out) for value, op, out in self._saves)

    def _storage_of(self, tensor: torch.Tensor, nbytes: int, born: int, kind: StorageKind, name: str | None) -> int:
        if tensor.layout is not torch.strided:  # sparse tensors have several storages: one row stands for them
            self._storages.append([nbytes, kind, born, -1, name])
            return len(self._storages) - 1
        # One row stands for all that is behind a face, too: it moves and lives together.
        storages = {}
        for part in stored_tensors(tensor):
            storage = part.untyped_storage()
            known = self._storage_refs.get(id(storage))
            if known is not None:
                return known.row
            storages[id(storage)] = storage
        return self._new_storage([*storages.values()], born, kind, name)

    def _new_storage(self, parts: list[torch.UntypedStorage], born: int, kind: StorageKind, name: str | None) -> int:
        row, nbytes = len(self._storages), 0
        for storage in parts:
            ref = _Ref(storage, self._storage_died)
            ref.key, ref.row = id(storage), row
            self._storage_refs[ref.key] = ref
            nbytes += storage.nbytes()
        self._storages.append([nbytes, kind, born, -1, name])
        return row

    def _tensor_died(self, ref: _Ref) -> None:
        if self._tensor_refs.get(ref.key) is ref:
            del self._tensor_refs[ref.key]
        if not self._closed and ref.row < len(self._values):
            self._values[ref.row][2] = len(self.ops)

    def _alias_died(self, ref: _Ref) -> None:
        if self._tensor_refs.get(ref.key) is ref:
            del self._tensor_refs[ref.key]

    def _storage_died(self, ref: _Ref) -> None:
        if self._storage_refs.get(ref.key) is ref:
            del self._storage_refs[ref.key]
        if not self._closed:
            self._storages[ref.row][3] = len(self.ops)
