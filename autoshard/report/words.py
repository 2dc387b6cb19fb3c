"""Words for dimensions of parameters, made of their paths alone: "layers.0-2.mlp: gate, up rows; down columns"."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from autoshard.common.module_paths import join

T = TypeVar("T")
_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")


def members(cut: Sequence[tuple[str, int, int, bool]]) -> tuple[str, str]:
    """Say in which module which dimensions are cut: (parameter, dimension, how many it has, whether only a part of it).

    Vectors go with the matrices beside them and are named only where there are none.
    """
    if any(ndim > 1 for _, _, ndim, _ in cut):
        cut = [row for row in cut if row[2] > 1]
    named: dict[str, list[str]] = {}
    for name, dim, ndim, part in cut:
        word = {0: "rows", 1: "columns"}[dim] if ndim == 2 else "entries" if ndim < 2 else f"dimension {dim}"
        label = "" if name == "weight" else name.removesuffix(".weight")
        named.setdefault(f"a part of the {word} of" if part else word, []).append(label)
    labels = [label for found in named.values() for label in found]
    above = labels[0].split(".")[:-1]
    for label in labels:
        parts = label.split(".")[:-1]
        while parts[: len(above)] != above:
            above.pop()
    prefix = "".join(f"{part}." for part in above)
    texts = []
    for word, found in named.items():
        folded = ", ".join(fold([label.removeprefix(prefix) for label in found]))
        texts.append((f"{word} {folded}" if word.startswith("a part") else f"{folded} {word}").strip())
    return prefix[:-1], "; ".join(texts)


def after(block: str, module: str, text: str) -> str:
    where = join(block, module)
    return f"{where}: {text}" if where else text


def fold_paths(paths: Sequence[str]) -> str:
    """ "layers.0", "layers.1", "layers.2"   ->   "layers.0-2"; the first few of what can't be folded."""
    found = fold(paths)
    return ", ".join(found) if len(found) < 4 else f"{', '.join(found[:3])} and {len(found) - 3} more"


def fold(paths: Sequence[str]) -> list[str]:
    """Join paths that differ in one number only; the order of the first of each is kept."""
    made = list(dict.fromkeys(paths))
    most = max((len(_NUMBERS.findall(path)) for path in made), default=0)
    for index in reversed(range(most)):
        groups: dict[tuple[str, str] | str, list[int]] = {}
        for path in made:
            numbers = list(_NUMBERS.finditer(path))
            if index < len(numbers):
                at = numbers[index]
                groups.setdefault((path[: at.start()], path[at.end() :]), []).append(int(at[0]))
            else:
                groups[path] = []
        made = [key if isinstance(key, str) else f"{key[0]}{_runs(found)}{key[1]}" for key, found in groups.items()]
    return made


def _runs(numbers: list[int]) -> str:
    """0, 1, 2, 5 -> "{0-2,5}"."""
    found = runs(numbers, lambda last, number: number == last + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]
    return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


def runs(items: Iterable[T], follows: Callable[[T, T], bool]) -> list[list[T]]:
    """Neighbours put together as long as each `follows` the one before."""
    found: list[list[T]] = []
    for item in items:
        if found and follows(found[-1][-1], item):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def outer(axis: str) -> int:
    """How many times the slices follow one another along an axis: 8 for "8x*4x64"."""
    before = re.match(r"(\d+)x\*", axis)
    return int(before[1]) if before else 1


def is_part(axis: str) -> bool:
    """Whether an axis has a part that every rank keeps."""
    return any("*" not in part for part in re.split(r"[|]", axis)) if "|" in axis else False
