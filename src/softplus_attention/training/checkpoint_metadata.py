"""Safe reading of the tensor index of a checkpoint.

torch stores the index as a pickle, which could run any code. It is unpickled with stand-ins for the few classes that
such an index uses, and rebuilt from the entries that describe tensors in the same folder.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from softplus_attention.utils.untrusted import MIB, read_bytes

METADATA = ".metadata"
LIMIT = 256 * MIB
TENSOR_FILE = re.compile(r"__\d+_\d+\.distcp")
CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}  # fmt: skip


class StateReader(FileSystemReader):
    """torch's reader, with the index validated here; raises ``ValueError`` if it is not valid."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        content = read_bytes(folder / METADATA, LIMIT)
        try:
            self.metadata = rebuild_metadata(SafeUnpickler(io.BytesIO(content)).load(), folder)
        # A forged pickle can raise anything; the unpickler alone raises a dozen types.
        except Exception as error:
            raise ValueError(f"{folder / METADATA}: {' '.join(str(error).split())[:200]}") from error
        self.sizes = {
            name: entry.size
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


# In Python: in the C unpickler a few bytes can request gigabytes of memo.
class SafeUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Instantiates only stand-in classes, which store their arguments and state."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in CLASSES.get(module, ()):
            raise ValueError(f"{module}.{name} is not allowed in a tensor index")
        return self.classes.setdefault((module, name), stand_in(name))


def stand_in(name: str) -> type:
    def new(cls: type, *arguments: Any) -> Any:
        instance: Any = object.__new__(cls)
        instance.arguments, instance.state = arguments, {}
        return instance

    def setstate(self: Any, state: Any) -> None:
        self.state = state

    return type(name, (), {"__new__": new, "__setstate__": setstate})


# ---- from stand-ins to torch's classes


def rebuild_metadata(found: Any, folder: Path) -> Metadata:
    entries = check_state(found, "Metadata")
    tensors = {text(name): tensor_entry(name, entry) for name, entry in entries["state_dict_metadata"].items()}
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and not path.is_symlink()}
    places = dict(storage_entry(index, place, sizes) for index, place in entries["storage_data"].items())
    chunks = {MetadataIndex(name, chunk.offsets) for name, entry in tensors.items() for chunk in entry.chunks}
    if chunks != places.keys():
        raise ValueError("the tensors do not match their locations in the files")
    mappings: Any = {name: (name,) for name in tensors}
    return Metadata(dict(tensors), mappings, places, StorageMeta(), entries.get("version"))


def check_state(found: Any, name: str) -> dict[str, Any]:
    if type(found).__name__ != name or not isinstance(getattr(found, "state", None), dict):
        raise ValueError(f"{type(found).__name__} instead of {name}")
    return found.state


def tensor_entry(name: str, found: Any) -> TensorStorageMetadata:
    if type(found).__name__ != "TensorStorageMetadata":
        raise ValueError(f"{name!r} is not a tensor")
    entry = check_state(found, "TensorStorageMetadata")
    dtype, *_ = entry["properties"].state
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} has no dtype")
    size = check_size(entry["size"])
    chunks = []
    for part in entry["chunks"]:
        chunk = check_state(part, "ChunkStorageMetadata")
        offsets, sizes = check_size(chunk["offsets"]), check_size(chunk["sizes"])
        ends = [start + count for start, count in zip(offsets, sizes, strict=True)]
        if len(ends) != len(size) or any(end > whole for end, whole in zip(ends, size, strict=True)):
            raise ValueError(f"{name!r} has a chunk outside its shape")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"{name!r} is incomplete")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def check_size(found: Any) -> torch.Size:
    (numbers,) = found.arguments
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in numbers):
        raise ValueError("invalid size")
    return torch.Size(numbers)


def storage_entry(index: Any, place: Any, sizes: dict[str, int]) -> tuple[MetadataIndex, _StorageInfo]:
    """The byte range of a chunk in a file of this folder."""
    named, where = check_state(index, "MetadataIndex"), check_state(place, "_StorageInfo")
    file, start, length = where["relative_path"], where["offset"], where["length"]
    if not isinstance(file, str) or not TENSOR_FILE.fullmatch(file) or file not in sizes:
        raise ValueError(f"{file!r} is not a tensor file in this folder")
    if where.get("transform_descriptors") or type(start) is not int or type(length) is not int:
        raise ValueError(f"an entry of {file} is not one that training writes")
    if not 0 <= start <= start + length <= sizes[file]:
        raise ValueError(f"an entry of {file} is outside the file")
    return MetadataIndex(text(named["fqn"]), check_size(named["offset"])), _StorageInfo(file, start, length)


def text(found: Any) -> str:
    if not isinstance(found, str):
        raise ValueError("a name that is not text")
    return found
