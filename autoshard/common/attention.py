"""Attention of torch written out: for function modes, which are given `multi_head_attention_forward` as one function,
and for ranks that share heads and have to act inside.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional as F

Tensor = torch.Tensor
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@dataclass(frozen=True, slots=True)
class _Attention:
    """The arguments of torch's function, in its order.

    `query`, `key`, `value`: (length, batch, width), or (length, width) of one sequence. `packed`: the weights of the
    three projections below each other.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    width: int
    heads: int
    packed: Tensor | None
    bias: Tensor | None
    added_key: Tensor | None
    added_value: Tensor | None
    adds_zero: bool
    dropout: float
    last_weight: Tensor
    last_bias: Tensor | None
    training: bool
    padding: Tensor | None
    wants_weights: bool
    mask: Tensor | None
    is_separate: bool
    query_weight: Tensor | None
    key_weight: Tensor | None
    value_weight: Tensor | None
    static_key: Tensor | None
    static_value: Tensor | None
    averages: bool
    is_causal: bool


def written_out(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> Callable[[], Any] | None:
    """What computes a call of a torch function by functions that modes see; None where there is nothing to see inside.

    Attention that is given its keys and values, or has a mask for each head, is one function.
    """
    if func is not F.multi_head_attention_forward or len(_SIGNATURE.parameters) != len(fields(_Attention)):
        return None
    bound = _SIGNATURE.bind(*args, **(kwargs or {}))
    bound.apply_defaults()
    call = _Attention(*bound.arguments.values())
    is_plain = call.static_key is None and call.static_value is None and (call.mask is None or call.mask.dim() == 2)
    return (lambda: _attend(call)) if is_plain else None


def attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What `scaled_dot_product_attention` multiplies values by, before it drops any: [..., heads, queries, keys]."""
    key = of_each_head(key, query) if enable_gqa else key
    scores = (query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    return _softmax(scores, attn_mask)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Weights of masked scores as `scaled_dot_product_attention` has them: 0 of a query that may see no key."""
    if mask is None:
        return F.softmax(scores, dim=-1)
    sees_none = (scores == -math.inf).all(dim=-1, keepdim=True)
    return F.softmax(scores.masked_fill(sees_none, 0.0), dim=-1).masked_fill(sees_none, 0.0)


def of_each_head(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of the queries, where neighbouring heads share them."""
    heads = query.shape[-3] // shared.shape[-3]
    return shared.repeat_interleave(heads, -3) if heads > 1 else shared


def _attend(call: _Attention) -> tuple[Tensor, Tensor | None]:
    """The result and, where they are wanted, the weights of attention.

    Heads are counted by the width that a projection gives: a rank has some of them.
    """
    is_one = call.query.dim() == 2
    each = call.query.shape[-1] // call.heads
    q, k, v = (part.unsqueeze(1) if is_one else part for part in _projected(call))
    if call.added_key is not None and call.added_value is not None:
        k = torch.cat([k, call.added_key.repeat(1, k.shape[1], 1)])
        v = torch.cat([v, call.added_value.repeat(1, v.shape[1], 1)])
    # (batch, heads, length, each)
    q, k, v = (part.unflatten(-1, (-1, each)).permute(1, 2, 0, 3) for part in (q, k, v))
    if call.adds_zero:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    dropout = call.dropout if call.training else 0.0
    in_full = call.wants_weights or dropout > 0.0  # a mask of dropout can be shared out where it is drawn by itself
    mask, is_causal = _mask(call, in_full)
    if mask is not None and k.shape[2] > mask.shape[-1]:
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))
    weights = None
    if in_full:
        scores = (q * math.sqrt(1.0 / each)) @ k.transpose(-2, -1)
        scores = scores if mask is None else scores + mask
        weights = F.softmax(scores, dim=-1) if call.wants_weights else _softmax(scores, mask)
        weights = F.dropout(weights, p=dropout) if dropout > 0.0 else weights
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal)
    result = F.linear(mixed.permute(2, 0, 1, 3).flatten(-2), call.last_weight, call.last_bias)
    if weights is None or not call.wants_weights:
        return result.squeeze(1) if is_one else result, None
    weights = weights.mean(dim=1) if call.averages else weights
    return (result.squeeze(1), weights.squeeze(0)) if is_one else (result, weights)


def _projected(call: _Attention) -> tuple[Tensor, ...]:
    """Queries, keys and values; one product where all are of the same tensor."""
    inputs = (call.query, call.key, call.value)
    weights: Any = (call.query_weight, call.key_weight, call.value_weight)
    if not call.is_separate:
        assert call.packed is not None
        if call.query is call.key and call.key is call.value:
            return F.linear(call.query, call.packed, call.bias).chunk(3, dim=-1)
        weights = call.packed.chunk(3)
    biases = (None, None, None) if call.bias is None else call.bias.chunk(3)
    return tuple(F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True))


def _mask(call: _Attention, in_full: bool) -> tuple[Tensor | None, bool]:
    """What is added to scores, and whether they are causal without it: not where scores are written out in full.

    Raises RuntimeError as torch does.
    """
    if call.is_causal and call.mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if call.is_causal and call.padding is None and not in_full:
        return None, True
    mask = None if call.mask is None else _added(call.mask, call.query.dtype)
    if call.padding is None:
        return mask, False
    padding = call.padding if call.query.dim() == 3 else call.padding.unsqueeze(0)
    padding = _added(padding, call.query.dtype)[:, None, None, :]
    return (padding if mask is None else mask + padding), False


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: -inf where a boolean one is True."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
