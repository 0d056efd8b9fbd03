"""Long work as a generator of checkpoints, and the bytes of a checkpoint's state.

A core's long function is `iter_<verb>(..., *, resume=None, should_stop=None) -> Iterator[Checkpoint]`: it yields
*states* from which the same function can go on, and cheap *progress ticks* (`state=None`) in between; the last state is
the result. `run_to_end` turns such a generator into the plain `<verb>(...)`. A consumer that keeps a state encodes it
before it asks for the next checkpoint, so a core may go on updating its arrays in place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from lyceum_base._tensors import NUMPY_DTYPES, raw_tensor

State: TypeAlias = Mapping[str, Any]
"""Name -> NumPy array, torch tensor, or JSON-able value (None, bool, int, float, str, list, dict with string keys)."""

ShouldStop: TypeAlias = Callable[[], bool]
"""Polled by a core inside blocking stretches; True asks it to raise `Stopped` soon."""

_STAGE = re.compile(r"[a-z][a-z0-9_]{0,39}")
_METRIC = re.compile(r"[a-z][a-z0-9_]*")
_MAX_METRICS = 64
_METADATA_KEY = "lyceum_state"
_VERSION = 1


class Stopped(Exception):
    """Raised by a core because `should_stop()` returned True. The last yielded state is where the work can resume."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A point of long work.

    Args:
        state: what `resume=` needs to go on from here, or None for a progress tick.
        stage: the documented name of the present stage, `^[a-z][a-z0-9_]{0,39}$`.
        completed: units of work done in this stage, >= 0.
        total: units of work of this stage; 0 if unknown, else >= `completed`.
        metrics: at most 64 numbers to show, keys in snake_case.

    Raises:
        ValueError: one of the above does not hold.
    """

    state: State | None
    stage: str
    completed: int
    total: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _STAGE.fullmatch(self.stage):
            raise ValueError(f"stage {self.stage!r} must match ^{_STAGE.pattern}$")
        if self.completed < 0 or self.total < 0:
            raise ValueError(f"completed={self.completed} and total={self.total} must be >= 0")
        if self.total and self.completed > self.total:
            raise ValueError(f"completed={self.completed} is more than total={self.total}")
        if len(self.metrics) > _MAX_METRICS:
            raise ValueError(f"{len(self.metrics)} metrics given; at most {_MAX_METRICS} are accepted")
        for key in self.metrics:
            if not _METRIC.fullmatch(key):
                raise ValueError(f"metric {key!r} must be snake_case: ^{_METRIC.pattern}$")


def run_to_end(checkpoints: Iterable[Checkpoint]) -> State:
    """The last state of a generator of checkpoints: the result of the work.

    Raises:
        RuntimeError: the generator ended without yielding a state.
    """
    state: State | None = None
    for checkpoint in checkpoints:
        if checkpoint.state is not None:
            state = checkpoint.state
    if state is None:
        raise RuntimeError("the generator ended without a state: its last checkpoint must carry the result")
    return state


def encode_state(state: State) -> bytes:
    """`state` as one safetensors file: tensors as tensors, everything else as JSON in the metadata. No pickle.

    Equal states give equal bytes, whatever the order of their keys. What comes back from `decode_state` equals what
    went in, except that tuples become lists, NumPy scalars Python numbers, and tensors lie on the CPU without a graph.

    Raises:
        TypeError: a value that has no such form, named by its path.
    """
    from safetensors import TensorSpec, serialize

    tensors = {}
    values = {}
    torch_names = []
    for name, value in state.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise TypeError(f"state key {name!r} must be a string other than '__metadata__'")
        where = f"state[{name!r}]"
        raw = raw_tensor(value, where=where)
        if raw is None:
            values[name] = _to_json(value, where)
        else:
            tensors[name] = raw
            if raw.is_torch:
                torch_names.append(name)
    header = {"version": _VERSION, "torch": sorted(torch_names), "values": values}
    # `tensors` keeps the memory behind these pointers alive until serialize() has copied it.
    specs = {
        name: TensorSpec(dtype=raw.dtype, shape=raw.shape, data_ptr=raw.data.ctypes.data, data_len=raw.data.nbytes)
        for name, raw in tensors.items()
    }
    # One metadata entry only: safetensors does not fix the order of several.
    metadata = {_METADATA_KEY: json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)}
    return bytes(serialize(specs, metadata))


def decode_state(data: bytes) -> dict[str, Any]:
    """The state that `encode_state` wrote. Arrays are writable; torch is imported only if the state holds its tensors.

    Raises:
        ValueError: `data` is not such a file.
    """
    from safetensors import SafetensorError, deserialize

    try:
        flat = deserialize(data)  # type: ignore[no-untyped-call]
        # deserialize() has checked the file but does not return its metadata: 8 bytes of length, then the JSON header.
        header_size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + header_size]).get("__metadata__", {})
        header = json.loads(metadata[_METADATA_KEY])
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"not a Lyceum state: {error}") from error
    if header["version"] != _VERSION:
        raise ValueError(f"the state has format version {header['version']}; this build reads {_VERSION}")
    torch_names = set(header["torch"])
    state = {name: _from_json(value) for name, value in header["values"].items()}
    for name, raw in flat:
        build = _torch_tensor if name in torch_names else _numpy_array
        state[name] = build(raw["dtype"], raw["shape"], raw["data"])
    return state


def _numpy_array(code: str, shape: list[int], data: bytearray) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype=np.dtype(NUMPY_DTYPES[code])).reshape(shape)


def _torch_tensor(code: str, shape: list[int], data: bytearray) -> Any:
    import torch

    dtype = getattr(torch, NUMPY_DTYPES.get(code, "bfloat16"))
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _to_json(value: Any, where: str) -> Any:
    """Standard JSON; what JSON lacks (big integers, nan, inf) becomes an object with the one key `$int` or `$float`."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        # Hexadecimal, because Python refuses to parse decimal numbers of more than 4,300 digits.
        return int(value) if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} must be a string")
        encoded = {key: _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$dict": encoded} if any(key.startswith("$") for key in encoded) else encoded
    raise TypeError(
        f"{where}: {type(value).__name__} cannot be stored; accepted: array, tensor, None, bool, int, float, str, list,"
        " dict (arrays and tensors at the top level only)"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$int"}:
        return int(value["$int"], 16)
    if value.keys() == {"$float"}:
        return float(value["$float"])
    if value.keys() == {"$dict"}:
        value = value["$dict"]
    return {key: _from_json(item) for key, item in value.items()}
