"""The names of torch that the package uses exist in the torch in use: the first test to look at after an update."""

import ast
import importlib.util
import types

import pytest
import torch
import torch.distributed.fsdp  # chains of names lead there
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard import torch_private
from tests.sources import FILES, PACKAGE, names, nodes_of

PRIVATE = PACKAGE / "torch_private.py"


def chain(node):
    """The names of `torch.a.b`, from the second on; None where it begins with something else."""
    links = []
    while isinstance(node, ast.Attribute):
        links.append(node.attr)
        node = node.value
    return links[::-1] if isinstance(node, ast.Name) and node.id == "torch" else None


def nodes(kind, files):
    """Every node of a kind, with the place where it stands."""
    for path in files:
        for node in nodes_of(path):
            if isinstance(node, kind):
                yield f"{names(path)}:{node.lineno}", node


def test_attributes_of_torch_exist():
    missing, count = [], 0
    for where, node in nodes(ast.Attribute, FILES):
        links, thing = chain(node), torch
        for name in links or ():
            count += 1
            thing = getattr(thing, name, None)
        if links and thing is None and links[-1] not in ("cuda", "WORLD"):  # None in builds for the CPU, before a group
            missing.append(f"{where} torch.{'.'.join(links)}")
    assert not missing and count > 1000


def test_imports_of_torch_exist():
    missing, count = [], 0
    for where, node in nodes(ast.ImportFrom, FILES):
        if (node.module or "").partition(".")[0] != "torch":
            continue
        module = importlib.import_module(node.module)
        for name in node.names:
            count += 1
            if not hasattr(module, name.name) and not importlib.util.find_spec(f"{node.module}.{name.name}"):
                missing.append(f"{where} {node.module}.{name.name}")
    assert not missing and count > 100


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names_of_torch():
    """What torch's objects have that is private."""
    tensor = torch.ones(2, requires_grad=True)
    other = nn.Parameter(torch.ones(2).as_subclass(type("Other", (torch.Tensor,), {})))
    things = [
        tensor, other, tensor.sin().grad_fn, tensor.untyped_storage(), nn.Module(), nn.LSTM(1, 1), torch.fx.Graph(),
        torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.autograd.Function, torch.autograd.Variable,
        torch.optim.SGD([tensor]), torch.overrides.TorchFunctionMode(), FakeTensorMode(),
        torch.distributed.ProcessGroup,
    ]  # fmt: skip
    return {name for thing in things for name in dir(thing) if is_private(name)} | {"_orig_mod"}


def defined(files):
    """The names that files define, of functions, classes and attributes."""
    found = set()
    for node in (node for path in files for node in nodes_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_uses(path, known, everywhere):
    """Yield (line, name) for each private name of torch in a file: behind `torch`, of anything else, or as text.

    `everywhere`: the names that all files define.
    """
    own = defined([path])
    for node in nodes_of(path):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else [node.module]
            for module in modules:
                links = module.split(".") + ([] if isinstance(node, ast.Import) else [name.name for name in node.names])
                yield from ((node.lineno, link) for link in links if links[0] == "torch" and is_private(link))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            links = chain(node)
            of_op = ast.unparse(node.value).startswith(("aten", "torch.ops"))
            ours = own | (everywhere if ast.unparse(node.value) == "self" else set())  # of a class it is made from
            if not of_op and (links or (node.attr in known and node.attr not in ours)):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            links = [link for link in node.value.split(".") if link in known and not hasattr(torch.ops.aten, link)]
            yield from ((node.lineno, link) for link in links)


def test_private_names_are_in_one_file():
    """Two modules and what `torch_private.py` lists, ten with `_apply`; `torch._C` itself does nothing."""
    known = private_names_of_torch()
    assert {"_parameters", "_version", "_schema", "_base", "_is_param", "_apply", "_orig_mod", "_use_count"} <= known
    everywhere = defined(FILES)
    used = {names(path): sorted(set(private_uses(path, known, everywhere))) for path in FILES}
    inside = {name for _, name in used.pop(names(PRIVATE))} - {"_C"}
    outside = {path: {name for _, name in found} for path, found in used.items() if found}
    assert outside == {"capture/run.py": {"_apply"}}  # conversions are followed
    listed = {name for _, name, _ in torch_private.NEEDED} | {"_python_dispatch", "_subclasses"}
    assert inside == listed
    assert len(inside.union(*outside.values())) <= 10


def test_a_torch_without_a_private_name_is_refused(monkeypatch):
    monkeypatch.delattr(torch._C, "_swap_tensor_impl")
    with pytest.raises(ImportError, match="needs _swap_tensor_impl of torch"):
        importlib.util.spec_from_file_location("again", PRIVATE).loader.exec_module(types.ModuleType("again"))
