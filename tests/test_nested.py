"""Tensors are found in dataclasses, also in those that guard their attributes."""

import dataclasses

import torch

from autoshard.nested import map_tensors, tensors_in


@dataclasses.dataclass
class Guarded:
    """A class as configurations have it whose values differ from layer to layer."""

    size: int
    table: torch.Tensor

    def __getattribute__(self, name):
        if name == "size":
            raise RuntimeError("ask each layer for its size")
        return super().__getattribute__(name)


def test_fields_of_a_class_that_refuses_to_be_asked():
    value = Guarded(3, torch.ones(2))
    assert [path for path, _ in tensors_in(value, "config")] == ["config.table"]
    assert map_tensors(value, lambda tensor: tensor) is value
