"""The table of services: which package offers which gRPC service on which port.

`services.toml` beside this file is `infra/services.toml`, the one place where a service is entered. The server, the
client and the command line find services by their short names here and import a service's package only when it is used.
"""

import importlib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from types import ModuleType

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor

from lyceum_runtime.definition import ServiceDefinition
from lyceum_runtime.errors import ConfigurationError


@dataclass(frozen=True)
class ServiceEntry:
    """One line of the table."""

    name: str
    """Short name, the key in the table."""
    package: str
    """Python package; its module `service` has `definition()`."""
    service: str
    """Full gRPC name, `lyceum.<method>.v1.<Method>Service`."""
    port: int
    """Port on loopback and in the container."""
    cpus: float
    """Processor cores that a deployment gives it."""
    memory_gib: float
    """Memory that a deployment gives it, GiB."""

    def stubs(self, suffix: str = "_pb2") -> ModuleType:
        """The generated module of the service's proto file: `lyceum.apex.v1.ApexService` is in
        `lyceum.apex.v1.apex_pb2`.
        """
        package, _, _ = self.service.rpartition(".")
        return importlib.import_module(f"{package}.{package.split('.')[1]}{suffix}")

    def descriptor(self) -> ServiceDescriptor:
        """The service's descriptor; imports the generated messages, nothing of the method."""
        self.stubs()
        return descriptor_pool.Default().FindServiceByName(self.service)


@cache
def load_services() -> dict[str, ServiceEntry]:
    """All services by short name, in the table's order."""
    table = tomllib.loads((resources.files("lyceum_runtime") / "services.toml").read_text("utf-8"))
    return {name: ServiceEntry(name=name, **fields) for name, fields in table.items()}


def find_entry(name: str) -> ServiceEntry:
    """The entry of the service `name`.

    Raises:
        ConfigurationError: no such service; the message lists the known ones.
    """
    services = load_services()
    if name not in services:
        raise ConfigurationError(f"unknown service {name!r}; known services: {', '.join(services)}")
    return services[name]


def require_installed(entry: ServiceEntry) -> None:
    """Raises ConfigurationError if the service's package is not installed; imports nothing of it."""
    if find_spec(entry.package.partition(".")[0]) is None:
        raise ConfigurationError(
            f"service {entry.name!r} needs the package {entry.package}, which is not installed; "
            f"install lyceum-{entry.name} or leave the service out"
        )


def load_definition(entry: ServiceEntry) -> ServiceDefinition:
    """Imports the service's package and returns what it offers."""
    module = importlib.import_module(f"{entry.package}.service")
    definition: ServiceDefinition = module.definition()
    return definition
