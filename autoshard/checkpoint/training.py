"""Training checkpoints: written by all processes at once, read again on any number of them, under any plan.

The format and the engine are torch's (`torch.distributed.checkpoint`). Here is only who holds what: a planner that
knows the parts of cut models, of pipelines and of replicas.

    save    rank 0 makes .last.saving-…/ ──▶ every rank writes its parts ──▶ all agree ──▶ exchanged for last/
    load    the boxes that were written ∩ the parts that are here ──▶ copied into place
"""

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autoshard.checkpoint.optimizer import (
    check_groups,
    groups_of,
    is_like,
    make_state,
    parameter_names,
    restore_groups,
)
from autoshard.checkpoint.parts import Held, Part, layout_of, tensors_of
from autoshard.checkpoint.write import replacing
from autoshard.errors import CheckpointError, first_line
from autoshard.runtime.agreement import Mark, agree
from autoshard.runtime.collectives import ProcessRanks, count_processes, lost

MODEL, OPTIMIZER, EXTRA, RANDOM = "model.", "optimizer.", "extra", "random."
_MOST_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What this process has for a checkpoint: tensors by key, and bytes that it writes."""

    tensors: Mapping[str, Held]
    blobs: Mapping[str, bytes]


def save_checkpoint(path: "str | os.PathLike[str]", model: nn.Module, optimizer: Optimizer | None, state: Any) -> None:
    """Write a checkpoint; see `autoshard.save_checkpoint`."""
    import torch.distributed.checkpoint as dcp

    from autoshard.checkpoint.planners import SaveParts

    path = Path(path)
    ranks = _ranks()
    with _agreed(ranks):
        content = _content(model, optimizer, state, ranks)
        _check_place(path)
    with contextlib.ExitStack() as stack:
        folder = _shared_folder(stack, path, ranks)
        with _agreed(ranks), _explained(ranks, path, "written"), torch.no_grad():
            writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=1)
            dcp.save({}, storage_writer=writer, planner=SaveParts(content), no_dist=ranks is None)
    with _agreed(ranks):  # nobody reads before the exchange
        pass


def load_checkpoint(path: "str | os.PathLike[str]", model: nn.Module, optimizer: Optimizer | None) -> Any:
    """Read a checkpoint; see `autoshard.load_checkpoint`."""
    import torch.distributed.checkpoint as dcp

    from autoshard.checkpoint.planners import LoadParts

    path = Path(path)
    ranks = _ranks()
    reader = dcp.FileSystemReader(path)

    def read(content: Content) -> Mapping[str, bytes]:
        planner = LoadParts(content)
        with _explained(ranks, path, "read"), torch.no_grad():
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=ranks is None)
        return planner.blobs

    own = f"{RANDOM}{0 if ranks is None else ranks.rank}"
    with _agreed(ranks):
        saved = _read_metadata(reader, path)
    blobs = read(Content(tensors={}, blobs={key: b"" for key in (EXTRA, own) if key in saved}))
    # Nothing is written into the model before all is known to fit.
    with _agreed(ranks):
        extra = _unpacked(blobs[EXTRA], path)
        wanted, made = _wanted(model, optimizer, saved, path)
        if optimizer is not None:
            check_groups(model, optimizer, extra["groups"], path)
    read(wanted)
    if optimizer is not None:
        restore_groups(optimizer, extra["groups"])
        for parameter, entries in made.items():
            optimizer.state[parameter].update(entries)
    if own in blobs and extra["ranks"] == (1 if ranks is None else ranks.size):
        _set_random(_unpacked(blobs[own], path))
    return extra["state"]


def _ranks() -> ProcessRanks | None:
    return ProcessRanks.of() if count_processes() > 1 else None


@contextlib.contextmanager
def _agreed(ranks: ProcessRanks | None) -> Iterator[None]:
    """Raise on all ranks if the block raises on one of them."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if ranks is not None:
        agree(ranks, Mark(), problem)
    if problem is not None:
        raise problem


def _check_place(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory. Choose another path.")
    if path.is_dir() and any(path.iterdir()) and not (path / ".metadata").exists():
        raise CheckpointError(
            f"{path} is not empty and holds no checkpoint; it would be replaced. Choose another path."
        )


def _shared_folder(stack: contextlib.ExitStack, path: Path, ranks: ProcessRanks | None) -> Path:
    """The directory that all ranks write to, made by rank 0, which exchanges it at the end."""
    if ranks is None:
        return stack.enter_context(replacing(path, carry_over=False))
    said: list[Any] = [None]
    with _agreed(ranks):
        if ranks.rank == 0:
            try:
                said = [str(stack.enter_context(replacing(path, carry_over=False)))]
            except OSError as error:
                raise CheckpointError(f"can't write {path}: {error}") from error
    try:
        dist.broadcast_object_list(said, src=0, group=ranks.group)
    except RuntimeError as error:
        raise lost(ranks, error) from error
    folder = Path(said[0])
    with _agreed(ranks):
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {ranks.rank} does not see {path.parent} as rank 0 does. Save to a directory that all machines "
                "share."
            )
    return folder


def _content(model: nn.Module, optimizer: Optimizer | None, state: Any, ranks: ProcessRanks | None) -> Content:
    """Collect what this process holds."""
    held_of = layout_of(model)
    tensors = {MODEL + name: held_of(name, tensor) for name, tensor in tensors_of(model).items()}
    rank = 0 if ranks is None else ranks.rank
    groups = None
    if optimizer is not None:
        groups = groups_of(model, optimizer)
        names = parameter_names(model, optimizer)
        for parameter, entries in optimizer.state.items():
            name = names[id(parameter)]
            whole = held_of(name, parameter)
            for entry, value in entries.items():
                key = f"{OPTIMIZER}{name}.{entry}"
                if not isinstance(value, torch.Tensor):
                    raise CheckpointError(
                        f"the optimizer keeps {entry!r} of {name} as a {type(value).__name__}; only tensors are saved. "
                        "Use one of torch.optim."
                    )
                if is_like(value, parameter):
                    tensors[key] = held_of(name, value)
                elif whole.parts:  # what counts steps: whoever has the parameter has the same
                    plain = getattr(value, "parts", (value,))[0]
                    tensors[key] = _whole(key, plain, any(part.written for part in whole.parts))
    blobs = {f"{RANDOM}{rank}": _packed(_random_states())}
    if rank == 0:
        extra = {"state": state, "groups": groups, "ranks": 1 if ranks is None else ranks.size}
        blobs[EXTRA] = _packed(extra)
        _unpacked(blobs[EXTRA], Path())  # what can't be read again must not be written
    return Content(tensors=tensors, blobs=blobs)


def _whole(name: str, value: torch.Tensor, written: bool = True) -> Held:
    part = Part(value=value.detach(), offset=(0,) * value.dim(), written=written)
    return Held(name=name, shape=tuple(value.shape), dtype=value.dtype, parts=(part,))


def _wanted(
    model: nn.Module, optimizer: Optimizer | None, saved: Mapping[str, Any], path: Path
) -> tuple[Content, dict[torch.Tensor, dict[str, Any]]]:
    """What this process needs of a checkpoint, and the optimizer state that it is read into; nothing is set yet."""
    held_of = layout_of(model)
    wanted = {MODEL + name: held_of(name, tensor) for name, tensor in tensors_of(model).items()}
    _check_same(wanted, {key: one for key, one in saved.items() if key.startswith(MODEL)}, path)
    made: dict[torch.Tensor, dict[str, Any]] = {}
    if optimizer is not None:
        names = parameter_names(model, optimizer)
        states = [key for key in saved if key.startswith(OPTIMIZER)]
        by_name: dict[str, list[str]] = {}
        for key in states:
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
            by_name.setdefault(name, []).append(entry)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                here = held_of(name, parameter)
                for entry in by_name.get(name, []) if here.parts else []:
                    key = f"{OPTIMIZER}{name}.{entry}"
                    shape, dtype = tuple(saved[key].size), saved[key].properties.dtype
                    like = shape == here.shape and len(shape) > 0
                    value = make_state(parameter, like, shape, dtype, group)
                    made.setdefault(parameter, {})[entry] = value
                    wanted[key] = held_of(name, value) if like else _whole(key, value)
    return Content(tensors=wanted, blobs={}), made


def _check_same(wanted: Mapping[str, Held], saved: Mapping[str, Any], path: Path) -> None:
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
    from torch.distributed.checkpoint.api import CheckpointException

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


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes, path: Path) -> Any:
    """Read what `_packed` wrote: tensors, numbers, texts and containers of them; no code is run."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        what = f"the state in {path}" if path.name else "the state to be saved"
        raise CheckpointError(
            f"{what} has more than tensors, numbers, texts and lists or dicts of them: {first_line(error)}"
        ) from None


def _random_states() -> dict[str, Any]:
    """The states of torch's random generators: of the CPU and of the current accelerator."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        states["accelerator"] = module.get_rng_state()
    return states


def _set_random(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "accelerator" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["accelerator"])
