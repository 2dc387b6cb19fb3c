"""A plan as one HTML file: everything in it, nothing fetched."""

from autoshard.report.page.page import make_page

__all__ = ["make_page"]
