"""What a plan would cost for other sizes or devices: a few polynomials, and one formula for page and tests."""

from autoshard.report.whatif.build import what_if_data
from autoshard.report.whatif.predict import predict

__all__ = ["predict", "what_if_data"]
