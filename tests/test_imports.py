"""House rules that `ast` can check: imports point down, private torch in one place. The rest: `test_process_exit`."""

import ast
import graphlib

from tests.sources import FILES, PACKAGE, imports, names, nodes_of

# A package may import packages of lower layers, and its own files. What lies at the root besides is named here, too.
LAYERS = (
    {"errors", "nested", "torch_private", "common", "plan"},
    {"schedules"},
    {"capture", "cluster", "runtime"},
    {"profile", "axes", "simulate", "checkpoint", "pipelines"},
    {"flow", "check"},
    {"engine"},
    {"strategies"},
    {"verify"},
    {"integrations"},
    {"search"},
    {"api"},
    {"report"},
    {"cli"},
    {"__main__"},
)
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


def package_of(path) -> str:
    """`autoshard/capture/record.py` -> capture; `autoshard/plan/plan.py` -> plan; `autoshard/__init__.py` -> ''."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def test_imports_point_down():
    for path in FILES:
        package = package_of(path)
        if not package:
            continue  # __init__.py holds the public names, from every layer
        assert package in LAYER, f"{package} has no layer: give it one in {__file__}"
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "autoshard" or len(parts) < 2 or parts[1] == package:
                continue
            used, where = parts[1], f"{names(path)}:{line}"
            # else it is `from autoshard import x` of a public name
            assert used in LAYER, f"{where} imports {module}: import from the package that defines it"
            allowed = LAYER[used] < LAYER[package] or LAYER[used] == 0
            assert allowed, f"{where}: {package} (layer {LAYER[package]}) imports {used} (layer {LAYER[used]})"


def test_no_modules_import_each_other():
    """Neither when they are imported, nor inside functions, nor for annotations."""
    modules = {".".join(["autoshard", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in FILES}
    modules = {module.removesuffix(".__init__"): path for module, path in modules.items()}
    graph = {module: set() for module in modules}
    for module, path in modules.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    graph[module].add(whole if whole in modules else node.module)
    edges = {module: used & set(modules) - {module} for module, used in graph.items() if module != "autoshard"}
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_functions_and_files_are_short():
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 450, names(path)
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 60, f"{names(path)}:{node.lineno} {node.name}"


def test_the_runtime_does_not_know_the_planner():
    planner = {"capture", "profile", "flow", "engine", "strategies", "cluster"}
    for path in FILES:
        if package_of(path) == "runtime":
            used = {module.split(".")[1] for _, module in imports(path) if module.startswith("autoshard.")}
            assert not used & planner, f"{names(path)} imports {used & planner}"


def test_private_torch_is_imported_in_one_place():
    for path in FILES:
        if package_of(path) == "torch_private":
            continue
        for line, module in imports(path):
            private = module.split(".")[0] == "torch" and any(
                part.startswith("_") and not part.startswith("__") for part in module.split(".")[1:]
            )
            assert not private, f"{names(path)}:{line} imports {module}: do it in autoshard/torch_private.py"
