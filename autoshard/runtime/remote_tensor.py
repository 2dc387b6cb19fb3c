"""A tensor of one process of a pipeline, as every process sees it; and what an op on one does there.

    rank 0 (its own)                     rank 1 (another's)
    StageTensor position 0, value ██     StageTensor position 0, value None: shape, strides and dtype only
      h + 1   computes                     h + 1   works out the shape

All processes run the same program, so an op that has tensors of two positions is met by both: the one sends, the other
receives (`stage_moves.py`), and neither has to ask. An ordinary tensor is one that every process has, with the same
values. To Python every StageTensor is on this process's own device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy import ndarray

from autoshard import torch_private
from autoshard.errors import RankError
from autoshard.runtime.shape_rules import Same, Shape, shape_of

if TYPE_CHECKING:
    from autoshard.runtime.stage_moves import Wire

aten = torch.ops.aten
_MASKED = {aten.index.Tensor, aten._unsafe_index.Tensor}
_RESHAPING = {aten.resize_, aten.resize_as_, aten.set_}
_as_list, _as_array = torch.Tensor.tolist, torch.Tensor.numpy  # others may stand there while a module is watched
_set_metadata = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class StageTensor(torch.Tensor):
    """A tensor that lives at one position of a pipeline; `value` is None in all other processes.

    `writes` counts what was written to its memory, shared with its views; `copies`: position -> (writes, run, copy).
    `number`: of its shape, 0 if it has none yet.
    """

    wire: "Wire"
    position: int
    value: torch.Tensor | None
    writes: list[int]
    copies: "dict[int, tuple[int, int, StageTensor]]"
    number: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, wire: "Wire", position: int, value: torch.Tensor | None, shape: Shape) -> "StageTensor":
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape.sizes, shape.strides, shape.offset, dtype=shape.dtype, device=wire.device
        )
        self.wire, self.position, self.value = wire, position, value
        self.writes, self.copies, self.number = [0], {}, 0
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        wire = next(tensor.wire for tensor in tensors_of(args, kwargs) if isinstance(tensor, StageTensor))
        return run_op(wire, func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = "here" if self.value is not None else "not here"
        return f"StageTensor(size={tuple(self.shape)}, dtype={self.dtype}, position {self.position}, {where})"

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        return self.wire.told(self.position, None if self.value is None else _as_list(self.value))

    def numpy(self, *, force: bool = False) -> ndarray:
        return self.wire.told(self.position, None if self.value is None else _as_array(self.value, force=force))

    def __array__(self, dtype: Any = None) -> ndarray:
        found = self.numpy(force=True)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __deepcopy__(self, memo: dict) -> "StageTensor":
        if id(self) not in memo:
            value = None if self.value is None else self.value.clone()
            memo[id(self)] = staged(self.wire, self.position, value, None if value is not None else shape_of(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RankError(
            f"a tensor of position {self.position} of a pipeline can't be saved: the other processes don't have it. "
            "Save outputs of the whole model."
        )


def staged(wire: "Wire", position: int, value: torch.Tensor | None, shape: Shape | None = None) -> StageTensor:
    """Make one of a value, or of a shape where this process has no value."""
    with torch.inference_mode(False):
        return StageTensor(wire, position, value, shape or shape_of(value))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Traits:
    composite: bool
    reads: bool  # its result, or the shape of it, depends on values
    draws: bool
    reshapes: bool
    written: tuple[Any, ...]  # positions or names of the arguments it writes
    views: bool


_traits: dict[Any, _Traits] = {}


def traits_of(func: Any) -> _Traits:
    """What has to be known of an op before it runs; looked up once per op."""
    found = _traits.get(func)
    if found is None:
        tags, arguments = func.tags, func._schema.arguments
        outputs = [argument for argument in arguments if argument.is_out]
        found = _traits[func] = _Traits(
            composite=torch_private.is_composite(func),
            reads=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
            draws=torch.Tag.nondeterministic_seeded in tags,
            reshapes=bool(outputs) or func.overloadpacket in _RESHAPING or torch.Tag.inplace_view in tags,
            written=tuple(
                argument.name if argument.kwarg_only else place
                for place, argument in enumerate(arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ),
            views=any(returned.alias_info is not None for returned in func._schema.returns),
        )
    return found


def reads_values(func: Any, args: tuple) -> bool:
    """Whether the result of a call, or its shape, depends on values."""
    if func in _MASKED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return traits_of(func).reads


def tensors_of(*values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an op."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(*value)
        elif isinstance(value, dict):
            yield from tensors_of(*value.values())


def rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an argument of an op with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(rebuilt(item, change) for item in value)
    if isinstance(value, dict):
        return {key: rebuilt(item, change) for key, item in value.items()}
    return value


def written_of(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a call writes into."""
    found: list[torch.Tensor] = []
    for key in traits_of(func).written:
        value = kwargs.get(key) if isinstance(key, str) else (args[key] if key < len(args) else None)
        found += tensors_of(value)
    return found


def run_op(wire: "Wire", func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op that has a tensor of a position among its arguments, where it belongs."""
    traits = traits_of(func)
    if traits.composite:
        return torch_private.run_composite(func, args, kwargs)
    given = [wire.settled(tensor) for tensor in tensors_of(args, kwargs)]
    of_stages = [tensor for tensor in given if isinstance(tensor, StageTensor)]
    written = [wire.settled(tensor) for tensor in written_of(func, args, kwargs)]
    if any(not isinstance(tensor, StageTensor) for tensor in written) and wire.inside is None:
        return _on_all(wire, func, args, kwargs)
    device = kwargs.get("device")
    if func is aten._to_copy.default and device is not None and device.type != wire.device.type:
        return _on_all(wire, func, args, kwargs)  # `.cpu()` on a GPU: Python is about to look
    first = next((tensor for tensor in written if isinstance(tensor, StageTensor)), None)
    if first is not None:
        position = first.position
    elif wire.inside is not None:
        position = wire.inside
    else:
        position = max(tensor.position for tensor in of_stages)
    return run_at(wire, position, func, args, kwargs)


def _on_all(wire: "Wire", func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op everywhere, on values that all have afterwards."""

    def known(tensor: torch.Tensor) -> torch.Tensor:
        tensor = wire.settled(tensor)
        return wire.published(tensor) if isinstance(tensor, StageTensor) else tensor

    return func(*rebuilt(args, known), **rebuilt(kwargs, known))


def run_at(wire: "Wire", position: int, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op at a position; in other processes, tell what shape its result has."""
    traits = traits_of(func)
    sources: dict[int, torch.Tensor] = {}  # id of what the op is given -> the tensor it stands for
    reads = reads_values(func, args)
    if position == wire.position:

        def here(tensor: torch.Tensor) -> torch.Tensor:
            tensor = wire.settled(tensor)
            if not isinstance(tensor, StageTensor):
                return tensor if tensor.dim() == 0 else wire.at_home(tensor)
            moved = wire.moved(tensor, position).value
            assert moved is not None
            sources[id(moved)] = tensor
            return moved

        args, kwargs = rebuilt(args, here), rebuilt(kwargs, here)
        with torch.inference_mode(), torch.no_grad():
            result = func(*args, **kwargs)
        if reads:
            wire.told(position, outline(result))
    else:

        def there(tensor: torch.Tensor) -> torch.Tensor:
            tensor = wire.settled(tensor)
            if isinstance(tensor, StageTensor):
                moved = wire.moved(tensor, position)
                sources[id(moved)] = tensor
                return moved
            return tensor

        args, kwargs = rebuilt(args, there), rebuilt(kwargs, there)
        result = wire.told(position, None) if reads else wire.rules.result(func, args, kwargs)
    if traits.draws and wire.inside is None:
        wire.share_generator(position)
    if traits.written:
        for tensor in written_of(func, args, kwargs):
            source = sources.get(id(tensor))
            if isinstance(source, StageTensor):
                source.writes[0] += 1
    return _wrapped(wire, position, result, sources, traits)


def outline(result: Any) -> Any:
    """What others must be told of a result that depends on values: shapes, and numbers themselves."""
    if isinstance(result, torch.Tensor):
        return shape_of(result)
    if isinstance(result, (tuple, list)):
        return type(result)(outline(item) for item in result)
    return result


def _wrapped(wire: "Wire", position: int, result: Any, sources: dict[int, torch.Tensor], traits: _Traits) -> Any:
    if isinstance(result, Same):
        source = sources.get(id(result.argument), result.argument)
        if isinstance(source, StageTensor) and traits.reshapes:
            _reshape(source, result.shape)
        return source
    if isinstance(result, (torch.Tensor, Shape)):
        source = sources.get(id(result))
        if isinstance(source, StageTensor):
            if traits.reshapes:
                _reshape(source, shape_of(result))  # type: ignore[arg-type]
            return source
        made = (
            staged(wire, position, None, result) if isinstance(result, Shape) else staged(wire, position, result, None)
        )
        if traits.views:
            base = next((tensor for tensor in sources.values() if isinstance(tensor, StageTensor)), None)
            if base is not None:
                made.writes = base.writes
        return made
    if isinstance(result, (tuple, list)):
        return type(result)(_wrapped(wire, position, item, sources, traits) for item in result)
    return result


def _reshape(tensor: StageTensor, shape: Shape) -> None:
    """Let a tensor that was reshaped in place say so."""
    if shape != shape_of(tensor):
        tensor.number = 0
        _set_metadata(tensor, staged(tensor.wire, tensor.position, tensor.value, shape))
