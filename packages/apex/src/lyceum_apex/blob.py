"""Arrays and JSON in one safetensors blob, the same bytes for the same content.

All metadata sit under one key, because safetensors does not fix the order of several; long text travels as a byte array, because
the header is limited.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def pack(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> bytes:
    """Serialise `arrays` and JSON-able `metadata`."""
    from safetensors.numpy import save

    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    blob: bytes = save({name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}, {"json": text})
    return blob


def unpack(blob: bytes, kind: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Inverse of `pack`; raises ValueError when the blob is not safetensors or its metadata name another `kind`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(blob)
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        metadata = json.loads(header["__metadata__"]["json"])
    except (SafetensorError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a Lyceum {kind}: the bytes are not a safetensors blob with JSON metadata") from error
    if metadata.get("kind") != kind:
        raise ValueError(f"not a Lyceum {kind}: the blob says it is {metadata.get('kind')!r}")
    return arrays, metadata


def text_to_array(lines: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Lines (none contains a line feed) as UTF-8 bytes."""
    return np.frombuffer("\n".join(lines).encode(), dtype=np.uint8)


def array_to_text(array: Array, count: int) -> tuple[str, ...]:
    """Inverse of `text_to_array` for `count` lines."""
    return tuple(array.tobytes().decode().split("\n")) if count else ()
