"""Python code out of .proto files, with nothing but packages of the Python index; and ruff as it is today.

Pants' own generator downloads protoc and gRPC's plugin as binaries; this one runs ``grpcio-tools`` instead. Everything
around it (targets, dependency inference, the map from modules to targets) is Pants' own.
"""

from __future__ import annotations

from pants.backend.codegen.protobuf import protobuf_dependency_inference, tailor
from pants.backend.codegen.protobuf.python import (
    additional_fields,
    python_protobuf_module_mapper,
    python_protobuf_subsystem,
)
from pants.backend.codegen.protobuf.target_types import (
    ProtobufGrpcToggleField,
    ProtobufSourceField,
    ProtobufSourcesGeneratorTarget,
    ProtobufSourceTarget,
)
from pants.backend.codegen.protobuf.target_types import rules as target_rules
from pants.backend.python.dependency_inference import module_mapper
from pants.backend.python.subsystems.setup import PythonSetup
from pants.backend.python.target_types import PythonSourceField
from pants.backend.python.util_rules import pex
from pants.backend.python.util_rules.interpreter_constraints import InterpreterConstraints
from pants.backend.python.util_rules.pex import PexRequest, VenvPex, VenvPexProcess
from pants.backend.python.util_rules.pex_from_targets import GlobalRequirementConstraints
from pants.backend.python.util_rules.pex_requirements import PexRequirements
from pants.core.util_rules import stripped_source_files
from pants.core.util_rules.source_files import SourceFilesRequest
from pants.core.util_rules.stripped_source_files import StrippedSourceFiles
from pants.engine.fs import (
    AddPrefix,
    CreateDigest,
    Digest,
    Directory,
    MergeDigests,
    PathGlobs,
    RemovePrefix,
    Snapshot,
)
from pants.engine.process import ProcessResult
from pants.engine.rules import Get, MultiGet, collect_rules, rule
from pants.engine.target import GeneratedSources, GenerateSourcesRequest, TransitiveTargets, TransitiveTargetsRequest
from pants.engine.unions import UnionRule
from pants.source.source_root import SourceRoot, SourceRootRequest
from pants.util.logging import LogLevel

from lyceum_pants import ruff

# Run inside the tool's environment; the command line around it (`tools/buf`) uses the same file.
SCRIPT = "tools/api/protoc.py"
TOOLS = ("googleapis-common-protos", "grpcio-tools", "mypy-protobuf", "protovalidate")


class PythonFromProtobufRequest(GenerateSourcesRequest):
    input = ProtobufSourceField
    output = PythonSourceField


@rule(desc="Generate Python from Protobuf", level=LogLevel.DEBUG)
async def generate_python(
    request: PythonFromProtobufRequest,
    constraints: GlobalRequirementConstraints,
    python_setup: PythonSetup,
) -> GeneratedSources:
    output = "_generated"
    target = request.protocol_target
    closure = await Get(TransitiveTargets, TransitiveTargetsRequest([target.address]))
    protoc, script, output_directory, visible, own, source_root = await MultiGet(
        Get(
            VenvPex,
            PexRequest(
                output_filename="protoc.pex",
                internal_only=True,
                requirements=PexRequirements(
                    TOOLS,
                    constraints_strings=map(str, constraints),
                    description_of_origin="the generator of Python from Protobuf",
                ),
                interpreter_constraints=InterpreterConstraints(python_setup.interpreter_constraints),
            ),
        ),
        Get(Digest, PathGlobs([SCRIPT])),
        Get(Digest, CreateDigest([Directory(output)])),
        Get(
            StrippedSourceFiles,
            SourceFilesRequest(t[ProtobufSourceField] for t in closure.closure if t.has_field(ProtobufSourceField)),
        ),
        Get(StrippedSourceFiles, SourceFilesRequest([target[ProtobufSourceField]])),
        Get(SourceRoot, SourceRootRequest, SourceRootRequest.for_target(target)),
    )
    kind = "grpc" if target[ProtobufGrpcToggleField].value else "messages"
    result = await Get(
        ProcessResult,
        VenvPexProcess(
            protoc,
            argv=(SCRIPT, ".", output, kind, *own.snapshot.files),
            input_digest=await Get(Digest, MergeDigests([script, output_directory, visible.snapshot.digest])),
            description=f"Generating Python from {target.address}",
            output_directories=(output,),
            level=LogLevel.DEBUG,
        ),
    )
    generated = await Get(Digest, RemovePrefix(result.output_digest, output))
    return GeneratedSources(await Get(Snapshot, AddPrefix(generated, source_root.path)))


def rules():
    return [
        *collect_rules(),
        *additional_fields.rules(),
        *module_mapper.rules(),
        *pex.rules(),
        *protobuf_dependency_inference.rules(),
        *python_protobuf_module_mapper.rules(),
        *python_protobuf_subsystem.rules(),
        *ruff.rules(),
        *stripped_source_files.rules(),
        *tailor.rules(),
        *target_rules(),
        UnionRule(GenerateSourcesRequest, PythonFromProtobufRequest),
    ]


def target_types():
    return [ProtobufSourceTarget, ProtobufSourcesGeneratorTarget]
