import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

from lyceum_base import Checkpoint, Stopped, decode_state, encode_state, run_to_end

EVERY_NUMPY_DTYPE = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


def test_importing_the_package_loads_neither_torch_nor_scipy_nor_safetensors():
    code = "import sys, lyceum_base; print(sorted({'torch', 'scipy', 'safetensors', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("dtype", EVERY_NUMPY_DTYPE)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_numpy_arrays_come_back_with_dtype_shape_bytes_and_writable(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    back = decode_state(encode_state({"x": array}))["x"]
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.flags.writeable


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_torch_tensors_come_back_as_torch_tensors_including_bfloat16(dtype, shape):
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype) * (
        1 if dtype in (torch.bool, torch.uint8, torch.int64) else 1.5
    )
    tensor = tensor.to(dtype)
    back = decode_state(encode_state({"x": tensor}))["x"]
    assert isinstance(back, torch.Tensor)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_views_big_endian_arrays_and_parameters_keep_their_values():
    base = np.arange(24.0).reshape(4, 6)
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    state = {
        "t": base.T[1:, ::2],
        "big": base.astype(">f4"),
        "w": weight,
        "wt": weight.T,
        "nan": np.array([np.nan, -0.0]),
    }
    back = decode_state(encode_state(state))
    np.testing.assert_array_equal(back["t"], base.T[1:, ::2])
    np.testing.assert_array_equal(back["big"], base)
    assert torch.equal(back["w"], weight)
    assert not back["w"].requires_grad
    assert torch.equal(back["wt"], weight.T)
    assert back["nan"].tobytes() == state["nan"].tobytes()


def test_scalars_and_nested_values_come_back_equal_and_with_their_types():
    values = {
        "none": None,
        "true": True,
        "int": 3,
        "huge": 7**20_000,
        "negative": -(2**64),
        "edge": [2**63 - 1, 2**63, -(2**63), -(2**63) - 1],
        "float": 0.1,
        "integral": 3.0,
        "text": 'nan "quoted" \u2028 λ \ud800',
        "nested": {"a": [1, [2.5, None, {"b": {}}], []], "": False},
        "tags": {"$int": "0x1", "$dict": {"$float": "nan"}},
    }
    back = decode_state(encode_state(values))
    assert back == values
    assert [type(back[k]) for k in values] == [type(values[k]) for k in values]


def test_non_finite_and_signed_zero_floats_survive():
    back = decode_state(encode_state({"x": [math.inf, -math.inf, math.nan, -0.0]}))["x"]
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert math.copysign(1, back[3]) == -1


def test_equal_states_give_equal_bytes_whatever_the_order_of_keys_and_the_process():
    items = [(f"k{i}", np.full(i % 5, i, dtype=EVERY_NUMPY_DTYPE[i % 12])) for i in range(40)]
    items += [(f"v{i}", {"b": i, "a": [i]}) for i in range(20)] + [
        (f"t{i}", torch.ones(i, dtype=torch.bfloat16)) for i in range(5)
    ]
    expected = encode_state(dict(items))
    for seed in range(5):
        random.Random(seed).shuffle(items)
        assert encode_state(dict(items)) == expected
    code = (
        "import numpy as np, lyceum_base as b;print(b.encode_state({'y': np.arange(3), 'x': {'p': 1}, 'n': 2.5}).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": s},
        ).stdout
        for s in ("1", "2")
    }
    assert outputs == {encode_state({"n": 2.5, "x": {"p": 1}, "y": np.arange(3)}).hex() + "\n"}


def test_the_file_is_safetensors_that_the_reference_library_reads():
    data = encode_state({"w": torch.arange(4, dtype=torch.bfloat16), "a": np.eye(2), "step": 7})
    loaded = safetensors.torch.load(data)
    assert set(loaded) == {"w", "a"}
    assert torch.equal(loaded["w"], torch.arange(4, dtype=torch.bfloat16))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert json.loads(header["__metadata__"]["lyceum_state"])["values"] == {"step": 7}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"x": np.array([object()])}, r"state\['x'\]: dtype object cannot be stored"),
        ({"x": np.zeros(1, complex)}, r"state\['x'\]: dtype complex128"),
        ({"x": np.array(["a"])}, r"state\['x'\]: dtype str"),
        ({"x": torch.eye(2).to_sparse()}, r"state\['x'\]: a torch.sparse_coo tensor"),
        ({"x": {"y": [1, {2}]}}, r"state\['x'\]\['y'\]\[1\]: set cannot be stored"),
        ({"x": {"y": np.zeros(1)}}, r"state\['x'\]\['y'\]: ndarray cannot be stored"),
        ({"x": {1: 2}}, r"state\['x'\]: key 1 must be a string"),
        ({"__metadata__": 1}, "__metadata__"),
        ({3: 1}, "state key 3"),
    ],
)
def test_what_has_no_portable_form_is_refused_by_its_path(state, message):
    with pytest.raises(TypeError, match=message):
        encode_state(state)


def test_damaged_or_foreign_bytes_are_refused_with_one_error():
    good = encode_state({"x": np.arange(100), "n": 1})
    foreign = safetensors.torch.save({"x": torch.zeros(1)})
    for bad in (b"", b"\x80\x04K\x01.", good[:-1], good + b"x", b"\xff" * 8 + good[8:], foreign):
        with pytest.raises(ValueError, match="not a Lyceum state"):
            decode_state(bad)


def test_a_newer_format_version_is_refused():
    newer = encode_state({"n": 1}).replace(b'\\"version\\":1', b'\\"version\\":9')
    with pytest.raises(ValueError, match="format version 9"):
        decode_state(newer)


def _count_to(n, *, resume=None, should_stop=None):
    """A core in miniature: sums i, with a state every third step."""
    i, total = (resume["i"], resume["total"]) if resume else (0, 0)
    while i < n:
        if should_stop is not None and should_stop():
            raise Stopped
        total += i
        i += 1
        state = {"i": i, "total": total} if i % 3 == 0 or i == n else None
        yield Checkpoint(state, "count", i, n, {"total": float(total)})


def test_run_to_end_returns_the_last_state_even_if_ticks_follow():
    assert run_to_end(_count_to(10)) == {"i": 10, "total": 45}
    assert run_to_end([Checkpoint({"x": 1}, "a", 1), Checkpoint(None, "b", 2)]) == {"x": 1}


def test_resuming_from_every_encoded_state_gives_the_uninterrupted_result():
    for checkpoint in _count_to(10):
        if checkpoint.state is not None:
            resumed = decode_state(encode_state(checkpoint.state))
            if checkpoint.completed < 10:
                assert run_to_end(_count_to(10, resume=resumed)) == {"i": 10, "total": 45}


def test_should_stop_ends_the_work_by_stopped():
    answers = iter([False, False, True])
    with pytest.raises(Stopped):
        run_to_end(_count_to(10, should_stop=lambda: next(answers)))


def test_a_generator_without_a_state_is_an_error():
    with pytest.raises(RuntimeError, match="without a state"):
        run_to_end([Checkpoint(None, "count", 0)])


@pytest.mark.parametrize("stage", ["", "Train", "1st", "a-b", "a" * 41, "train\n"])
def test_stage_names_outside_the_pattern_are_refused(stage):
    with pytest.raises(ValueError, match="stage"):
        Checkpoint(None, stage, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"completed": -1}, ">= 0"),
        ({"completed": 1, "total": -1}, ">= 0"),
        ({"completed": 3, "total": 2}, "more than total=2"),
        ({"completed": 0, "metrics": {"Loss": 1.0}}, "'Loss'"),
        ({"completed": 0, "metrics": {f"m{i}": 0.0 for i in range(65)}}, "65 metrics"),
    ],
)
def test_counts_and_metrics_outside_their_limits_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Checkpoint(None, "a" * 40, **arguments)
