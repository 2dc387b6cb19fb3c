"""Proof by execution: the same inputs through the original and the applied model, and the first place they part."""

from autoshard.verify.report import DevicePeak, Difference, Verification

__all__ = ["DevicePeak", "Difference", "Verification"]  # verify.py reads most of the package: only who runs it does
