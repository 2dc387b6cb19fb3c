"""Know what a checkpoint holds without reading a tensor: headers and index, strictly parsed and never trusted.

    0        8                  8 + n                                      end of file
    ├────────┼──────────────────┼──────────┬─────┬─────────────────────────┤
    │ n (u64)│ JSON of n bytes  │ tensor   │ …   │ the last one ends here  │
    └────────┴──────────────────┴──────────┴─────┴─────────────────────────┘
              {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …, "__metadata__": {…}}

Format: https://github.com/huggingface/safetensors#format. Tensors fill the file with no gap and no overlap.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autoshard.checkpoint.data import Checkpoint, Entry
from autoshard.errors import CheckpointError
from autoshard.sizes import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library: more is an attack, or not a header."""
MAX_INDEX_BYTES = 500_000_000
MAX_DIMS = 64
MAX_ELEMENTS = 2**62

# What the format calls them -> what torch does; a newer dtype is known where torch knows it.
_DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _DTYPE_NAMES.items() if hasattr(torch, torch_name)
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a directory with safetensors files, of one such file, or of an index; no tensor is read.

    In a directory, as Transformers does: `model.safetensors`, else the files of `model.safetensors.index.json`, else
    all safetensors files there are. Raises `CheckpointError`, which names the file, for what is no whole checkpoint.
    """
    where = Path(path).absolute()  # files are read later, perhaps from another working directory
    if where.is_dir():
        return _open_directory(where)
    if not where.exists():
        raise CheckpointError(f"{where} does not exist. Give a directory with safetensors files, or one such file.")
    if where.name.endswith(".json"):
        return _open_index(where)
    if where.suffix in _PICKLES:
        raise _pickled(where.parent, where.name)
    return _checkpoint(where, (where,))


def _open_directory(directory: Path) -> Checkpoint:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(f"cannot list {directory}: {error.strerror}.") from None
    files = [name for name in names if name.endswith(".safetensors")]
    if SINGLE_FILE in files:
        return _checkpoint(directory, (directory / SINGLE_FILE,))
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if INDEX_FILE in indices or len(indices) == 1:
        return _open_index(directory / (INDEX_FILE if INDEX_FILE in indices else indices[0]))
    if indices:
        raise CheckpointError(f"{directory} has {len(indices)} indices: {', '.join(indices[:5])}. Give one of them.")
    if files:
        return _checkpoint(directory, tuple(directory / name for name in files))
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        weights = [name for name in pickles if name.startswith("pytorch_model")]
        raise _pickled(directory, f"pytorch_model*{Path(weights[0]).suffix}" if weights else pickles[0])
    raise CheckpointError(
        f"{directory} has no safetensors file: it holds {', '.join(names[:8]) or 'nothing'}. Give the directory that "
        "has model.safetensors or model.safetensors.index.json."
    )


def _pickled(directory: Path, pattern: str) -> CheckpointError:
    return CheckpointError(
        f"{directory / pattern} is a pickle, which can run any code when it is loaded, so it is not. Convert it, once: "
        'python -c "import glob, torch, safetensors.torch as s; [s.save_file({k: v.clone().contiguous() for k, v in '
        "torch.load(f, map_location='cpu', weights_only=True).items()}, f.rpartition('.')[0] + '.safetensors', "
        f"{{'format': 'pt'}}) for f in glob.glob({str(directory / pattern)!r})]\""
    )


def _checkpoint(path: Path, files: tuple[Path, ...]) -> Checkpoint:
    entries: dict[str, Entry] = {}
    metadata: Mapping[str, str] = {}
    for number, file in enumerate(files):
        found, about = read_header(file)
        for name, entry in found.items():
            if name in entries:
                raise CheckpointError(
                    f"{file} and {entries[name].file} both have a tensor {shown(name)}. Remove the file that does not "
                    f"belong here, or write {INDEX_FILE}, which says what is where."
                )
            entries[name] = entry
        metadata = metadata if number else about
    return Checkpoint(path=path, entries=entries, files=files, metadata=metadata)


def _open_index(index: Path) -> Checkpoint:
    directory = index.parent
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    checkpoint = _checkpoint(directory, tuple(_file_of_index(index, name) for name in names))
    for name, file_name in weight_map.items():
        entry = checkpoint.entries.get(name)
        if entry is None or entry.file != directory / file_name:
            there = "no file of the index has it" if entry is None else f"it is in {entry.file.name}"
            raise CheckpointError(
                f"{index} says that {shown(name)} is in {file_name}, and {there}. The files do not belong together: "
                "download them again, all of one version."
            )
    unlisted = [name for name in checkpoint.entries if name not in weight_map]
    if unlisted:
        raise CheckpointError(
            f"{index} does not list {shown(unlisted[0])}, which {checkpoint.entries[unlisted[0]].file.name} has "
            f"({len(unlisted)} such tensors). The files do not belong together: download all of one version again."
        )
    return checkpoint


def _read_index(index: Path) -> dict[str, str]:
    size = _regular_size(index)
    if size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index} has {size} bytes, too many for an index. Download it again.")
    data = _parse_json(index, _read_bytes(index, 0, size))
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is not an index: it has no weight_map. Download it again.")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name or "\0" in file_name:
            raise CheckpointError(f"{index} says that {shown(name)} is in {shown(file_name)}, which is no file name.")
    return weight_map


def _file_of_index(index: Path, name: str) -> Path:
    """Return the path of a file that an index names, which must be in its directory, or a blob of the same hub cache.

    models--org--name/snapshots/4f2c…/model-00001-of-00002.safetensors -> ../../blobs/9ad1…     (may be followed)
    """
    directory = index.parent
    parts = name.replace("\\", "/").split("/")
    if os.path.isabs(name) or ".." in parts or any(":" in part for part in parts[:1]):
        raise CheckpointError(
            f"{index} names the file {shown(name)}, which is outside of its directory, so it is not opened. Put the "
            "files beside the index and name them there."
        )
    file = directory / name
    allowed = [directory.resolve()]
    if allowed[0].parent.name == "snapshots":
        allowed.append(allowed[0].parent.parent / "blobs")
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError):
        raise CheckpointError(f"{file}, which {index.name} names, does not exist. Download it again.") from None
    if not any(real.is_relative_to(one) for one in allowed):
        raise CheckpointError(
            f"{index} names {shown(name)}, a link that leaves its directory (to {real}), so it is not opened. Put the "
            "file itself there."
        )
    return file


def read_header(file: Path) -> tuple[dict[str, Entry], Mapping[str, str]]:
    """Return the tensors of one safetensors file, in the order of their bytes, and its metadata.

    Raises `CheckpointError` unless they fill the file exactly.
    """
    size = _regular_size(file)
    begin = _read_bytes(file, 0, min(size, 64))
    if begin.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its directory.")
    if size < 8:
        raise _damaged(file, f"it has {size} bytes, less than a header")
    length = int.from_bytes(begin[:8], "little")
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise _damaged(file, f"its header should have {length} bytes and the file has {size}")
    text = _read_bytes(file, 8, length)
    if not text.startswith(b"{"):
        raise _damaged(file, "its header is not a JSON object")
    data = _parse_json(file, text)
    metadata = data.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, "its metadata are not strings")
    entries = [_entry(file, name, value, 8 + length) for name, value in data.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_filled(file, entries, 8 + length, size)
    return {entry.name: entry for entry in entries}, metadata


def _entry(file: Path, name: str, value: Any, start: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"the tensor {shown(name)} is described by {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: the tensor {shown(name)} has the dtype {shown(dtype)}, which this torch does not have. Update "
            "torch, or, if the file was not written on purpose like this, download it again."
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise _damaged(file, f"the tensor {shown(name)} has the shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, f"the tensor {shown(name)} lies at {shown(offsets)}")
    if dtype == "F4":  # the format counts elements, torch pairs of them
        if not shape or shape[-1] % 2:
            raise _damaged(file, f"the tensor {shown(name)} has half a byte: F4 of shape {shown(shape)}")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != offsets[1] - offsets[0]:
        raise _damaged(
            file, f"the tensor {shown(name)} of shape {shown(shape)} and dtype {dtype} has {offsets[1] - offsets[0]} "
            f"bytes and needs {nbytes}"
        )  # fmt: skip
    return Entry(
        name=name, file=file, offset=start + offsets[0], nbytes=nbytes, dtype=DTYPES[dtype], shape=tuple(shape)
    )


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_ELEMENTS for value in values)


def _check_filled(file: Path, entries: list[Entry], start: int, size: int) -> None:
    position = start
    for entry in entries:
        if entry.offset != position:
            problem = "overlaps the one before it" if entry.offset < position else "leaves a gap before it"
            raise _damaged(file, f"the tensor {shown(entry.name)} {problem}")
        position += entry.nbytes
    if position != size:
        problem = "it is truncated" if position > size else "it has bytes that belong to nothing"
        raise _damaged(file, f"{problem}: its header describes {position} bytes and the file has {size}")


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = str(error) if len(str(error)) < 200 else type(error).__name__
        raise _damaged(file, f"its JSON can't be read ({reason})") from None
    if not isinstance(data, dict):
        raise _damaged(file, "its JSON is not an object")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} is there twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a size")


def _damaged(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {problem}. Download or copy it again.")


def _regular_size(file: Path) -> int:
    """Return the size of a file that is one: reading from a pipe or a device could wait forever."""
    try:
        status = os.stat(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot open {file}: {getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a file. Give a directory with safetensors files, or one such file.")
    return status.st_size


def _read_bytes(file: Path, offset: int, length: int) -> bytes:
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(offset)
            parts = []
            while length > 0:
                part = opened.read(length)
                if not part:
                    raise _damaged(file, "it became shorter while it was read")
                parts.append(part)
                length -= len(part)
            return b"".join(parts)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}.") from None
