# What every BUILD file may call. One call declares a whole package: its sources, tests, wheel and the rules on what it
# may import. A forbidden import fails every build that reads the package's dependencies.

VERSION = "0.1.0"

# Every method; what runs all services names it.
METHODS = ("apex",)

THIRD_PARTY = "//tools/reqs#*"

# What belongs to the wire, and so to a service and the runtime but to no library.
WIRE = (
    "!//tools/reqs#dbos",
    "!//tools/reqs#googleapis-common-protos",
    "!//tools/reqs#grpcio",
    "!//tools/reqs#grpcio-*",
    "!//tools/reqs#opentelemetry-*",
    "!//tools/reqs#protobuf",
    "!//tools/reqs#protovalidate",
    "!//tools/reqs#uvloop",
)


def shared_library(name, description, uses=()):
    """A library that methods build on; `uses` names the other shared libraries it builds on."""
    allowed = ["//packages/" + other + "/**" for other in (name, *uses)]
    __dependencies_rules__(
        ({"path": "//packages/" + name + "/src/**"}, *WIRE, *allowed, THIRD_PARTY, "!*"),
        ("*", *allowed, THIRD_PARTY, "!*"),
    )
    python_package(name, description)
    package_pex(name, "//packages/" + name + "/src")


def runtime_package(name, description, uses, commands=None):
    """A package that speaks gRPC and knows no method: the chassis, the command line, the console."""
    allowed = ["//packages/" + other + "/**" for other in (name, *uses)]
    __dependencies_rules__(
        (
            {"path": "//packages/" + name + "/src/**"},
            "!//packages/*/tests/**",
            "//protos/**",
            *allowed,
            THIRD_PARTY,
            "!*",
        ),
        ("*", "//protos/**", *allowed, "//infra/**", THIRD_PARTY, "!*"),
    )
    python_package(name, description, commands)
    package_pex(name, "//packages/" + name + "/src", entry_point=next(iter((commands or {}).values()), None))


def method_package(name, description, uses=("base", "zoo")):
    """A method: its core knows no gRPC, its service.py translates, and neither knows another method."""
    source = "//packages/" + name + "/src/lyceum_" + name
    own = "//packages/" + name + "/**"
    libraries = ["//packages/" + library + "/**" for library in uses]
    # The service, its start, and the tour's client of it.
    face = [source + file for file in ("/service.py", "/service/**", "/__main__.py", "/bench*.py", "/tour.py")]
    __dependencies_rules__(
        (
            [{"path": path} for path in face],
            own,
            "//protos/**",
            "//packages/runtime/src/**",
            *libraries,
            THIRD_PARTY,
            "!*",
        ),
        ({"path": source + "/**"}, *["!" + path for path in face], *WIRE, own, *libraries, THIRD_PARTY, "!*"),
        ("*", own, "//protos/**", "//packages/runtime/**", *libraries, THIRD_PARTY, "!*"),
    )
    python_package(name, description)
    pex_binary(
        name="service",
        entry_point="lyceum_" + name + ".__main__",
        # The runtime finds a service by its name in services.toml, which no import shows.
        dependencies=["//packages/" + name + "/src"],
        execution_mode="venv",
        layout="packed",
        output_path="services/lyceum-" + name,
    )


def package_pex(name, *dependencies, entry_point=None):
    """A package with all its requirements in one folder: it runs the entry point, or is a Python that can import it."""
    pex_binary(
        name="pex",
        dependencies=list(dependencies),
        entry_point=entry_point,
        execution_mode="venv",
        layout="packed",
        output_path="libraries/lyceum-" + name,
    )


def python_package(name, description, commands=None):
    python_sources(name="benchmarks", sources=["benchmarks/**/*.py"])
    python_distribution(
        name="dist",
        dependencies=["//packages/" + name + "/src"],
        provides=python_artifact(name="lyceum-" + name, version=VERSION, description=description, license="Apache-2.0"),
        entry_points={"console_scripts": commands or {}},
        sdist=False,
    )


def sources(*dependencies):
    """In a package's src/BUILD, which Pants needs at the source root; `dependencies` are what no import shows."""
    resources(name="data", sources=["**/*", "!**/*.py", "!BUILD"])
    python_sources(sources=["**/*.py"], dependencies=[":data", *dependencies])


def tests(package, *dependencies):
    """In a package's tests/BUILD; `dependencies` are what its tests reach by name and no import shows."""
    resources(name="data", sources=["**/*", "!**/*.py", "!BUILD"])
    python_test_utils(name="utils", sources=["**/*.py", "!**/test_*.py"], skip_mypy=True)
    python_tests(
        sources=["**/test_*.py"],
        # Services are found by name, so the whole package is there, not only what a test imports.
        dependencies=[":data", "//packages/" + package + "/src", *dependencies],
        # one process for a package's tests: its heavy imports are paid once
        batch_compatibility_tag=package,
        skip_mypy=True,
    )


def cross_tests(tag):
    """In a folder below tests/: tests of every service at once."""
    resources(name="data", sources=["**/*", "!**/*.py", "!BUILD", "!*.sh"])
    python_test_utils(name="utils", sources=["**/*.py", "!**/test_*.py"], skip_mypy=True)
    python_tests(
        sources=["**/test_*.py"],
        dependencies=[":data", "//protos:lyceum", *["//packages/" + p + "/src" for p in ("cli", "runtime", *METHODS)]],
        batch_compatibility_tag=tag,
        skip_mypy=True,
    )
