"""Let the forward of a model run in every process of a pipeline, each of which computes its own stages.

model            parts at several positions: its code runs everywhere
  embed          position 0: a Follower runs it there, others follow
  layers         a list: never called
    0, 1         position 0
    2, 3         position 1
  head           position 1
"""

import weakref
from dataclasses import dataclass

from torch import nn

from autoshard.module_paths import above, is_container, join
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.shown import Shown, call_back, send_away
from autoshard.runtime.stage_calls import Follower, Following, divide_of
from autoshard.runtime.stage_moves import Wire

_KINDS = ("_parameters", "_buffers")


@dataclass(slots=True)
class Installed:
    """Undoes `install`."""

    model: "weakref.ref[nn.Module]"

    def __deepcopy__(self, memo: dict) -> "Installed":
        copied = memo.get(id(self.model()))
        return Installed(self.model if copied is None else weakref.ref(copied))

    def remove(self) -> None:
        """Give every module its own forward and tensors back."""
        model = self.model()
        for module in () if model is None else model.modules():
            for parameter in vars(module)["_parameters"].values():
                call_back(parameter)
            for kind in _KINDS:
                if type(vars(module)[kind]) is Shown:
                    vars(module)[kind] = dict(vars(module)[kind].items())
            follower = vars(module).get("forward")
            if isinstance(follower, Follower):
                del vars(module)["forward"]
                if follower.usual is not None:
                    vars(module)["forward"] = follower.usual


def install(model: nn.Module, record: PipelineRecord, positions: dict[str, int]) -> Installed:
    """Let the forward of a model run in every process; all of them call it.

    `positions`: name of every parameter and buffer -> pipeline position of its stage.
    """
    wire = Wire(record)
    following = Following(record=record, wire=wire, divide=divide_of(record.plan))
    outermost, mixed = _places(model, positions)
    followers = []
    for path, module in model.named_modules():
        for parameter in vars(module)["_parameters"].values():
            send_away(parameter, record)
        for kind in _KINDS:
            tensors = vars(module)[kind]
            if tensors:
                at = {name: positions[join(path, name)] for name in tensors if join(path, name) in positions}
                vars(module)[kind] = Shown(tensors, at, following.wire)
        if path in outermost or path in mixed:
            followers.append(Follower(module, path, outermost.get(path), following))
    for follower in followers:
        module = follower.module()
        assert module is not None
        vars(module)["forward"] = follower
    record.extras["inference"] = following
    return Installed(weakref.ref(model))


def _places(model: nn.Module, positions: dict[str, int]) -> tuple[dict[str, int], set[str]]:
    """The outermost modules that are at one position, with it, and the modules around them that can be called."""
    below: dict[str, set[int]] = {"": set()}
    for name, position in positions.items():
        for path in above(name):
            below.setdefault(path, set()).add(position)
    outermost: dict[str, int] = {}
    mixed: set[str] = set()
    for path, module in model.named_modules():
        found = below.get(path, set())
        if any(outer in outermost for outer in above(path)) or is_container(module) or (not found and path):
            continue
        if len(found) == 1:
            outermost[path] = next(iter(found))
        else:
            mixed.add(path)
    return outermost, mixed
