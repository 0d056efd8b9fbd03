"""The chassis that every Lyceum service stands on: server, telemetry, operations, resources, artifacts, client.

A service package offers a :class:`~lyceum_runtime.definition.ServiceDefinition`; everything else (validation, errors,
admission, deadlines, health, reflection, traces, durable operations, storage) is here, once.
"""
