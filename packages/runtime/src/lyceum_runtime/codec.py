"""Between messages and arrays: Tensor to NumPy and torch, Arrow batches, tables by role.

What a proto's rules cannot say (byte length against shape, element type, finiteness, the columns of a table) is checked
here and refused as InvalidArgument on the field's path. The wire is C order, little endian. NumPy, torch and pyarrow
are imported when used.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from lyceum.common.v1 import common_pb2
from lyceum_runtime.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import torch

    from lyceum_runtime.artifacts import Artifacts

Nonfinite = Literal["nan", "inf", "-inf"]
Kind = Literal["number", "integer", "float", "string", "bool", "binary", "any"]

MAX_TABLE_BYTES = 4 << 30
"""Largest table that `read_table` loads, uncompressed."""

_PREFIX = "DATA_TYPE_"
_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


def from_tensor(
    tensor: common_pb2.Tensor,
    field: str = "tensor",
    *,
    dtypes: Collection[str] = (),
    shape: Sequence[int | str] | None = None,
    nonfinite: Collection[Nonfinite] = (),
) -> "np.ndarray[Any, Any]":
    """The tensor as a read-only NumPy array over the message's bytes; bfloat16, which NumPy lacks, as a float32 copy.

    Args:
        tensor: what came.
        field: its path in the request, for errors.
        dtypes: accepted element types, such as {"float32", "float64"}; empty accepts all.
        shape: expected size of each axis; a name accepts any size: ("batch", 3). None accepts all shapes.
        nonfinite: values beside the finite ones that are accepted.

    Raises:
        InvalidArgument: on `field`, with what was given and what is accepted.
    """
    import numpy as np

    name = _check_layout(tensor, field, dtypes, shape)
    data = tensor.data
    if name == "bfloat16":
        # A bfloat16 is the upper half of the float32 of the same value.
        array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        array = np.frombuffer(data, np.dtype(name).newbyteorder("<"))
    if name == "bool" and array.view(np.uint8).max(initial=0) > 1:
        raise InvalidArgument((f"{field}.data", "a boolean is a byte of 0 or 1"))
    if name.endswith(("float16", "float32", "float64")):
        _check_finite(array, field, nonfinite)
    return array.reshape(tuple(tensor.shape))


def to_torch(
    tensor: common_pb2.Tensor,
    field: str = "tensor",
    *,
    dtypes: Collection[str] = (),
    shape: Sequence[int | str] | None = None,
    nonfinite: Collection[Nonfinite] = (),
) -> "torch.Tensor":
    """The tensor as a torch tensor on the CPU with memory of its own, bfloat16 included. Arguments and errors as
    `from_tensor`.
    """
    import torch

    array = from_tensor(tensor, field, dtypes=dtypes, shape=shape, nonfinite=nonfinite)
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, _name(tensor)))
    # torch must not share the message's immutable bytes.
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, _name(tensor))).reshape(array.shape)


def to_tensor(array: "np.ndarray[Any, Any] | torch.Tensor") -> common_pb2.Tensor:
    """A NumPy array or torch tensor as a message.

    Raises:
        TypeError: its element type has no place in a Tensor.
    """
    import numpy as np

    if hasattr(array, "detach"):
        tensor = array.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if name == "bfloat16":
            import torch

            tensor = tensor.view(torch.int16)
        array = tensor.numpy()
    else:
        array = np.asarray(array)
        name = array.dtype.name
    if name not in _ITEM_BYTES:
        raise TypeError(f"element type {name} has no place in a Tensor; accepted: {', '.join(_ITEM_BYTES)}")
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    dtype = common_pb2.DataType.Value(_PREFIX + name.upper())
    return common_pb2.Tensor(dtype=dtype, shape=array.shape, data=data)


def to_arrow_batch(table: "pa.Table | pa.RecordBatch") -> common_pb2.ArrowBatch:
    """A table or record batch as one message: an Arrow IPC stream of its own."""
    import pyarrow as pa

    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return common_pb2.ArrowBatch(ipc_stream=sink.getvalue().to_pybytes(), row_count=table.num_rows)


def from_arrow_batch(batch: common_pb2.ArrowBatch, field: str = "batch") -> "pa.Table":
    """The rows of a message as a table.

    Raises:
        InvalidArgument: on `field`, if its bytes are no valid Arrow IPC stream or its row count is wrong.
    """
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(batch.ipc_stream)) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, ValueError, OSError):
        raise InvalidArgument((f"{field}.ipc_stream", "is not a valid Arrow IPC stream")) from None
    if batch.row_count and batch.row_count != table.num_rows:
        raise InvalidArgument((f"{field}.row_count", f"{batch.row_count} was stated, {table.num_rows} rows came"))
    return table


def read_table(
    ref: common_pb2.TableRef,
    artifacts: "Artifacts",
    roles: Mapping[str, Kind],
    field: str = "table",
    *,
    optional: Collection[str] = (),
    nulls: bool = False,
) -> "pa.Table":
    """The columns of a stored table (Parquet, Arrow IPC file or stream) that play `roles`, named by role.

    Args:
        ref: the table, and which of its columns plays which role; by default the column of the role's own name.
        artifacts: the caller's artifacts.
        roles: what each role must hold: "number" (integer or float), "integer", "float", "string", "bool", "binary" or
        "any". field: path of `ref` in the request, for errors. optional: roles whose column may be missing; the result
        then lacks it. nulls: whether missing values are accepted.

    Raises:
        InvalidArgument: the bytes are no such table, or a column is missing or of another kind; on that role's path.
        NotFound: the tenant has no such artifact.
        ResourceExhausted: the table does not fit in memory.
    """
    import pyarrow as pa

    unknown = set(ref.columns) - set(roles)
    if unknown:
        known = ", ".join(roles)
        raise InvalidArgument(*((f'{field}.columns["{role}"]', f"is no role here; roles: {known}") for role in unknown))
    path = artifacts.local_path(ref.artifact)
    wanted = {role: ref.columns.get(role, role) for role in roles}
    try:
        table = _load(str(path), set(wanted.values()))
    except (pa.ArrowException, ValueError, OSError):
        raise InvalidArgument((f"{field}.artifact", "is no valid Parquet file, Arrow file or stream")) from None
    wrong = []
    columns = {}
    for role, name in wanted.items():
        where = f'{field}.columns["{role}"]'
        if name not in table.column_names:
            if role not in optional or role in ref.columns:
                wrong.append((where, f"the table has no column {name!r}"))
            continue
        if table.column_names.count(name) > 1:
            wrong.append((where, f"the table has several columns {name!r}"))
            continue
        column = table.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not _is_kind(column.type, roles[role]):
            wrong.append((where, f"column {name!r} holds {column.type}; {roles[role]} is needed"))
        elif column.null_count and not nulls:
            wrong.append((where, f"column {name!r} has {column.null_count} missing values; none is accepted"))
        else:
            columns[role] = column
    if wrong:
        raise InvalidArgument(*wrong)
    return pa.table(columns)


def _name(tensor: common_pb2.Tensor) -> str:
    if tensor.dtype not in common_pb2.DataType.values():
        return ""
    return common_pb2.DataType.Name(tensor.dtype).removeprefix(_PREFIX).lower()


def _check_layout(
    tensor: common_pb2.Tensor, field: str, dtypes: Collection[str], shape: Sequence[int | str] | None
) -> str:
    """The element type's name, once type, shape and byte length are accepted."""
    name = _name(tensor)
    if name not in _ITEM_BYTES:
        raise InvalidArgument((f"{field}.dtype", "must be set to a defined element type"))
    if dtypes and name not in dtypes:
        raise InvalidArgument((f"{field}.dtype", f"is {name}; accepted: {', '.join(sorted(dtypes))}"))
    given = list(tensor.shape)
    if len(given) > 8 or any(size < 0 for size in given):
        raise InvalidArgument((f"{field}.shape", f"is {given}; at most 8 axes, each at least 0, are accepted"))
    if shape is not None and (
        len(given) != len(shape) or any(isinstance(want, int) and want != size for want, size in zip(shape, given))
    ):
        raise InvalidArgument((f"{field}.shape", f"is {given}; [{', '.join(map(str, shape))}] is needed"))
    expected = prod(given) * _ITEM_BYTES[name]
    if len(tensor.data) != expected:
        raise InvalidArgument(
            (f"{field}.data", f"has {len(tensor.data)} bytes; shape {given} of {name} takes {expected}")
        )
    return name


def _check_finite(array: "np.ndarray[Any, Any]", field: str, accepted: Collection[Nonfinite]) -> None:
    import numpy as np

    wrong = ~np.isfinite(array)
    if not wrong.any():
        return
    if "nan" in accepted:
        wrong &= ~np.isnan(array)
    if "inf" in accepted:
        wrong &= array != np.inf
    if "-inf" in accepted:
        wrong &= array != -np.inf
    if wrong.any():
        first = int(wrong.argmax())
        raise InvalidArgument((f"{field}.data", f"element {first} is {array[first]}, which is not accepted"))


def _load(path: str, names: set[str]) -> "pa.Table":
    """The named columns that the file has, of a file told by its first bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"PAR1"):
        with pq.ParquetFile(path, memory_map=True) as parquet:
            groups = (parquet.metadata.row_group(i) for i in range(parquet.num_row_groups))
            _require_fits(sum(group.total_byte_size for group in groups))
            return parquet.read([name for name in parquet.schema_arrow.names if name in names], use_threads=False)
    with pa.memory_map(path) as source:
        read = pa.ipc.open_file(source) if magic == b"ARROW1" else pa.ipc.open_stream(source)
        batches = []
        size = 0
        for batch in map(read.get_batch, range(read.num_record_batches)) if magic == b"ARROW1" else read:
            size += batch.nbytes
            _require_fits(size)
            batches.append(batch.select([name for name in batch.schema.names if name in names]))
        table = pa.Table.from_batches(batches, read.schema if not batches else None)
        table.validate(full=True)
        return table


def _require_fits(size: int) -> None:
    if size > MAX_TABLE_BYTES:
        raise ResourceExhausted(f"the table has {size} bytes uncompressed; at most {MAX_TABLE_BYTES} are read")


def _is_kind(kind: Any, wanted: Kind) -> bool:
    from pyarrow import types

    is_kind: dict[Kind, bool] = {
        "any": True,
        "number": types.is_integer(kind) or types.is_floating(kind),
        "integer": types.is_integer(kind),
        "float": types.is_floating(kind),
        "string": types.is_string(kind) or types.is_large_string(kind),
        "bool": types.is_boolean(kind),
        "binary": types.is_binary(kind) or types.is_large_binary(kind),
    }
    return is_kind[wanted]
