import hashlib
import math

import numpy as np
import pytest
import torch

from lyceum_base import canonical_json, sha256_arrays, sha256_file, sha256_json


def test_canonical_json_has_one_spelling():
    obj = {"b": [1, 1.0, 1e300, 0.1, -0.0], "a": {"é": None, "Z": True}, "": "\u2028\n"}
    expected = '{"":"\u2028\\n","a":{"Z":true,"é":null},"b":[1,1.0,1e+300,0.1,-0.0]}'
    assert canonical_json(obj) == expected.encode()
    assert canonical_json(dict(reversed(obj.items()))) == expected.encode()


def test_tuples_and_numpy_scalars_count_as_lists_and_numbers():
    assert canonical_json({"x": (np.int64(1), np.float32(0.5), np.bool(True))}) == b'{"x":[1,0.5,true]}'


@pytest.mark.parametrize("bad", [math.nan, [math.inf], {"a": {"b": np.float64(-math.inf)}}])
def test_non_finite_numbers_have_no_canonical_form(bad):
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(bad)


@pytest.mark.parametrize("bad", [{1: 2}, [{"a": {None: 1}}], {"x": {1, 2}}, {"x": b"bytes"}, np.zeros(2)])
def test_keys_and_values_outside_json_are_refused(bad):
    with pytest.raises(TypeError):
        canonical_json(bad)


def test_sha256_of_json_is_the_hash_of_its_canonical_bytes():
    assert sha256_json({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()


def test_sha256_of_arrays_is_the_golden_one():
    arrays = {"w": np.arange(3, dtype=np.float32), "n": np.array(7)}
    message = b""
    for header, array in [(b'["n","int64",[]]', arrays["n"]), (b'["w","float32",[3]]', arrays["w"])]:
        message += len(header).to_bytes(8, "little") + header + array.tobytes()
    assert sha256_arrays(arrays) == hashlib.sha256(message).hexdigest()


def test_names_dtypes_shapes_and_elements_all_change_the_hash_of_arrays():
    base = np.arange(6, dtype=np.int32)
    variants = [
        {"a": base},
        {"b": base},
        {"a": base.reshape(2, 3)},
        {"a": base.view(np.uint32)},
        {"a": base[::-1]},
        {"a": base, "b": base[:0]},
        {"a": base[:3], "b": base[3:]},
        {},
    ]
    assert len({sha256_arrays(v) for v in variants}) == len(variants)


def test_memory_layout_byte_order_mapping_order_and_library_do_not_change_the_hash_of_arrays():
    a, b = np.arange(6.0).reshape(2, 3), np.ones(2, dtype=np.int16)
    expected = sha256_arrays({"a": a, "b": b})
    assert sha256_arrays({"b": b, "a": np.asfortranarray(a)}) == expected
    assert sha256_arrays({"a": a.astype(">f8"), "b": b}) == expected
    assert sha256_arrays({"a": torch.from_numpy(a).T.contiguous().T, "b": torch.from_numpy(b)}) == expected


def test_arrays_without_a_portable_form_are_refused_by_name():
    with pytest.raises(TypeError, match=r"arrays\['x'\]: list"):
        sha256_arrays({"x": [1, 2]})
    with pytest.raises(TypeError, match=r"arrays\['x'\]: dtype object"):
        sha256_arrays({"x": np.array([None])})


def test_sha256_of_a_file_longer_than_a_buffer(tmp_path):
    content = bytes(range(256)) * 5_000
    (tmp_path / "file").write_bytes(content)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()
