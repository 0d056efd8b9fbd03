"""The Python module of ``buf/validate/validate.proto``.

``protovalidate`` ships the descriptor in its own runtime's form only, so a ``_pb2`` module that Google's protobuf runtime
can import is built here from that descriptor. Generated code of this repository imports it for its side effect: the
options of every message need the extensions registered in the default pool.
"""

from google.protobuf import (
    descriptor_pb2 as _descriptor_pb2,  # noqa: F401  (registers a dependency of the file)
)
from google.protobuf import (
    descriptor_pool as _descriptor_pool,
)
from google.protobuf import (
    duration_pb2 as _duration_pb2,  # noqa: F401
)
from google.protobuf import (
    field_mask_pb2 as _field_mask_pb2,  # noqa: F401
)
from google.protobuf import (
    timestamp_pb2 as _timestamp_pb2,  # noqa: F401
)
from google.protobuf.internal import builder as _builder
from protovalidate._gen.buf.validate import validate_pb as _validate_pb

DESCRIPTOR = _descriptor_pool.Default().AddSerializedFile(_validate_pb._DESC.proto.to_binary())
_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, "buf.validate.validate_pb2", globals())
