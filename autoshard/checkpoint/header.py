"""Know what a checkpoint holds without reading a tensor. Headers are checked by the safetensors library.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from autoshard.checkpoint.data import Checkpoint, Entry
from autoshard.common.sizes import shown
from autoshard.errors import CheckpointError, first_line

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

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
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(
                    f"{file} and {entries[name].file} both have a tensor {shown(name)}. Remove the file that does not "
                    f"belong here, or write {INDEX_FILE}, which says what is where."
                )
            entries[name] = entry
    return Checkpoint(path=path, entries=entries, files=files)


def _open_index(index: Path) -> Checkpoint:
    directory = index.parent
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    checkpoint = _checkpoint(directory, tuple(directory / name for name in names))
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
    try:
        data = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(index, f"it can't be read ({first_line(error)[:200]})") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is not an index: it has no weight_map. Download it again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts or "\0" in file:
            raise CheckpointError(
                f"{index} says that {shown(name)} is in {shown(file)}, which is no file in its directory. Put the "
                "files beside the index and name them there."
            )
    return weight_map


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors of one safetensors file, in the order of their bytes.

    Raises `CheckpointError` unless they fill the file exactly.
    """
    if not file.is_file():
        problem = "is not a file" if file.exists() else "does not exist"
        raise CheckpointError(f"{file} {problem}. Give a directory with safetensors files, or one such file.")
    try:
        with open(file, "rb") as opened:
            begin = opened.read(8)
            if begin == b"version ":
                raise CheckpointError(
                    f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its directory."
                )
            with safetensors.safe_open(file, "pt"):  # it checks all of the header, and that the file is as long
                length = int.from_bytes(begin, "little")
                described = json.loads(opened.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise _damaged(file, first_line(error)[:300]) from None
    described.pop("__metadata__", None)
    entries = [_entry(file, name, value, 8 + length) for name, value in described.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return {entry.name: entry for entry in entries}


def _entry(file: Path, name: str, value: Any, start: int) -> Entry:
    dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: {shown(name)} has the dtype {dtype}, which this torch does not have. Update it."
        )
    if dtype == "F4":  # the format counts elements, torch pairs of them
        shape = [*shape[:-1], shape[-1] // 2]
    if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise _damaged(file, f"{shown(name)} of shape {shape} and dtype {dtype} has {end - begin} bytes")
    return Entry(
        name=name, file=file, offset=start + begin, nbytes=end - begin, dtype=DTYPES[dtype], shape=tuple(shape)
    )


def _damaged(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {problem}. Download or copy it again.")
