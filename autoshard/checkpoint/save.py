"""Save a model as ordinary sharded safetensors, the same whatever plan it is under.

    state dict of the model ──names, shapes──▶ Stored per tensor of the files ──split──▶ files
                                                      │
    the tensors of one file: gathered from devices or ranks ──▶ CPU of rank 0 ──▶ safetensors.torch.save_file

Rank 0 never holds more than one file, and what its tensors are made of.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from autoshard.checkpoint.header import DTYPES, INDEX_FILE, SINGLE_FILE
from autoshard.checkpoint.traced import Expression, evaluate, leaf, leaves
from autoshard.checkpoint.write import replacing
from autoshard.common.packed import is_packed
from autoshard.common.progress import tell
from autoshard.common.sizes import format_bytes
from autoshard.errors import CheckpointError
from autoshard.runtime.agreement import RankState, agree, together
from autoshard.runtime.collectives import ProcessRanks, Ranks
from autoshard.runtime.cut_state import CutRecord, whole_shape, whole_tensor
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.data_parallel import replica_record
from autoshard.runtime.devices import CPU, fresh_copy
from autoshard.runtime.dtensors import is_sharded, whole_of
from autoshard.runtime.moves import tied_groups
from autoshard.runtime.pipeline_record import PipelineRecord, pipeline_record
from autoshard.runtime.staged import whole_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of the files; `made`: of tensors of the model, by their names in its state dict."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    made: Expression

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in a file."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShard:
    """One file and its tensors."""

    file: str
    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(one.nbytes for one in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state dict of a model and how its tensors become whole ones; `num_parameters`: elements, ties once.

    `record`: how it is cut; `stages`: how it is divided over a pipeline of processes.
    """

    values: Mapping[str, torch.Tensor]
    record: CutRecord | None
    stages: PipelineRecord | None
    num_parameters: int

    def described(self, name: str) -> Stored:
        """Say what a tensor is when whole and on the CPU."""
        value = self.values[name]
        shape = whole_shape(value, name, self.record)
        return Stored(name=name, dtype=value.dtype, shape=shape, made=leaf(name, shape, value.dtype))

    def whole(self, name: str) -> torch.Tensor:
        """Gather a tensor; all ranks call it at once."""
        value = self.values[name].detach()
        if self.stages is None or self.stages.has(name):
            value = whole_tensor(value, name, self.record)
        return whole_of(value) if self.stages is None else whole_value(value, name, self.stages)

    def twins(self) -> list[list[str]]:
        """Names of each tensor, in alphabetical order; views of the same memory in other ways are other tensors."""
        groups: dict[object, list[str]] = {}
        for names in tied_groups(self.values):
            for name in names:
                value = self.values[name]
                same = names[0], value.shape, value.dtype, value.stride(), value.storage_offset()
                groups.setdefault(same, []).append(name)
        return [sorted(names) for names in groups.values()]


def state_of(model: nn.Module) -> SavedState:
    """Read the state dict of a model. Raises `CheckpointError` for what safetensors can't hold."""
    values: dict[str, torch.Tensor] = {}
    stages = pipeline_record(model)
    for name, value in model.state_dict(keep_vars=True).items():  # without, that of a cut model is put together
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} of the state dict is a {type(value).__name__}, and safetensors files hold tensors only. Keep "
                "it in the model's configuration, or let get_extra_state return a tensor."
            )
        if value.is_meta and (stages is None or stages.has(name)):
            raise CheckpointError(f"{name} has no data: it is on the meta device. Load the weights first.")
        if is_packed(value) and not (is_sharded(value) and (stages or replica_record(model))):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, and safetensors files hold ordinary tensors. Save the model "
                "before it is quantised, or divided by other means than autoshard."
            )
        if value.layout is not torch.strided or value.is_nested:
            raise CheckpointError(f"{name} is no dense tensor ({value.layout}). Make it dense before saving.")
        if value.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{name} is of {value.dtype}, which safetensors files can't hold. Convert it before saving."
            )
        values[name] = value.detach()
    record = cut_record(model)
    parameters = [torch.Size(whole_shape(one, name, record)).numel() for name, one in model.named_parameters()]
    return SavedState(values=values, record=record, stages=stages, num_parameters=sum(parameters))


def without_ties(state: SavedState) -> tuple[list[Stored], dict[str, str]]:
    """Every tensor of a state dict under one of its names, and the names left out -> the name that stands for them.

    Of tied names the first in alphabetical order is kept, as `safetensors.torch.save_model` does. A view of a part of
    another tensor is stored for itself.
    """
    left_out: dict[str, str] = {}
    for kept, *others in state.twins():
        left_out.update(dict.fromkeys(others, kept))
    return [state.described(name) for name in state.values if name not in left_out], left_out


def split(tensors: Iterable[Stored], left_out: Mapping[str, str], max_shard_bytes: int) -> list[FileShard]:
    """Divide tensors over files in the order given, as Transformers does; `left_out` goes to the files' metadata.

    A tensor larger than a file may be has one of its own.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {one.name: one for one in tensors}
    if not by_name:
        raise CheckpointError("there is nothing to save: the model has no parameters and no persistent buffers.")
    pattern = SINGLE_FILE.replace(".safetensors", "{suffix}.safetensors")
    found = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda one: one.nbytes,
        filename_pattern=pattern,
        max_shard_size=max_shard_bytes,
    )
    shards = []
    for file, names in found.filename_to_tensors.items():
        tied = {name: kept for name, kept in sorted(left_out.items()) if kept in names}
        tensors_of_file = tuple(by_name[name] for name in names)
        shards.append(FileShard(file=file, tensors=tensors_of_file, metadata={"format": "pt", **tied}))
    return shards


def save_state(
    model: nn.Module,
    path: Path,
    prepare: Callable[[SavedState], Sequence[FileShard]],
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write a model's tensors, divided by `prepare`, to a directory that replaces `path`; `write_more` comes first.

    All ranks that share a model call it; rank 0 writes. Raises `CheckpointError`, on the other ranks `RankError`;
    what was at `path` is then as it was.
    """
    ranks = _ranks_of(model)
    writes = not isinstance(ranks, ProcessRanks) or ranks.rank == 0
    folder: Path | None = None
    with contextlib.ExitStack() as stack, torch.no_grad():
        with together(ranks), _explained(path):
            state = state_of(model)
            shards = prepare(state)
            if writes:
                _check_path(path, sum(shard.nbytes for shard in shards))
                folder = stack.enter_context(replacing(path))
                if write_more is not None:
                    write_more(folder)
        agree(ranks, RankState(model=_digest(shards)))
        done_bytes, total_bytes = 0, sum(shard.nbytes for shard in shards)
        for shard in shards:
            tell("bytes", done_bytes, total_bytes)
            with together(ranks), _explained(path):
                _write_shard(state, shard, folder)
            done_bytes += shard.nbytes
        with together(ranks), _explained(path):
            if folder is not None:
                if len(shards) > 1:
                    (folder / INDEX_FILE).write_text(_index_of(shards, state.num_parameters), encoding="utf-8")
                stack.close()


def _ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that each have a part of a model, None where this process has all of it."""
    stages, cuts, replicas = pipeline_record(model), cut_record(model), replica_record(model)
    if stages is not None:
        return stages.ranks
    if replicas is not None and replicas.replaced:
        return replicas.ranks
    return None if cuts is None else cuts.ranks


def _write_shard(state: SavedState, shard: FileShard, folder: Path | None) -> None:
    """Gather every tensor of a file and write it; after an error go on gathering, for the other ranks wait for it."""
    error: Exception | None = None
    values: dict[str, torch.Tensor] = {}  # of the model, on the CPU
    for name in dict.fromkeys(name for one in shard.tensors for name in leaves(one.made)):
        value = state.whole(name)
        if folder is not None and error is None:
            try:
                values[name] = value if value.device == CPU else fresh_copy(value, CPU)
            except Exception as found:
                error = found
    if error is not None:
        raise error
    if folder is None:
        return
    seen = set[int]()
    made = {one.name: _made(one, values, seen) for one in shard.tensors}
    file = folder / shard.file
    file.touch()
    mode = file.stat().st_mode
    save_file(made, file, dict(shard.metadata))
    file.chmod(mode)  # the library makes it private


def _made(one: Stored, values: Mapping[str, torch.Tensor], seen: set[int]) -> torch.Tensor:
    """A tensor as it is written: whole rows one after the other, in memory that no other has; `seen`: addresses."""
    made = evaluate(one.made, values.__getitem__)
    if tuple(made.shape) != one.shape or made.dtype != one.dtype:
        raise CheckpointError(
            f"{one.name} came out as {list(made.shape)} {made.dtype} and not as {list(one.shape)} {one.dtype}."
        )
    made = made.resolve_conj().resolve_neg().contiguous()
    storage = made.untyped_storage()
    if storage.nbytes() != made.nbytes or storage.data_ptr() in seen:
        made = made.clone()
    seen.add(made.untyped_storage().data_ptr())
    return made


def _index_of(shards: Sequence[FileShard], num_parameters: int) -> str:
    """The index of several files, as Transformers writes it."""
    where = {one.name: shard.file for shard in shards for one in shard.tensors}
    about = {"total_parameters": num_parameters, "total_size": sum(shard.nbytes for shard in shards)}
    return json.dumps({"metadata": about, "weight_map": where}, indent=2, sort_keys=True) + "\n"


def _check_path(path: Path, needed_bytes: int) -> None:
    """Raise `CheckpointError` if a checkpoint can't be written to `path`, as far as can be known now."""
    if (path.exists() and not path.is_dir()) or path.suffix == ".safetensors":
        raise CheckpointError(f"{path} names a file. Give a directory: a checkpoint is several files.")
    existing = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{path} needs {format_bytes(needed_bytes)} and the disk has {format_bytes(free)} free; an old checkpoint "
            "there is deleted only after the new one is whole. Free some space, or save elsewhere."
        )


_KEPT = "What was there is as it was. Free space on that disk, or save to another directory."


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Inside, what the system and the library say of files that can't be written becomes a `CheckpointError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        where, why = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or error
        raise CheckpointError(f"could not write {where}: {why}. {_KEPT}") from error


def _digest(shards: Sequence[FileShard]) -> str:
    """What all ranks must be about to write alike."""
    listed = [(shard.file, [(one.name, one.dtype, one.shape) for one in shard.tensors]) for shard in shards]
    return hashlib.sha256(repr(listed).encode()).hexdigest()
