"""Run ops without weights: integers, booleans and small known floats keep their values, other floats are only shapes.

    input_ids (real) ──embedding(weight fake)──▶ fake ──…──▶ fake          no memory, no arithmetic
    arange(n) (real) ──ge──▶ mask (real) ──.all()──▶ True                  branches on integers just work

A real tensor that is written with something unknown stays a real object, but its memory is tainted: from then on it
counts as unknown too, in all its views.
"""

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from autoshard.capture.guards import asking
from autoshard.capture.shapes import Shapes
from autoshard.capture.traits import Traits, aten, swap_tensors, tensors_of, written_by
from autoshard.torch_private import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

REAL_ELEMENTS = 1 << 22
"""Most elements an op on known values may combine; above it, only shapes are computed."""
SMALL_FLOATS = 1 << 16
"""Most elements of a float buffer or float factory that keeps its values: models branch on such constants."""
CPU = torch.device("cpu")

_FILLS: dict[Any, Any] = {
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
}
_ONE_BY_ONE = frozenset({
    aten.gather, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce,
    aten.index_select, aten.index_add, aten.index_add_,
})  # fmt: skip
"""Ops that touch each element of their arguments about once, whatever the shapes of the others are."""
_FINITE_CHECKS = {
    aten.isinf.default: False,
    aten.isnan.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
}
Ranks = Literal["all", "first", "last", "all but one"]

FINITE = "floats were assumed to be finite"
EVEN_ORDER = "an order that depends on unknown values was taken to be even"
HALF = "half of the elements of an unknown mask were taken to be true"


class ValueNeeded(Exception):
    """The model asked for the value of a float that has none here."""


VALUE_ERRORS = (ValueNeeded, DataDependentOutputException, DynamicOutputShapeException)
"""What a run on shapes raises where the model branches on a value that is not known."""


@contextmanager
def silenced() -> Iterator[None]:
    """Inside, fake tensors print no tracebacks of errors that are handled."""
    talk = logging.getLogger(FakeTensor.__module__)
    before, talk.disabled = talk.disabled, True
    try:
        yield
    finally:
        talk.disabled = before


class RealValues:
    """The engine of the level "real": every op simply runs, on copies of the parameters if there is room (`clone`)."""

    def __init__(self, clone: bool) -> None:
        self.clone = clone

    def unknown(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are not known: they are."""
        return False

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is surely of this run: one can't tell."""
        return False

    def run(self, func: Any, traits: Traits, inputs: list[torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class FakeFloats:
    """The engine of the levels "fake" and "invented". `assume` is told what was answered without knowing.

    `left_out`: ops on known values that were too large to be run.

    `ranks`: which places are dealt out where an order is not known. `pass_guards`: questions that only raise an error
    are answered so that they don't, where the answer is not known.
    """

    def __init__(
        self, assume: Callable[[str], None], *, invent: bool = False, answer_argmax: bool = False,
        small_floats: int = SMALL_FLOATS, pass_guards: bool = False, ranks: Ranks = "all",
    ) -> None:  # fmt: skip
        self.shapes = Shapes()
        self.pass_guards = pass_guards
        self.ranks = ranks
        self.left_out = 0
        self.small_floats = small_floats
        self.assume = assume
        self.invent = invent
        self.answer_argmax = answer_argmax
        self._tainted = weakref.WeakSet[torch.UntypedStorage]()

    def unknown(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are not known: it is fake or meta, or its memory was written with such."""
        if type(tensor) is FakeTensor or tensor.is_meta:
            return True
        return bool(self._tainted) and tensor.untyped_storage() in self._tainted

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor got its shape here, in this run."""
        return type(tensor) is FakeTensor and tensor.fake_mode is self.shapes.mode

    def run(self, func: Any, traits: Traits, inputs: list[torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one op; raise `ValueNeeded` if Python asks for a value that is not known."""
        if all([type(tensor) is not FakeTensor and not self.unknown(tensor) for tensor in inputs]):
            if self._worth_running(func, traits, inputs, args, kwargs):
                return func(*args, **kwargs)
            self.left_out += 1
        elif traits.reads_value:
            return self._answer(func, args)
        if traits.view and type(inputs[0]) is torch.Tensor and not inputs[0].is_meta:
            return func(*args, **kwargs)  # a view of tainted memory: shapes only, and it must share the storage
        rule = _RULES_BY_ID.get(id(func))
        out = rule(self, func, args, kwargs) if rule is not None else NotImplemented
        if out is NotImplemented:
            out = self.shapes.run(func, args, kwargs)
        if traits.writes or traits.unmarked:
            for tensor in written_by(traits, args, kwargs):
                self._taint(tensor)
            return self._hand_back(traits, out, args, kwargs)
        return out

    def real_filled(self, like: torch.Tensor, value: Any) -> torch.Tensor:
        """A real tensor of one value in the shape, strides and dtype of a fake one."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).fill_(value)

    def _answer(self, func: Any, args: tuple) -> Any:
        is_number = args[0].dtype is not torch.bool
        if self.pass_guards and not (is_number and func in (aten.is_nonzero.default, aten.equal.default)):
            guard = asking(0 if is_number else False)
            if guard is not None:
                return guard.passing
        if not self.invent:
            raise ValueNeeded(f"the value of a {args[0].dtype} tensor of shape {tuple(args[0].shape)} decides here")
        self.assume("a value that is not known was taken to be 0 or False")
        dtype = args[0].dtype
        if func in (aten.is_nonzero.default, aten.equal.default) or dtype is torch.bool:
            return False
        return 0.0 if dtype.is_floating_point else 0

    def _worth_running(
        self, func: Any, traits: Traits, inputs: list[torch.Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> bool:
        """Whether an op whose inputs are all known runs for real: it must be small, and its result mean something."""
        if not inputs:
            return self._factory_keeps_values(func, traits, args, kwargs)
        if traits.random and inputs[0].is_floating_point() and kwargs.get("dtype") in (None, inputs[0].dtype):
            return func is aten.multinomial.default  # which draws integers
        if len(inputs) == 1:
            return inputs[0].numel() <= REAL_ELEMENTS
        if traits.pointwise:
            return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in inputs))) <= REAL_ELEMENTS
        if func.overloadpacket in _ONE_BY_ONE or (args and isinstance(args[0], (list, tuple))):
            return sum(tensor.numel() for tensor in inputs) <= REAL_ELEMENTS
        return math.prod(max(1, tensor.numel()) for tensor in inputs) <= REAL_ELEMENTS

    def _factory_keeps_values(self, func: Any, traits: Traits, args: tuple, kwargs: dict[str, Any]) -> bool:
        result = self.shapes.run(func, args, kwargs)
        if not isinstance(result, torch.Tensor):
            return True
        if result.dtype.is_floating_point or result.dtype.is_complex:
            return not traits.random and result.numel() <= self.small_floats
        return result.numel() <= REAL_ELEMENTS

    def _taint(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not FakeTensor:
            self._tainted.add(tensor.untyped_storage())

    def _hand_back(self, traits: Traits, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the written argument itself where the schema says that the op does."""
        if not any(index is not None for index in traits.returns):
            return out
        handed = []
        for index, result in zip(traits.returns, out if isinstance(out, tuple) else (out,), strict=True):
            if index is None:
                handed.append(result)
            else:
                position, name = traits.writes[index]
                handed.append(args[position] if position < len(args) else kwargs[name])
        return tuple(handed) if isinstance(out, tuple) else handed[0]


ValueEngine = FakeFloats | RealValues
"""What runs ops: on shapes, or with values."""


def _filled(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """zeros_like and its kin: the values are known whatever the input's are."""
    out = engine.shapes.run(func, args, kwargs)
    limit = engine.small_floats if out.is_floating_point() or out.is_complex() else REAL_ELEMENTS
    return engine.real_filled(out, _FILLS[func](args)) if out.numel() <= limit else out


def _finite(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """isinf and isnan: taken to be false."""
    out = engine.shapes.run(func, args, kwargs)
    return _assumed(engine, out, _FINITE_CHECKS[func])


def _argmax(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """While generating: the most likely token is taken to be number 1, so that the loop goes on with known tokens."""
    if not engine.answer_argmax:
        return _ranked(engine, func, args, kwargs) if engine.invent else NotImplemented
    return engine.real_filled(engine.shapes.run(func, args, kwargs), 1)


_LARGEST = (aten.argmax.default, aten.max.dim, aten.min.dim)


def _ranked(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Invented level: top k, sort and their like. Places are dealt out in turn, so that experts get equal shares.

    topk over 4 experts, k = 2, of 3 tokens   ──▶   [0 1] [2 3] [0 1]
    """
    if not engine.invent:
        return NotImplemented
    out = engine.shapes.run(func, args, kwargs)
    places = out if isinstance(out, torch.Tensor) else out[1]
    if places.numel() > REAL_ELEMENTS or not args[0].dim():
        return out
    engine.assume(EVEN_ORDER)
    position = 2 if func is aten.topk.default else 1
    dimension = args[position] if len(args) > position and args[position] is not None else -1
    many = max(1, args[0].shape[dimension])
    least = places.shape[dimension] if func is aten.topk.default else 1 if func in _LARGEST else many
    count = {"all": many, "first": least, "last": least, "all but one": max(least, many - 1)}[engine.ranks]
    dealt = torch.arange(places.numel()).remainder(count).reshape(places.shape)
    dealt = dealt + (many - count) if engine.ranks == "last" else dealt
    real = torch.empty_strided(places.shape, places.stride(), dtype=places.dtype).copy_(dealt)
    return real if isinstance(out, torch.Tensor) else (out[0], real)


def _nonzero(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Invented level: half of the elements of an unknown tensor are taken to be other than zero."""
    if not engine.invent:
        return NotImplemented
    engine.assume(HALF)
    return engine.shapes.fresh(
        (max(1, args[0].numel() // 2), args[0].dim()), (1, max(1, args[0].numel() // 2)), torch.int64
    )


def _compared(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`x == x`, `x != x`, `x == inf`, `x != inf`: how finite checks look from here."""
    equal = func in (aten.eq.Tensor, aten.eq.Scalar)
    if func in (aten.eq.Tensor, aten.ne.Tensor):
        if args[0] is not args[1]:
            return NotImplemented
        return _assumed(engine, engine.shapes.run(func, args, kwargs), equal)
    if not (isinstance(args[1], float) and math.isinf(args[1])) or not args[0].is_floating_point():
        return NotImplemented
    return _assumed(engine, engine.shapes.run(func, args, kwargs), not equal)


def _assumed(engine: FakeFloats, out: torch.Tensor, value: bool) -> torch.Tensor:
    if out.numel() > REAL_ELEMENTS:
        return out
    engine.assume(FINITE)
    return engine.real_filled(out, value)


def _select(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """x[:, i] is x[:, 0] that begins elsewhere: of a loop over tokens, torch works each out anew, in a millisecond."""
    x, dim, index = args
    if not 0 < index < x.shape[dim] or x.is_conj() or x.is_neg():
        return NotImplemented
    first = engine.shapes.run(func, (x, dim, 0), kwargs)
    offset = first.storage_offset() + index * x.stride(dim)
    return engine.shapes.inside(x.untyped_storage(), offset, first.shape, first.stride(), x.dtype)


def _index(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """x[mask] with a known mask: as many rows as it has true elements."""
    indices = []
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
        elif engine.unknown(index):
            return (
                NotImplemented
                if not engine.invent
                else engine.shapes.run(func, (args[0], _half(engine, args[1])), kwargs)
            )
        else:
            indices.extend(torch.nonzero(index, as_tuple=True))
    return engine.shapes.run(func, (args[0], indices), kwargs)


def _masked_select(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """x.masked_select(mask): as many elements as the mask has true ones; half of them where it is not known."""
    x, mask = args
    if engine.unknown(mask) and not engine.invent:
        return NotImplemented
    whole = mask.expand(torch.broadcast_shapes(x.shape, mask.shape))
    if engine.unknown(mask):
        engine.assume(HALF)
        return engine.shapes.fresh((max(1, whole.numel() // 2),), (1,), x.dtype)
    count = int(whole.sum())
    return engine.shapes.fresh((count,), (1,), x.dtype)


def _grouped_mm(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Grouped matrix product: (m, k) or (g, m, k) by (k, n) or (g, k, n); the fake kernel takes bfloat16 only."""
    left, right = args[0], args[1]
    if any(max(matrix.stride()[-2:]) * matrix.itemsize % 16 for matrix in (left, right)):
        raise RuntimeError("a grouped product reads rows that are no multiple of 16 bytes, which torch refuses")
    offsets: Any = kwargs.get("offs", args[2] if len(args) > 2 else None)
    dtype = kwargs.get("out_dtype") or (args[4] if len(args) > 4 else None) or left.dtype
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 2 and right.dim() == 2:
        shape: tuple[int, ...] = (offsets.shape[0], rows, columns)
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    alignment = 16 // dtype.itemsize
    padded = -(-columns // alignment) * alignment
    strides = (rows * padded, padded, 1) if len(shape) == 3 else (padded, 1)
    return engine.shapes.fresh(shape, strides, dtype)


def _ctc_loss(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A loss per sequence, and the alphas: (batch, time, 2 x longest target + 1)."""
    scores, _, _, lengths = args[:4]
    if not isinstance(lengths, torch.Tensor):
        longest = max(lengths)
    elif engine.unknown(lengths):
        return NotImplemented
    else:
        longest = int(lengths.max())
    time, batch = scores.shape[:2]
    alphas = 2 * longest + 1
    losses = engine.shapes.fresh((batch,), (1,), scores.dtype)
    return losses, engine.shapes.fresh((batch, time, alphas), (time * alphas, alphas, 1), scores.dtype)


def _half(engine: FakeFloats, indices: Any) -> list[Any]:
    """Invented level: masks that are not known become the indices of half of their elements."""
    engine.assume(HALF)
    made: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            count = max(1, index.numel() // 2)
            made.extend(engine.shapes.fresh((count,), (1,), torch.int64) for _ in range(index.dim()))
        else:
            made.append(index)
    return made


def _like_first(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Ops whose result is as large as their first argument, and contiguous."""
    return engine.shapes.fresh(args[0].shape, torch.empty(args[0].shape, device="meta").stride(), args[0].dtype)


def _by_running(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Ops whose kernel alone knows what it allocates: run it once on zeros, if they are few."""
    tensors = tensors_of(args, kwargs)
    if sum(tensor.numel() for tensor in tensors) > 4 * REAL_ELEMENTS:
        return NotImplemented

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()

    out = func(*(swap_tensors(value, zeros) for value in args), **kwargs)
    return tuple(engine.shapes.placeholder(item) if isinstance(item, torch.Tensor) else item for item in out)


def _batch_norm(engine: FakeFloats, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A norm that gives its result the suggested memory format of its input; the fake kernel keeps some strides."""
    made, *rest = engine.shapes.run(func, args, kwargs)
    like, formats = args[0], {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(like.dim())
    keep = last is not None and not like.is_contiguous() and like.is_contiguous(memory_format=last)
    wanted = last if keep and last is not None else torch.contiguous_format
    stride = torch.empty(made.shape, device="meta").contiguous(memory_format=wanted).stride()
    return (engine.shapes.fresh(made.shape, stride, made.dtype), *rest)


RULES: dict[Any, Callable[[FakeFloats, Any, tuple, dict[str, Any]], Any]] = {
    **dict.fromkeys(_FILLS, _filled),
    **dict.fromkeys(_FINITE_CHECKS, _finite),
    **dict.fromkeys((aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar), _compared),
    aten.argmax.default: _argmax,
    **dict.fromkeys((aten.topk.default, aten.max.dim, aten.min.dim, aten.sort.default, aten.sort.stable), _ranked),
    aten.nonzero.default: _nonzero,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten._grouped_mm.default: _grouped_mm,
    **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), _ctc_loss),
    aten._transformer_encoder_layer_fwd.default: _like_first,
    aten._native_multi_head_attention.default: _by_running,
    aten.mkldnn_rnn_layer.default: _by_running,
    aten.mkldnn_rnn_layer_backward.default: _by_running,
    aten.native_batch_norm.default: _batch_norm,
}
"""Shape rules of our own, where fake kernels need values that are known here, or are stricter than the real ones."""
_RULES_BY_ID = {id(op): rule for op, rule in RULES.items()}
