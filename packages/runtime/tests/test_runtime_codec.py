"""Tensors, Arrow batches and tables: what goes in comes out, and what is wrong is refused on its field."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lyceum.common.v1 import common_pb2
from lyceum_runtime import codec
from lyceum_runtime.errors import InvalidArgument, ResourceExhausted

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]
ALL = ("nan", "inf", "-inf")


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    )
)
def test_numpy_arrays_of_every_type_and_shape_come_back(array):
    back = codec.from_tensor(codec.to_tensor(array), nonfinite=ALL)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert not back.flags.writeable


def test_big_endian_and_strided_arrays_travel_as_little_endian_c_order():
    array = np.arange(12, dtype=">f4").reshape(3, 4).T[::2]
    message = codec.to_tensor(array)
    assert message.data == np.ascontiguousarray(array).astype("<f4").tobytes()
    np.testing.assert_array_equal(codec.from_tensor(message), array)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64", "int64", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_torch_tensors_of_every_type_come_back_with_memory_of_their_own(name, shape):
    torch = pytest.importorskip("torch")
    tensor = (torch.arange(6)[: int(np.prod(shape))].reshape(shape) - 2).to(getattr(torch, name))
    message = codec.to_tensor(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that must not be written
        back = codec.to_torch(message)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_bfloat16_reaches_numpy_as_the_float32_of_the_same_value():
    torch = pytest.importorskip("torch")
    values = torch.tensor([1.5, -3.25, 1e30, -0.0], dtype=torch.bfloat16)
    array = codec.from_tensor(codec.to_tensor(values))
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, values.float().numpy())


F32 = common_pb2.DATA_TYPE_FLOAT32


def floats(*values: float) -> common_pb2.Tensor:
    return codec.to_tensor(np.array(values, dtype=np.float32))


@pytest.mark.parametrize(
    ("tensor", "options", "field", "says"),
    [
        (common_pb2.Tensor(shape=[1], data=b"abcd"), {}, "x.dtype", "must be set"),
        (common_pb2.Tensor(dtype=99, shape=[1], data=b"abcd"), {}, "x.dtype", "must be set"),
        (common_pb2.Tensor(dtype=F32, shape=[2], data=b"abcd"), {}, "x.data", "has 4 bytes; .* takes 8"),
        (common_pb2.Tensor(dtype=F32, data=b""), {}, "x.data", "has 0 bytes; .* takes 4"),
        (common_pb2.Tensor(dtype=F32, shape=[-1, -1], data=b"abcd"), {}, "x.shape", "at least 0"),
        (common_pb2.Tensor(dtype=F32, shape=[2**62, 2**62, 0]), {"shape": ("n", 3)}, "x.shape", "needed"),
        (common_pb2.Tensor(dtype=F32, shape=[2**40, 2**40], data=b"abcd"), {}, "x.data", "has 4 bytes"),
        (floats(1, 2), {"shape": ("n", 3)}, "x.shape", r"is \[2\]; \[n, 3\] is needed"),
        (floats(1, 2), {"shape": (3,)}, "x.shape", r"is \[2\]; \[3\] is needed"),
        (floats(1, 2), {"dtypes": {"float64", "int8"}}, "x.dtype", "is float32; accepted: float64, int8"),
        (floats(1, float("nan")), {}, "x.data", "element 1 is nan"),
        (floats(float("-inf")), {"nonfinite": ("nan", "inf")}, "x.data", "element 0 is -inf"),
        (common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_BOOL, shape=[2], data=b"\x01\x02"), {}, "x.data", "0 or 1"),
    ],
)
def test_a_wrong_tensor_is_refused_on_its_field(tensor, options, field, says):
    with pytest.raises(InvalidArgument, match=says) as caught:
        codec.from_tensor(tensor, "x", **options)
    assert [where for where, _ in caught.value.violations] == [field]


def test_accepted_values_and_shapes_pass():
    assert codec.from_tensor(floats(0, float("-inf")), nonfinite=("-inf",))[1] == -np.inf
    assert codec.from_tensor(floats(1, 2, 3), shape=("n",), dtypes={"float32"}).shape == (3,)


def test_an_element_type_without_a_place_is_a_type_error():
    with pytest.raises(TypeError, match="complex128 has no place"):
        codec.to_tensor(np.zeros(1, complex))


# Tables --------------------------------------------------------------------------------------------------------------

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

TABLE = pa.table(
    {
        "smiles": ["C", "CC", "CCC"],
        "score": [1.0, 2.0, None],
        "count": pa.array([1, 2, 3], pa.int32()),
        "word": pa.array(["a", "b", "a"]).dictionary_encode(),
    }
)


class OneFile:
    """Artifacts with one artifact."""

    def __init__(self, path):
        self.path = path

    def local_path(self, ref):
        return self.path


def write_parquet(path):
    pq.write_table(TABLE, path, row_group_size=2)


def write_file(path):
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)


def write_stream(path):
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)


def test_a_batch_comes_back_with_its_types():
    back = codec.from_arrow_batch(codec.to_arrow_batch(TABLE))
    assert back.equals(TABLE)
    [batch] = TABLE.to_batches()
    assert codec.to_arrow_batch(batch).row_count == 3
    assert codec.from_arrow_batch(codec.to_arrow_batch(TABLE.slice(0, 0))).schema == TABLE.schema


def test_a_wrong_batch_is_refused_on_its_field():
    message = codec.to_arrow_batch(TABLE)
    message.row_count = 4
    with pytest.raises(InvalidArgument, match=r"x\.row_count: 4 was stated, 3 rows came"):
        codec.from_arrow_batch(message, "x")
    with pytest.raises(InvalidArgument, match=r"x\.ipc_stream: is not a valid"):
        codec.from_arrow_batch(common_pb2.ArrowBatch(ipc_stream=b"nothing"), "x")


@pytest.mark.parametrize("write", [write_parquet, write_file, write_stream])
def test_a_table_of_each_format_gives_its_columns_by_role(write, tmp_path):
    write(path := tmp_path / "table")
    ref = common_pb2.TableRef(columns={"molecule": "smiles"})
    table = codec.read_table(
        ref,
        OneFile(path),
        {"molecule": "string", "count": "number", "word": "string", "other": "any"},
        optional={"other"},
    )
    assert table.column_names == ["molecule", "count", "word"]
    assert table.column("molecule").to_pylist() == ["C", "CC", "CCC"]
    assert table.column("word").to_pylist() == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("columns", "roles", "field", "says"),
    [
        ({}, {"missing": "any"}, 't.columns["missing"]', "no column 'missing'"),
        ({"a": "smiles"}, {"smiles": "string"}, 't.columns["a"]', "is no role here; roles: smiles"),
        ({}, {"smiles": "number"}, 't.columns["smiles"]', "holds string; number is needed"),
        ({}, {"count": "float"}, 't.columns["count"]', "holds int32; float is needed"),
        ({}, {"score": "float"}, 't.columns["score"]', "has 1 missing values"),
    ],
)
def test_a_wrong_column_is_refused_on_its_role(columns, roles, field, says, tmp_path):
    write_parquet(path := tmp_path / "table")
    with pytest.raises(InvalidArgument, match=says) as caught:
        codec.read_table(common_pb2.TableRef(columns=columns), OneFile(path), roles, "t")
    assert [where for where, _ in caught.value.violations] == [field]


@pytest.mark.parametrize("data", [b"", b"PAR1 is how it begins PAR1", b"ARROW1 and no more", b"some text", bytes(64)])
def test_bytes_that_are_no_table_are_the_callers_mistake(data, tmp_path):
    (path := tmp_path / "table").write_bytes(data)
    with pytest.raises(InvalidArgument, match=r"t\.artifact: is no valid Parquet file"):
        codec.read_table(common_pb2.TableRef(), OneFile(path), {"a": "any"}, "t")


def test_nulls_pass_where_they_are_accepted_and_a_huge_table_is_refused_before_it_is_read(tmp_path, monkeypatch):
    write_parquet(path := tmp_path / "table")
    table = codec.read_table(common_pb2.TableRef(), OneFile(path), {"score": "float"}, nulls=True)
    assert table.column("score").to_pylist() == [1.0, 2.0, None]
    monkeypatch.setattr(codec, "MAX_TABLE_BYTES", 10)
    for write in (write_parquet, write_file):
        write(path)
        with pytest.raises(ResourceExhausted, match="at most 10 are read"):
            codec.read_table(common_pb2.TableRef(), OneFile(path), {"count": "any"})
