"""Tests of autoshard, mirroring its rooms."""
