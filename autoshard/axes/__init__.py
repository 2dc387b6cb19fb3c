"""ModelGraph → axis groups: which dimensions of which parameters can be cut together."""
