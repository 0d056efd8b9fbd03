"""One view of NumPy arrays and torch tensors as (dtype, shape, little-endian bytes in C order).

torch is never imported here: a value can only be a tensor if somebody else has imported torch already.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
"""safetensors' dtype code -> the name that NumPy and torch share. bfloat16 (BF16) exists in torch only."""

STORABLE = frozenset(NUMPY_DTYPES.values()) | {"bfloat16"}


@dataclass(frozen=True)
class RawTensor:
    """`data` is a contiguous uint8 view of the elements; it shares memory with the tensor where it can."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    is_torch: bool


def raw_tensor(value: Any, *, where: str) -> RawTensor | None:
    """`value` as raw bytes, or None if it is neither an array nor a tensor.

    Raises:
        TypeError: dtype or layout without a portable byte form; the message starts with `where`.
    """
    if isinstance(value, np.ndarray):
        _check_dtype(value.dtype.name, where)
        flat = np.asarray(value, dtype=value.dtype.newbyteorder("<"), order="C").reshape(-1)
        return RawTensor(value.dtype.name, value.shape, flat.view(np.uint8), is_torch=False)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    name = str(value.dtype).removeprefix("torch.")
    _check_dtype(name, where)
    if value.layout != torch.strided:
        raise TypeError(f"{where}: a {value.layout} tensor cannot be stored; call .to_dense() first")
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(name, tuple(value.shape), flat, is_torch=True)


def _check_dtype(name: str, where: str) -> None:
    if name not in STORABLE:
        raise TypeError(f"{where}: dtype {name} cannot be stored; accepted: {', '.join(sorted(STORABLE))}")
