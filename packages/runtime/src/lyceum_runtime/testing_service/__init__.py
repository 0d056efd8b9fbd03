"""The runtime's own service, EchoService: one small RPC of each kind, for tests and `lyceum bench runtime`.

It is laid out as a method's package is (`service.py`, `__main__.py`), so `python -m lyceum_runtime.testing_service`
serves it alone.
"""

from lyceum_runtime.services import ServiceEntry

ENTRY = ServiceEntry(
    name="testing",
    package="lyceum_runtime.testing_service",
    service="lyceum.testing.v1.EchoService",
    port=50150,
    cpus=1,
    memory_gib=1,
)
"""Its line in the table of services; it is not in infra/services.toml because it is never deployed."""
