"""The quick test of a message: its yes is protovalidate's yes."""

import math
from functools import cache
from typing import Any

import pytest
from buf.validate import validate_pb2 as built_at_import
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum.common.v1 import common_pb2
from lyceum.testing.v1 import testing_pb2
from lyceum_runtime import quick_rules, validation

validate_pb2: Any = built_at_import
FieldProto = descriptor_pb2.FieldDescriptorProto

NUMBERS = [-math.inf, -3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, math.inf, math.nan]
KINDS = {
    "double": (FieldProto.TYPE_DOUBLE, st.sampled_from(NUMBERS)),
    "float": (FieldProto.TYPE_FLOAT, st.sampled_from(NUMBERS)),
    "int64": (FieldProto.TYPE_INT64, st.integers(-3, 3)),
    "string": (FieldProto.TYPE_STRING, st.text("aé", max_size=3)),
    "bytes": (FieldProto.TYPE_BYTES, st.binary(max_size=3)),
}


@st.composite
def value_rules(draw: st.DrawFn, kind: str) -> Any:
    """Rules for one value, some of a sort that the quick test leaves to protovalidate."""
    rules = validate_pb2.FieldRules()
    typed = getattr(rules, kind)
    if kind in ("string", "bytes"):
        for name in draw(st.sets(st.sampled_from(["min_len", "max_len", "pattern", "in"]), max_size=2)):
            if name == "pattern":
                typed.pattern = "^a*$"
            elif name == "in":
                getattr(typed, "in").append("a" if kind == "string" else b"a")
            else:
                setattr(typed, name, draw(st.integers(0, 3)))
        return rules
    lower = draw(st.sampled_from([None, "gt", "gte"]))
    upper = draw(st.sampled_from([None, "lt", "lte"]))
    for name in (lower, upper):
        if name is not None:
            setattr(typed, name, draw(st.integers(-2, 2)))
    if kind != "int64" and draw(st.booleans()):
        typed.finite = True
    if draw(st.integers(0, 9)) == 0:
        typed.not_in.append(1)
    return rules


@st.composite
def ruled_message(draw: st.DrawFn) -> Message:
    """A message of a new type with one ruled field, alone, optional or repeated."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    number, values = KINDS[kind]
    rules = draw(value_rules(kind))
    shape = draw(st.sampled_from(["plain", "optional", "repeated"]))
    if shape == "repeated":
        whole = validate_pb2.FieldRules()
        if draw(st.booleans()):
            whole.repeated.items.CopyFrom(rules)
        for name in draw(st.sets(st.sampled_from(["min_items", "max_items", "unique"]), max_size=2)):
            setattr(whole.repeated, name, True if name == "unique" else draw(st.integers(0, 40)))
        rules = whole
    if draw(st.booleans()):
        rules.required = draw(st.booleans())
        rules.ignore = draw(st.sampled_from([0, 0, 1, 3]))
    made = message_class(number, shape, rules.SerializeToString())()
    if draw(st.booleans()):
        if shape == "repeated":
            made.value.extend(draw(st.lists(values, max_size=40)))
        else:
            made.value = draw(values)
    return made


@cache
def message_class(number: int, shape: str, rules: bytes) -> Any:
    name = f"quick_{number}_{shape}_{rules.hex()}"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{name}.proto", package="quick", syntax="proto3", dependency=["buf/validate/validate.proto"]
    )
    message = file.message_type.add(name=name)
    field = message.field.add(name="value", number=1, type=number)
    field.label = FieldProto.LABEL_REPEATED if shape == "repeated" else FieldProto.LABEL_OPTIONAL
    if shape == "optional":
        message.oneof_decl.add(name="_value")
        field.proto3_optional, field.oneof_index = True, 0
    field.options.Extensions[validate_pb2.field].ParseFromString(rules)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"quick.{name}"))


@settings(max_examples=600, deadline=None)
@given(ruled_message())
def test_a_message_that_passes_quickly_breaks_no_rule(message: Message) -> None:
    if quick_rules.surely_valid(message):
        assert validation.violations(message) == []


GOOD = [
    testing_pb2.EchoRequest(text="hello", values=[0.5] * 1000),
    testing_pb2.EchoRequest(values=[1.0, 2.0], wait_seconds=60),
    testing_pb2.EchoRequest(tensor=common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT64, shape=[2], data=bytes(16))),
    testing_pb2.SpinRequest(count=1),
]


@pytest.mark.parametrize("message", GOOD, ids=range(len(GOOD)))
def test_a_usual_request_passes_quickly(message: Message) -> None:
    assert quick_rules.surely_valid(message)
    assert validation.violations(message) == []


BAD = [
    testing_pb2.EchoRequest(values=[0.5] * 1001),
    testing_pb2.EchoRequest(values=[0.5] * 999 + [math.nan]),
    testing_pb2.EchoRequest(values=[-math.inf] + [0.5] * 999),
    testing_pb2.EchoRequest(wait_seconds=60.5),
    testing_pb2.EchoRequest(constraints=[testing_pb2.Bounds(lower=2, upper=1)]),
    testing_pb2.EchoRequest(tensor=common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_UNSPECIFIED)),
    testing_pb2.EchoRequest(tensor=common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT64, shape=[-1])),
    testing_pb2.SpinRequest(),
]


@pytest.mark.parametrize("message", BAD, ids=range(len(BAD)))
def test_a_wrong_request_does_not_pass_quickly(message: Message) -> None:
    assert validation.violations(message)
    assert not quick_rules.surely_valid(message)
