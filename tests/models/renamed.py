"""A model under other names: every module, parameter and buffer gets a random one, and its code goes on as before."""

import random
import string
from collections.abc import Mapping
from typing import Any

from torch import nn

TABLES = ("_modules", "_parameters", "_buffers")


class Aliased(dict):
    """The children, parameters or buffers of a module under new names. Code that asks by the old name finds them too.

    Whoever lists the model (`named_modules`, `state_dict`) sees new names only.
    """

    def __init__(self, table: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.names = names
        super().__init__({names[name]: item for name, item in table.items()})

    def __reduce__(self) -> Any:  # a copy has the new names as its keys already
        return _again, (self.names, dict(self))

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self.names.get(name, name))

    def __setitem__(self, name: str, item: Any) -> None:
        super().__setitem__(self.names.get(name, name), item)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(self.names.get(name, name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self.names.get(name, name))  # type: ignore[call-overload]

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self.names.get(name, name), default)


def _again(names: Mapping[str, str], items: dict[str, Any]) -> Aliased:
    made = Aliased({}, names)
    made.update(items)
    return made


def rename(model: nn.Module, seed: int = 0) -> dict[str, str]:
    """Give each word that occurs in the model's paths a random one in its place, numbers included.

    "layers.0.attention.weight" -> "qhdz.xwkt.ppoa.bncm". One word is one word everywhere, so layers that are alike stay
    alike. Returns {new word: old word}.
    """
    rng = random.Random(seed)
    names: dict[str, str] = {}
    tables = {id(module): module for module in model.modules()}
    for module in tables.values():
        for kind in TABLES:
            for name in getattr(module, kind):
                if name not in names:
                    names[name] = "".join(rng.choices(string.ascii_lowercase, k=8))
    for module in tables.values():
        for kind in TABLES:
            module.__dict__[kind] = Aliased(getattr(module, kind), names)
        passing = module._non_persistent_buffers_set
        module._non_persistent_buffers_set = {names.get(name, name) for name in passing}
    return {new: old for old, new in names.items()}


def as_before(path: str, words: Mapping[str, str]) -> str:
    """The path under the old names."""
    return ".".join(words.get(word, word) for word in path.split("."))
