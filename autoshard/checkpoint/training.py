"""Training checkpoints: written by all processes at once, read again on any number of them, under any plan.

The format, the engine and the planners are torch's (`torch.distributed.checkpoint`); `parts.py` tells them who holds
what of cut models, of pipelines and of replicas. Optimizer state is under the names of its parameters, so that it is
found again under any plan.

    save    rank 0 makes .last.saving/ ──▶ every rank writes its parts ──▶ all agree ──▶ renamed to last/
    load    the boxes that were written ∩ the parts that are here ──▶ copied into place
"""

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.optim import Optimizer

from autoshard.checkpoint.boxes import Box
from autoshard.checkpoint.parts import Layout, StoredParts, layout_of, tensors_of
from autoshard.checkpoint.write import replacing, standing
from autoshard.errors import CheckpointError, first_line
from autoshard.runtime.agreement import together
from autoshard.runtime.collectives import ProcessRanks, count_processes, lost

MODEL, OPTIMIZER, EXTRA, RANDOM = "model.", "optimizer.", "extra", "random."
_MOST_LISTED = 5
Content = dict[str, Any]
"""Key of a checkpoint -> what this process holds of a tensor (`StoredParts`), or values to be pickled."""
Group = dict[str, Any]


class SaveParts(DefaultSavePlanner):
    """torch's planner for what this process holds; of equal parts it writes those of the lowest rank."""

    def __init__(self, content: Content) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self.content = content

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(self.content, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.content[index.fqn]
        return found.values(index) if isinstance(found, StoredParts) else found


class LoadParts(DefaultLoadPlanner):
    """torch's planner for reading into what this process holds; pickled values take their place in `content`."""

    def __init__(self, content: Content) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.content = content

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = self.content, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.content[index.fqn].values(index, index.index)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.content[read_item.dest_index.fqn] = torch.load(value, weights_only=True)  # no code is run


def save_checkpoint(path: "str | os.PathLike[str]", model: nn.Module, optimizer: Optimizer | None, state: Any) -> None:
    """Write a checkpoint; see `autoshard.save_checkpoint`."""
    path, ranks = Path(path), _ranks()
    with together(ranks):
        content = _content(model, optimizer, state, ranks)
        _check_place(path)
    with contextlib.ExitStack() as stack:
        folder = _shared_folder(stack, path, ranks)
        with together(ranks), _explained(ranks, path, "written"), torch.no_grad():
            writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=1)
            dcp.save({}, storage_writer=writer, planner=SaveParts(content), no_dist=ranks is None)
    with together(ranks):  # nobody reads before the exchange
        pass


def load_checkpoint(path: "str | os.PathLike[str]", model: nn.Module, optimizer: Optimizer | None) -> Any:
    """Read a checkpoint; see `autoshard.load_checkpoint`."""
    path, ranks = standing(Path(path)), _ranks()
    reader = dcp.FileSystemReader(path)

    def read(content: Content) -> Content:
        with _explained(ranks, path, "read"), torch.no_grad():
            dcp.load({}, storage_reader=reader, planner=LoadParts(content), no_dist=ranks is None)
        return content

    own = f"{RANDOM}{0 if ranks is None else ranks.rank}"
    with together(ranks):
        saved = _read_metadata(reader, path)
    pickled = read({key: None for key in (EXTRA, own) if key in saved})
    extra = pickled[EXTRA]
    # Nothing is written into the model before all is known to fit.
    with together(ranks):
        wanted, made = _wanted(model, optimizer, saved, path)
        if optimizer is not None:
            _check_groups(model, optimizer, extra["groups"], path)
    read(wanted)
    if optimizer is not None:
        for group, values in zip(optimizer.param_groups, extra["groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        for parameter, entries in made.items():
            optimizer.state[parameter].update(entries)
    if own in pickled and extra["ranks"] == (1 if ranks is None else ranks.size):
        _set_random(pickled[own])
    return extra["state"]


def _ranks() -> ProcessRanks | None:
    return ProcessRanks.of() if count_processes() > 1 else None


def _check_place(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory. Choose another path.")
    if path.is_dir() and any(path.iterdir()) and not (path / ".metadata").exists():
        raise CheckpointError(
            f"{path} is not empty and holds no checkpoint; it would be replaced. Choose another path."
        )


def _shared_folder(stack: contextlib.ExitStack, path: Path, ranks: ProcessRanks | None) -> Path:
    """The directory that all ranks write to, made by rank 0, which puts it in its place at the end."""
    folder = path
    with together(ranks):
        if ranks is None or ranks.rank == 0:
            try:
                folder = stack.enter_context(replacing(path, carry_over=False))
            except OSError as error:
                raise CheckpointError(f"can't write {path}: {error}") from error
    if ranks is None:
        return folder
    folder = Path(ranks.exchange(str(folder))[0])
    with together(ranks):
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {ranks.rank} does not see {path.parent} as rank 0 does. Save to a directory that all machines "
                "share."
            )
    return folder


def _content(model: nn.Module, optimizer: Optimizer | None, state: Any, ranks: ProcessRanks | None) -> Content:
    """Collect what this process holds."""
    parts_of = layout_of(model)
    content: Content = {MODEL + name: parts_of(name, tensor) for name, tensor in tensors_of(model).items()}
    groups = None
    if optimizer is not None:
        groups = _groups_of(model, optimizer)
        names = _parameter_names(model, optimizer)
        for parameter, entries in optimizer.state.items():
            name = names[id(parameter)]
            for entry, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    raise CheckpointError(
                        f"the optimizer keeps {entry!r} of {name} as a {type(value).__name__}; only tensors are saved. "
                        "Use one of torch.optim."
                    )
                like = value.shape == parameter.shape and value.dim() > 0
                content[f"{OPTIMIZER}{name}.{entry}"] = _parts(parts_of, name, parameter, value, like)
    content[f"{RANDOM}{0 if ranks is None else ranks.rank}"] = _random_states()
    if ranks is None or ranks.rank == 0:
        content[EXTRA] = {"state": state, "groups": groups, "ranks": 1 if ranks is None else ranks.size}
        _check_readable(content[EXTRA])
    return content


def _parts(parts_of: Layout, name: str, parameter: torch.Tensor, value: torch.Tensor, like: bool) -> StoredParts:
    """What this process holds of a piece of state: laid out `like` its parameter, or the same wherever that is."""
    if like:
        return parts_of(name, value)
    plain: torch.Tensor = getattr(value, "parts", (value,))[0]
    whole = parts_of(name, parameter).boxes
    box = Box(plain.detach(), (0,) * plain.dim(), any(one.written for one in whole))
    return StoredParts(tuple(plain.shape), plain.dtype, (box,) if whole else ())


def _wanted(
    model: nn.Module, optimizer: Optimizer | None, saved: Mapping[str, Any], path: Path
) -> tuple[Content, dict[torch.Tensor, dict[str, Any]]]:
    """What this process needs of a checkpoint, and the optimizer state that it is read into; nothing is set yet."""
    parts_of = layout_of(model)
    wanted: Content = {MODEL + name: parts_of(name, tensor) for name, tensor in tensors_of(model).items()}
    _check_same(wanted, {key: one for key, one in saved.items() if key.startswith(MODEL)}, path)
    made: dict[torch.Tensor, dict[str, Any]] = {}
    if optimizer is None:
        return wanted, made
    names = _parameter_names(model, optimizer)
    entries: dict[str, list[str]] = {}
    for key in saved:
        if key.startswith(OPTIMIZER):
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
            entries.setdefault(name, []).append(entry)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            here = parts_of(name, parameter)
            for entry in entries.get(name, []) if here.boxes else []:
                key = f"{OPTIMIZER}{name}.{entry}"
                shape, dtype = tuple(saved[key].size), saved[key].properties.dtype
                like = shape == here.shape and len(shape) > 0
                if like:
                    value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                else:  # what counts steps is on the CPU unless the optimizer runs fused or captured
                    device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                    value = torch.zeros(shape, dtype=dtype, device=device)
                made.setdefault(parameter, {})[entry] = value
                wanted[key] = _parts(parts_of, name, parameter, value, like)
    return wanted, made


def _check_same(wanted: Content, saved: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` unless a checkpoint has this model's tensors in their shapes, and no others."""
    missing = sorted(key.removeprefix(MODEL) for key in wanted.keys() - saved.keys())
    strange = sorted(key.removeprefix(MODEL) for key in saved.keys() - wanted.keys())
    others = [
        f"{key.removeprefix(MODEL)} {list(saved[key].size)} for {list(one.shape)}"
        for key, one in wanted.items() if key in saved and tuple(saved[key].size) != one.shape
    ]  # fmt: skip
    for rows, words in ((missing, "lacks"), (strange, "also has"), (others, "has other shapes:")):
        if rows:
            more = f" and {len(rows) - _MOST_LISTED} more" if len(rows) > _MOST_LISTED else ""
            raise CheckpointError(
                f"{path} is not of this model: it {words} {', '.join(rows[:_MOST_LISTED])}{more}. "
                "Build the model as it was when the checkpoint was written."
            )


def _read_metadata(reader: Any, path: Path) -> Mapping[str, Any]:
    try:
        return reader.read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
        why = "it does not exist" if not path.exists() else first_line(error)
        raise CheckpointError(f"{path} is not a training checkpoint that can be read: {why}.") from None


@contextlib.contextmanager
def _explained(ranks: ProcessRanks | None, path: Path, done: str) -> Iterator[None]:
    """Turn what torch's engine raises into errors that say whose fault it was."""
    try:
        with warnings.catch_warnings():
            # It says that it runs in one process, which is what it was asked to do.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        who = f" on rank {rank}" if ranks is not None else ""
        raise CheckpointError(f"{path} could not be {done}{who}: {first_line(cause)}.") from error
    except RuntimeError as error:
        if ranks is None:
            raise CheckpointError(f"{path} could not be {done}: {first_line(error)}.") from error
        raise lost(ranks, error) from error


def _check_readable(value: Any) -> None:
    """Raise `CheckpointError` for what could be written but not read again."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the state to be saved has more than tensors, numbers, texts and lists or dicts of them: "
            f"{first_line(error)}"
        ) from None


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """id of a parameter -> its first name. Raises `CheckpointError` for parameters that the model does not have."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    for number, group in enumerate(optimizer.param_groups):
        strange = [parameter for parameter in group["params"] if id(parameter) not in names]
        if strange:
            raise CheckpointError(
                f"group {number} of the optimizer has a parameter of shape {list(strange[0].shape)} that the model "
                "does not have. Make the optimizer after autoshard.apply, from model.parameters()."
            )
    return names


def _groups_of(model: nn.Module, optimizer: Optimizer) -> list[Group]:
    """The parameter groups with names in the place of parameters."""
    names = _parameter_names(model, optimizer)
    return [{**group, "params": [names[id(one)] for one in group["params"]]} for group in optimizer.param_groups]


def _check_groups(model: nn.Module, optimizer: Optimizer, saved: list[Group] | None, path: Path) -> None:
    """Raise `CheckpointError` unless an optimizer groups its parameters as the saved one did."""
    if saved is None:
        raise CheckpointError(f"{path} was written without an optimizer. Load it without one, and start a new one.")
    now = _groups_of(model, optimizer)
    if [sorted(group["params"]) for group in now] != [sorted(group["params"]) for group in saved]:
        counts = [", ".join(str(len(group["params"])) for group in groups) for groups in (now, saved)]
        raise CheckpointError(
            f"the optimizer has {len(now)} groups of {counts[0]} parameters, and the one in {path} has {len(saved)} of "
            f"{counts[1]}, or of others. Make the optimizer as it was when the checkpoint was written."
        )


def _random_states() -> dict[str, Any]:
    """The states of torch's random generators: of the CPU and of the current accelerator."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        states["accelerator"] = torch.get_device_module().get_rng_state()
    return states


def _set_random(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "accelerator" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["accelerator"])
