"""One action of a cut, carried out: on the arguments of a call, on its result, or around it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from autoshard import torch_private
from autoshard.common.attention import attention_weights, of_each_head
from autoshard.errors import ApplyError
from autoshard.nested import item_at, map_tensors, replace_at, tensor_at, tensors_in
from autoshard.plan.sharding import ATTENTION, LOSSES, Action, LocalLength
from autoshard.runtime import cut_loss
from autoshard.runtime.collectives import ALONG, Axis, Ranks, along, copy_from_region, copy_to_region, reduce, tracked
from autoshard.runtime.given import picks_tokens
from autoshard.torch_private import version_of

BIASED = frozenset({"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
"""Functions of (input, weight, bias)."""
_FRESH = {*BIASED, "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "addmm", "baddbmm", "sum"}
"""Functions whose result is new memory, which a sum over ranks may overwrite."""
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_ON_RESULTS = frozenset({"reduce", "mean", "gather", "spread", "copy_from", "scatter", "join", "spread_tokens"})
"""Kinds of actions on what a call gives."""
_OF_ITS_OWN = (
    ", and each rank picks from its own. Plan again with inputs like these, or call the model for all tokens and pick "
    "from what it gives."
)
_SKIPPED = (
    " was not called this time. Call all blocks, or, where ranks share matrices, apply dataclasses.replace(plan, "
    "sequence_parallel=False)."
)


class Tokens:
    """Whether ranks divide tokens in the forward of the model that runs: if it began with gradients; None for none.

    Code may disable them for a part of the model, and reentrant checkpoints do. `counts`: how many tokens a rank was
    given of what was divided in this forward; `begun`: where blocks began to divide them that have not ended; `given`:
    its arguments; `left`: how many tokens a rank has before the head, and how many ranks; None once a loss was made of
    all of them. `picked`: by an index that may pick some.
    """

    __slots__ = ("begun", "counts", "divided", "given", "left", "picked")

    def __init__(self) -> None:
        self.divided: bool | None = None
        self.counts: set[int] = set()
        self.begun: list[str] = []
        self.given: tuple[tuple, dict] = (), {}
        self.left: tuple[int, int] | None = None
        self.picked = False

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Pre-hook of the model."""
        self.divided = torch.is_grad_enabled()
        self.begun.clear()
        if not torch.compiler.is_compiling():
            self.given, self.picked = (args, kwargs), False
            self.counts.clear()

    def end(self, module: nn.Module, args: tuple, result: Any) -> None:
        """Hook, also after an exception. Raises `ApplyError` where tokens that are given out may be other ones."""
        self.divided = None
        if self.begun and result is not None:
            raise ApplyError(f"{self.begun[-1]} began to divide tokens, and the block that ends it{_SKIPPED}")
        if torch.compiler.is_compiling():
            return
        left, given, self.given, self.left = self.left, self.given, ((), {}), None
        picking = picks_tokens(given, *left) if left and result is not None else ""
        if picking:
            raise ApplyError(f"{type(module).__name__}: the argument {picking} may pick tokens{_OF_ITS_OWN}")

    def note(self, kind: str, where: str) -> None:
        """Note an action on divided tokens. Raises `ApplyError` where no block has begun to divide them."""
        if self.divided is None or (not torch.compiler.is_compiling() and torch_private.autograd_node() is not None):
            return  # a part of the model runs by itself, or again in a backward
        if kind == "divide":
            self.begun.append(where)
        elif not self.begun:
            raise ApplyError(f"{where} works on a rank's part of the tokens, and the block that divides them{_SKIPPED}")
        elif kind in ("join", "spread_tokens"):
            self.begun.pop()

    def leave(self, count: int, ranks: int, where: str) -> None:
        """Note how many tokens a rank has left before the head. Raises `ApplyError` if code has picked some of them."""
        if self.divided is None or torch.compiler.is_compiling() or torch_private.autograd_node() is not None:
            return
        if count not in self.counts:
            raise ApplyError(f"{where}: only {count} tokens of a rank are left{_OF_ITS_OWN}")
        self.left = count, ranks

    def look_at(self, index: Any, ranks: int) -> None:
        """Note an index into a tensor that a rank may have only some tokens of."""
        if not torch.compiler.is_compiling():
            self.picked |= any(picks_tokens(((index,), {}), count, ranks) for count in self.counts)

    def make_loss(self) -> None:
        """Note a loss: there are as many labels as tokens, unless code has picked those."""
        if not self.picked:
            self.left = None

    def __call__(self, where: str) -> bool:
        """Whether they are divided at a place of that name. Raises `ApplyError` if only this place has gradients."""
        if self.divided is False and torch.is_grad_enabled():
            raise ApplyError(
                f"gradients are enabled in {where} alone, and this forward began without them: tokens are not divided "
                "over ranks in it. Call the model with gradients, or apply "
                "dataclasses.replace(plan, sequence_parallel=False)."
            )
        return self.divided or torch.is_grad_enabled()


class Memo:
    """The tensors that have entered the cuts of one block in this forward: each enters once, whoever reads it.

    `given`: (as it was changed, as it was) of arguments that a module hands on. `tokens`: of the whole model.
    """

    __slots__ = ("given", "made", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.made: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_to_region(self, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return the alias of a tensor whose gradient is summed over ranks."""
        if not tracked(tensor):
            return tensor
        if torch.compiler.is_compiling():
            return copy_to_region(tensor, ranks)
        return self._once("entered", tensor, lambda: copy_to_region(tensor, ranks))

    def collect(self, tensor: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
        """Return all tokens of a tensor of which this rank has a part."""
        return self._once("collected", tensor, lambda: along(tensor, ranks, dim, "collect"))

    def _once(self, what: str, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        known = self.made.get((what, id(tensor)))
        if known is None or known[0] is not tensor or known[2] != version_of(tensor):
            known = self.made[what, id(tensor)] = tensor, make(), version_of(tensor)
        return known[1]

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a module was given where it hands a tensor on."""
        for changed, given in reversed(self.given):
            if tensor is changed:
                tensor = given
        return tensor

    def forget(self, module: nn.Module, args: tuple, result: Any) -> None:
        """Hook, also after an exception: a block has run, its tensors enter anew next time."""
        self.made.clear()
        self.given.clear()

    def __deepcopy__(self, memo: dict) -> "Memo":
        return Memo(copy.deepcopy(self.tokens, memo))


class Step:
    """One action, ready to be carried out. `where` names its place for messages."""

    __slots__ = ("action", "axis", "fresh", "kept", "length", "memo", "paths", "ranks", "shares", "weight", "where")

    def __init__(self, action: Action, shares: tuple[int, ...], ranks: Ranks, memo: Memo, where: str) -> None:
        self.action = action
        self.ranks, self.shares = ranks, shares
        self.memo = memo
        self.where = where
        a_length = action.kind == "length"
        a_part = action.axis and action.kind not in ("length", "dispatch")
        self.axis = Axis.of(ranks, action.axis, shares) if a_part else None
        self.length = LocalLength.of(action.axis, shares, ranks.rank or 0) if a_length else None
        self.weight = shares[ranks.rank or 0] / sum(shares)
        self.paths: tuple[str, ...] = (action.argument,)
        self.fresh = action.function in _FRESH
        self.kept = False  # the module hands its argument on

    def before(self, arguments: tuple[tuple, dict]) -> tuple[tuple, dict]:
        """Act on the arguments of a call; one that was left out, or is None, needs nothing."""
        if self.action.kind == "copy_to":
            return self._changed(arguments, lambda tensor: self.memo.copy_to_region(tensor, self.ranks))
        if self.action.kind == "slice":
            return self._changed(arguments, self._slice)
        if self.action.kind == "length":
            return self._shortened(arguments)
        if self.action.kind in ALONG and self._divides:
            return self._changed(arguments, self._moved)
        return arguments

    @property
    def _divides(self) -> bool:
        """Whether tokens are divided in this forward."""
        return getattr(self.ranks, "divides", False) or self.memo.tokens(self.where)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Divide tokens over ranks, or put them together: the same tensor once in a forward, whoever reads it."""
        kind, dim, degree = self.action.kind, self.action.dim, self.ranks.size
        self._check_dims(tensor)
        if kind in ("scatter", "divide", "own") and tensor.shape[dim] % degree:
            raise ApplyError(
                f"{self.where} has {tensor.shape[dim]} tokens, which {degree} ranks can't divide. Pad sequences to a "
                f"multiple of {degree}, or, where ranks share matrices, apply dataclasses.replace(plan, "
                "sequence_parallel=False)."
            )
        self.memo.tokens.note(kind, self.where)
        if kind in ("divide", "own") and not torch.compiler.is_compiling():
            self.memo.tokens.counts.add(tensor.shape[dim] // degree)
        collects = kind == "collect"
        return self.memo.collect(tensor, self.ranks, dim) if collects else along(tensor, self.ranks, dim, kind)

    def _shortened(self, arguments: tuple[tuple, dict]) -> tuple[tuple, dict]:
        """Give a function the length of what this rank has, where code says that of the whole; -1 stays."""
        action = self.action
        assert self.length is not None
        length = item_at(arguments, action.argument)
        if isinstance(length, int) and length < 0:
            return arguments
        try:
            if not isinstance(length, int):
                raise ValueError
            return replace_at(arguments, action.argument, self.length(length))
        except ValueError:
            raise ApplyError(
                f"{self.where} was given {length!r} as a length, and the plan is for one like {action.axis!r}. Plan "
                "again with inputs like these."
            ) from None

    def _changed(self, arguments: tuple[tuple, dict], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        for path in self.paths:
            tensor = tensor_at(arguments, path)
            if tensor is not None:
                changed = change(tensor)
                if self.kept and changed is not tensor:
                    self.memo.given.append((changed, tensor))
                return arguments if changed is tensor else replace_at(arguments, path, changed)
        return arguments

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.axis is not None
        self._check_dims(tensor)
        try:
            axis = self.axis.sized(tensor.shape[self.action.dim])
        except ValueError:
            raise ApplyError(
                f"{self.where} was given a tensor of shape {list(tensor.shape)}, and the plan is for "
                f"{self.axis.where.size} in dimension {self.action.dim}. Was it made before the model was cut?"
            ) from None
        return axis.own_part(self.memo.copy_to_region(tensor, self.ranks), self.action.dim)

    def _axis_of(self, part: torch.Tensor) -> Axis:
        """The axis of what this rank has a part of."""
        assert self.axis is not None
        self._check_dims(part)
        try:
            return self.axis.sized_by_part(part.shape[self.action.dim])
        except ValueError:
            raise ApplyError(
                f"{self.where} has a tensor of shape {list(part.shape)}, and the plan is for {self.axis.width} on this "
                f"rank in dimension {self.action.dim}. Plan again with inputs like these."
            ) from None

    def _check_dims(self, tensor: torch.Tensor) -> None:
        """Raise `ApplyError` for a tensor with more or fewer dimensions: the one that is meant may be another."""
        if self.action.dims not in (0, tensor.dim()):
            what = "output" if self.action.kind in _ON_RESULTS else "input"
            raise ApplyError(
                f"{self.where}: its {what} is of shape {list(tensor.shape)}, and the plan is for {self.action.dims} "
                "dimensions. Plan again with inputs like these."
            )

    def after(self, result: Any) -> Any:
        """Act on the result of a call."""
        if self.action.kind == "restore":
            return map_tensors(result, self.memo.original)
        if self.action.kind == "loss":
            assert self.axis is not None
            return cut_loss.put_together(result, self.axis)
        if self.action.kind not in _ON_RESULTS:
            return result
        if not self.action.argument and isinstance(result, torch.Tensor):
            return self._after(result)
        tensor = tensor_at(result, self.action.argument)
        if tensor is None:
            raise ApplyError(
                f"{self.where} gave no tensor at {self.action.argument or 'its result'!r} this time, and the plan adds "
                "or gathers one there. Plan again with inputs like these."
            )
        return replace_at(result, self.action.argument, self._after(tensor))

    def _after(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.action.kind == "spread" and tracked(tensor) and cut_loss.is_awaited(self.ranks):
            return cut_loss.spread(tensor, self.ranks, self.action.dim)
        if self.action.kind in ("gather", "spread"):
            return self._axis_of(tensor).gather(tensor, self.action.dim)
        if self.action.kind == "copy_from":
            return copy_from_region(tensor, self.ranks)
        if self.action.kind == "spread_tokens":
            self._check_dims(tensor)
            if not self._divides:
                return tensor
            self.memo.tokens.note("spread_tokens", self.where)
            self.memo.tokens.leave(tensor.shape[self.action.dim], self.ranks.size, self.where)
            return cut_loss.spread_tokens(tensor, self.ranks, self.action.dim)
        if self.action.kind in ALONG:
            if self._divides:
                return self._moved(tensor)
            return reduce(tensor, self.ranks, self.fresh) if self.action.kind == "scatter" else tensor
        if self.action.kind == "mean":
            return reduce(tensor * self.weight, self.ranks, fresh=True, gathered=self.action.gathered)
        return reduce(tensor, self.ranks, self.fresh, self.action.gathered)

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Act on one call of a torch function. Only the call itself is seen by the modes around this one."""
        if self.action.kind == "lookup":
            return self._lookup(call, args, kwargs)
        if self.action.kind == "dropout" or (self.action.kind == "dropout_tokens" and self._divides):
            return self._dropout(call, args, kwargs)
        if self.action.kind in LOSSES:
            assert self.axis is not None
            self.memo.tokens.make_loss()
            return cut_loss.cross_entropy(call, self.axis, args, kwargs)
        if self.action.kind == "context":
            return self._attention(call, args, kwargs) if self._divides else call(*args, **kwargs)
        with torch_private.no_overrides():
            args, kwargs = self.before((args, kwargs))
            addend, (args, kwargs) = self._without_addend(args, kwargs)
        result = call(*args, **kwargs)
        with torch_private.no_overrides():
            changed = self.after(result)
            if addend is not None:
                changed = changed.add_(addend, alpha=kwargs.get("beta", 1))  # new memory, and the dtype of the result
            # Not whatever is handed back: dropout that drops nothing returns what it was given.
            in_place = self.action.function.endswith("_")
            written = in_place and any(result is tensor for _, tensor in tensors_in((args, kwargs)))
            return result.copy_(changed) if written and changed is not result else changed

    def _without_addend(self, args: tuple, kwargs: dict) -> tuple[torch.Tensor | None, tuple[tuple, dict]]:
        """What is added once after the sum, shaped like it, and the arguments without it."""
        path = self.action.addend
        if not path:
            return None, (args, kwargs)
        if path == "0.2" and len(args) > 2 and self.action.function in BIASED:  # the usual one, quickly
            return _beside(args[2], args[1], self.action.function), ((*args[:2], None, *args[3:]), kwargs)
        addend = tensor_at((args, kwargs), path)
        if addend is None:
            return None, (args, kwargs)
        without = replace_at((args, kwargs), path, torch.zeros_like(addend))
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        return _beside(addend, weight, self.action.function), without

    def _lookup(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`embedding` with a table of which this rank has some rows."""
        given = dict(zip(_EMBEDDING, args, strict=False)) | kwargs
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
            raise ApplyError(
                f"{self.where} can't look up in a cut table with max_norm, scale_grad_by_freq or sparse gradients: "
                "they depend on which rows others look up. Plan with this table whole."
            )
        ids, padding = given["input"], given.get("padding_idx")
        with torch_private.no_overrides():
            assert self.axis is not None
            rows, missing = self.axis.rows(ids)
        found = call(rows, given["weight"])
        with torch_private.no_overrides():
            found = found.masked_fill(missing.unsqueeze(-1), 0)
            if padding is not None and tracked(found):  # the row that is never learned
                at = padding % self.axis.where.size
                found = torch.where((ids == at).unsqueeze(-1), found.detach(), found)
            return reduce(found, self.ranks, fresh=True)

    def _attention(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Attention of this rank's queries to the keys and values of all ranks."""
        given: dict[str, Any] = dict(zip(_ATTENTION, args, strict=False)) | kwargs
        mask, causal = given.pop("attn_mask", None), given.pop("is_causal", False)
        if given.get("dropout_p"):
            raise ApplyError(
                f"{self.where} drops some of what it attends to, and each rank would draw masks of its own. Set that "
                "dropout to 0, or plan without cp."
            )
        with torch_private.no_overrides():
            key, value = (along(given[name], self.ranks, given[name].dim() - 2, "collect") for name in ("key", "value"))
            count, every = given["query"].shape[-2], key.shape[-2]
            begin = (self.ranks.rank or 0) * count
            if causal:
                key, value = (one.narrow(-2, 0, begin + count) for one in (key, value))
                if key.is_cuda:
                    mask = causal_lower_right(count, begin + count)
                else:
                    mask = key.new_ones(count, begin + count, dtype=torch.bool).tril(begin)
            elif mask is not None:
                if mask.shape[-1] not in (1, every):
                    raise ApplyError(
                        f"{self.where} was given a mask of shape {list(mask.shape)} for {every} tokens of all ranks. "
                        "Plan again with a mask in the inputs, or without cp."
                    )
                mask = mask.narrow(-2, begin, count) if mask.shape[-2] == every else mask
        return call(**{**given, "key": key, "value": value, "attn_mask": mask})

    def _dropout(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Draw the mask of the whole tensor, as the model did before it was cut, and keep this rank's part of it."""
        if self.action.function == ATTENTION:
            return self._dropped_attention(call, dict(zip(_ATTENTION, args, strict=False)) | kwargs)
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        if not given.get("training", given.get("train", True)):
            return call(*args, **kwargs)
        tensor, dim = given["input"], self.action.dim
        with torch_private.no_overrides():
            axis = self._axis_of(tensor) if self.action.kind == "dropout" else None
            size = axis.where.size if axis is not None else tensor.shape[dim] * self.ranks.size
            whole = _ones_like(tensor, dim, size)
        mask = call(whole, given.get("p", 0.5), True)
        with torch_private.no_overrides():
            mask = axis.own_part(mask, dim) if axis is not None else along(mask, self.ranks, dim, "divide")
            return tensor.mul_(mask) if given.get("inplace") else tensor * mask

    def _dropped_attention(self, call: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor:
        """Attention that drops some weights, written out: one kernel draws for the heads that it is given."""
        dropped = given.pop("dropout_p", 0.0)
        if not dropped or not getattr(self.ranks, "has_values", True):
            return call(**given, dropout_p=dropped)
        value = given.pop("value")
        with torch_private.no_overrides():
            weights = attention_weights(**given)
            axis, shape = self._axis_of(weights), list(weights.shape)
            shape[self.action.dim] = axis.where.size
            mask = torch.bernoulli(weights.new_zeros(shape, dtype=torch.bool), 1 - dropped)
            weights = weights * axis.own_part(mask, self.action.dim) / (1 - dropped)
            return weights @ (of_each_head(value, weights) if given.get("enable_gqa") else value)


def _ones_like(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Ones in the shape of a tensor, but for one dimension, in the same order in memory: masks are drawn in it."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.detach().new_ones([shape[at] for at in order]).permute([order.index(at) for at in range(len(order))])


def _beside(bias: torch.Tensor | None, weight: Any, function: str) -> torch.Tensor | None:
    """A convolution's bias belongs to the channels: places come behind them."""
    if bias is not None and function.startswith("conv"):
        return bias.view(-1, *[1] * (weight.dim() - 2))
    return bias
