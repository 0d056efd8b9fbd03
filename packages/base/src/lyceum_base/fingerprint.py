"""Names for content: SHA-256 of configurations, arrays and files, equal exactly when the content is equal."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from lyceum_base._tensors import raw_tensor


def canonical_json(obj: Any) -> bytes:
    """`obj` as UTF-8 JSON with one spelling: sorted keys, no spaces, floats as their shortest round-trip decimals.

    Tuples count as lists, NumPy scalars as Python numbers. 1 and 1.0 differ.

    Raises:
        TypeError: a key that is not a string, or a value that JSON does not have.
        ValueError: nan or infinity.
    """
    _check_keys(obj)
    text = json.dumps(
        obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_python_number
    )
    return text.encode()


def sha256_json(obj: Any) -> str:
    """SHA-256, in hexadecimal, of `canonical_json(obj)`."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def sha256_arrays(arrays: Mapping[str, Any]) -> str:
    """SHA-256, in hexadecimal, of named arrays: names, dtypes, shapes and elements, whatever the order of the mapping.

    A NumPy array and a torch tensor with the same dtype, shape and elements count as the same.

    Raises:
        TypeError: a value that is neither, or a dtype without a portable byte form.
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        raw = raw_tensor(arrays[name], where=f"arrays[{name!r}]")
        if raw is None:
            raise TypeError(f"arrays[{name!r}]: {type(arrays[name]).__name__} is neither a NumPy array nor a tensor")
        header = canonical_json([name, raw.dtype, raw.shape])
        # The header's length goes first and it fixes the length of the data, so no two mappings share a message.
        digest.update(len(header).to_bytes(8, "little") + header)
        digest.update(raw.data.data)
    return digest.hexdigest()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256, in hexadecimal, of a file's content, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_keys(obj: Any) -> None:
    # json.dumps would write the key 1 as "1", so that two different mappings had one spelling.
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} must be a string")
            _check_keys(value)
    elif isinstance(obj, list | tuple):
        for value in obj:
            _check_keys(value)


def _python_number(value: Any) -> Any:
    if isinstance(value, np.bool | np.integer | np.floating):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")
