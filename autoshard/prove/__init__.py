"""Axis groups → proved cuts: what must be scaled on a rank, and the proof that the ranks together equal the whole."""
