"""Proof by execution: the same inputs through the original and the applied model, and the first place they part."""

from autoshard.verify.report import DevicePeak, Difference, Verification
from autoshard.verify.verify import verify

__all__ = ["DevicePeak", "Difference", "Verification", "verify"]
