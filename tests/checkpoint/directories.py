"""What several tests ask of a saved directory."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def contents(directory: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a directory."""
    return {
        str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()
    }


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of all its safetensors files, as the library reads them."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and values."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].cpu(), value.cpu()), name
