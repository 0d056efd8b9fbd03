"""The `lyceum` command: starts, calls, watches and tours the services.

Results go to standard output and everything else to standard error, so that every command can stand in a pipe; with
`--json` the results are JSON. What a command needs is imported when it runs: `lyceum --help` loads neither gRPC nor a
method.
"""
