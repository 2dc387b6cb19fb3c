"""How far two tensors are apart, and whether rounding explains it."""

import math

import torch

TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-4}
"""Largest difference relative to the largest value of a tensor. Models compute parts in single precision anyhow."""


def difference(wanted: torch.Tensor, found: torch.Tensor, noise: float = 0.0) -> float:
    """The largest difference where it is above what rounding explains, else 0."""
    off, scale = off_by(wanted, found)
    return off if off > TOLERANCES.get(wanted.dtype, 5e-4) * scale + noise else 0.0


def off_by(wanted: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """(largest difference, largest value); the first is infinite where no rounding explains it."""
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return math.inf, 0.0
    wanted, found = wanted.detach(), found.detach()
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return (0.0 if torch.equal(wanted, found) else math.inf), 0.0
    if not wanted.numel():
        return 0.0, 0.0
    off, scale = float((wanted - found).abs().max()), float(wanted.abs().max())
    if not (math.isfinite(off) and math.isfinite(scale)):
        good = wanted.isfinite()
        same = wanted.isnan() == found.isnan()
        if not torch.equal(good, found.isfinite()) or not bool(
            (same & (good | wanted.isnan() | (wanted == found))).all()
        ):
            return math.inf, 0.0
        if not good.any():
            return 0.0, 0.0
        off, scale = float((wanted - found)[good].abs().max()), float(wanted[good].abs().max())
    return off, scale
