"""Runs protoc with the third-party API files this repository imports.

The packages that own those files (googleapis-common-protos, protovalidate) do not all ship their sources, and some ship
them under another name, but every installed module carries its descriptor: those become one descriptor set, which
protoc searches beside the repository's own files.
"""

import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import grpc_tools
from google.longrunning import operations_pb2
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from grpc_tools import protoc
from protovalidate._gen.buf.validate import validate_pb

# Whose every module is offered, used here or not.
PACKAGES = ("google.api", "google.rpc", "google.type")


def third_party() -> descriptor_pb2.FileDescriptorSet:
    """The files of googleapis and protovalidate and all that they import, each after its imports."""
    modules = [f"google.protobuf.{name}_pb2" for name in ("descriptor", "duration", "field_mask", "timestamp")]
    for package in PACKAGES:
        found = pkgutil.iter_modules(importlib.import_module(package).__path__)
        modules += [f"{package}.{module.name}" for module in found if module.name.endswith("_pb2")]
    roots = [operations_pb2.Operation.DESCRIPTOR.file]
    roots += [importlib.import_module(module).DESCRIPTOR for module in modules]
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}

    def add(file: FileDescriptor) -> None:
        if file.name in files:
            return
        for dependency in file.dependencies:
            add(dependency)
        files[file.name] = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(files[file.name])

    for root in roots:
        add(root)
    validate = descriptor_pb2.FileDescriptorProto.FromString(validate_pb._DESC.proto.to_binary())
    return descriptor_pb2.FileDescriptorSet(file=[*files.values(), validate])


def run(arguments: Iterable[str]) -> None:
    """Runs protoc; raises SystemExit with its status when it fails (it has then said why)."""
    with tempfile.TemporaryDirectory() as directory:
        known = Path(directory, "third_party.binpb")
        known.write_bytes(third_party().SerializeToString())
        include = Path(grpc_tools.__file__).parent / "_proto"
        status = protoc.main(["protoc", f"--descriptor_set_in={known}", *arguments, f"-I{include}"])
    if status:
        raise SystemExit(status)


def generate_python(root: str, output: str, files: Sequence[str], *, grpc: bool) -> None:
    """Writes modules and type stubs for ``files`` (below ``root``) to ``output``."""
    scripts = Path(sys.executable).parent
    arguments = [f"-I{root}", f"--python_out={output}", f"--mypy_out=quiet:{output}"]
    arguments.append(f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}")
    if grpc:
        arguments += [f"--grpc_python_out={output}", f"--mypy_grpc_out=quiet:{output}"]
        arguments.append(f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}")
    run([*arguments, *files])
    for file in files:
        # The stubs beside the modules are to be believed (PEP 561); the packages have no other place for the mark.
        Path(output, file).parent.joinpath("py.typed").touch()


def image(root: Path) -> bytes:
    """The whole API below ``root`` as one descriptor set with imports, comments and positions."""
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "image.binpb")
        run([f"-I{root}", "--include_imports", "--include_source_info", f"--descriptor_set_out={target}", *files])
        return target.read_bytes()


if __name__ == "__main__":
    # How the build calls it: protoc.py ROOT OUTPUT grpc|messages FILE...
    generate_python(sys.argv[1], sys.argv[2], sys.argv[4:], grpc=sys.argv[3] == "grpc")
