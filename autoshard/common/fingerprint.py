"""Which model a plan belongs to: a hash of what the model's tensors are called and look like, not of their values."""

import hashlib

import torch
from torch import nn

from autoshard.common.module_paths import join
from autoshard.common.packed import is_packed, named_stored, stored_tensors
from autoshard.torch_private import unsaved_buffers


def fingerprint(model: nn.Module) -> str:
    """Hash names, shapes, dtypes and ties of all parameters and saved buffers, sorted by name, with SHA-256.

    Of packed ones (`packed.py`), those of what is behind the face as well.

    Buffers that are not saved in the state dict are left out: models make and drop those as they run. The same for a
    model on meta, on CPU or spread over devices.
    """
    unsaved = {
        join(path, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in unsaved_buffers(module)
    }
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in unsaved:
            tensors[name] = buffer
    first: dict[object, str] = {}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        tie = first.setdefault(_place(tensor), name) if tensor.numel() else name
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tie}\n".encode())
        for path, stored in named_stored(tensor) if is_packed(tensor) else ():
            digest.update(f"{name}.{path} {tuple(stored.shape)} {stored.dtype}\n".encode())
    return digest.hexdigest()


def _place(tensor: torch.Tensor) -> object:
    """What tied tensors have in common, also on meta where all addresses are zero."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    tensor = stored_tensors(tensor)[0]
    return tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
