"""The names of torch that the package uses exist in the torch in use: the first test to look at after an update."""

import ast
import importlib.util

import pytest
import torch
import torch.distributed.fsdp  # chains of names lead there

from tests.sources import FILES, PACKAGE, names, nodes_of

PRIVATE = PACKAGE / "torch_private.py"


def has_private(name):
    """Whether a thing of torch has a private attribute which `torch_private.py` reads of a variable."""
    tensor = torch.ones(2, requires_grad=True)
    things = [
        (tensor, ("_use_count", "_backward_hooks")),
        (tensor.sin().grad_fn, ("_sequence_nr",)),
    ]
    owners = [thing for thing, names in things if name in names]
    return bool(owners) and all(hasattr(owner, name) for owner in owners)


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


PRIVATE_NAMES = sorted(
    {
        node.attr
        for _, node in nodes(ast.Attribute, [PRIVATE])
        if node.attr.startswith("_") and not node.attr.startswith("__") and chain(node) is None
    }
)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_attributes_exist(name):
    assert has_private(name), f"{name} is gone from torch {torch.__version__}"


def test_names_that_the_import_checks_are_all_of_torch_c():
    used = {
        chain(node)[1]
        for _, node in nodes(ast.Attribute, [PRIVATE])
        if (chain(node) or [""])[:1] == ["_C"] and len(chain(node)) == 2
    }
    checked = {node.value for _, node in nodes(ast.Constant, [PRIVATE]) if hasattr(torch._C, str(node.value))}
    assert used == checked
