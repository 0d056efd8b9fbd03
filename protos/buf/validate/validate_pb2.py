"""The Python module of ``buf/validate/validate.proto``.

``protovalidate`` ships the descriptor in its own runtime's form only, so a ``_pb2`` module that Google's protobuf
runtime can import is built here from that descriptor. Generated code of this repository imports it for its side effect:
the options of every message need the extensions registered in the default pool.
"""

# Imported first: the file's own imports must be in the pool before it.
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, field_mask_pb2, timestamp_pb2  # noqa: F401
from google.protobuf.internal import builder
from protovalidate._gen.buf.validate import validate_pb

DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(validate_pb._DESC.proto.to_binary())
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, "buf.validate.validate_pb2", globals())
