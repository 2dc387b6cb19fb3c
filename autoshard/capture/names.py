"""The module and tensor tables of a graph: who is called what, and who is tied to whom."""

from torch import nn

from autoshard.capture.graph import ModuleInfo
from autoshard.common.module_paths import is_container, join
from autoshard.common.own_tensors import Kind, own_tensors

Row = tuple[str, str, Kind]


def module_table(model: nn.Module) -> tuple[ModuleInfo, ...]:
    """Every module once, in registration order, under its first path; later paths are aliases."""
    aliases: dict[int, list[str]] = {}
    numbered: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(path)
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            numbered.update(map(id, module.children()))
    table = []
    for path, module in model.named_modules():
        others = tuple(aliases[id(module)][1:])
        row = ModuleInfo(
            path=path, class_name=type(module).__name__, aliases=others, callable=not is_container(module),
            numbered=id(module) in numbered,
        )  # fmt: skip
        table.append(row)
    return tuple(table)


def tensor_rows(model: nn.Module) -> list[Row]:
    """(name, path of the owning module, "parameter" or "buffer") for every name of every tensor."""
    first: dict[int, str] = {}
    rows: list[Row] = []
    for path, module in model.named_modules(remove_duplicate=False):
        owner = first.setdefault(id(module), path)
        rows += [(join(path, name), owner, kind) for name, _, kind in own_tensors(module)]
    return rows
