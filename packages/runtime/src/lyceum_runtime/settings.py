"""Settings of a Lyceum process, read from `LYCEUM_*` variables; telemetry has its own standard `OTEL_*` variables.

A wrong value stops the start with one line (:class:`~lyceum_runtime.errors.ConfigurationError`); so does a variable
that looks like a setting's misspelling, because a limit that is silently not applied is worse than no start.
"""

import difflib
import ipaddress
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal, Self

from platformdirs import user_cache_dir, user_state_dir
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from lyceum_runtime.errors import ConfigurationError

_PREFIX = "LYCEUM_"
_MIB = 1 << 20


def available_cpus() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings(BaseSettings):
    """Everything that an operator can set. Arguments win over variables, variables over defaults."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    state_dir: Path = Field(default_factory=lambda: Path(user_state_dir("lyceum")))
    """Where operations, resources, artifacts and spans are kept, unless set apart by the URLs below."""
    cache: Path = Field(default_factory=lambda: Path(user_cache_dir("lyceum")))
    """Where fetched data sets are kept; may be deleted at any time."""
    host: str = "127.0.0.1"
    """Address to bind: loopback only."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port to bind instead of the services' own ports; 0 takes a free one."""
    database_url: str = Field(
        default_factory=lambda values: f"sqlite:///{values['state_dir'] / 'lyceum.db'}", repr=False
    )
    """SQLAlchemy URL of operations and resources; default sqlite:///<state_dir>/lyceum.db."""
    artifacts_url: str = Field(default_factory=lambda values: str(values["state_dir"] / "artifacts"))
    """fsspec URL of the artifact store; default <state_dir>/artifacts."""
    max_workers: Annotated[int, Field(ge=1, le=1024)] = Field(default_factory=lambda: max(2, available_cpus()))
    """Requests that compute at the same time; the others wait."""
    max_pending: Annotated[int, Field(ge=1, le=4096)] = Field(
        default_factory=lambda values: max(64, 4 * values.get("max_workers", 1))
    )
    """Requests that compute or wait; beyond it RESOURCE_EXHAUSTED with RetryInfo."""
    torch_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of one computation inside torch, BLAS and OpenMP."""
    max_message_bytes: Annotated[int, Field(ge=1024, le=512 * _MIB)] = 64 * _MIB + 64 * 1024
    """Largest message, both ways: 64 MiB of data and its envelope."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 20.0
    """How long running requests may finish after SIGTERM."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""

    @field_validator("state_dir", "cache")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        if host == "localhost":
            return "127.0.0.1"
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError("requests travel unencrypted, so only loopback is served: 127.0.0.1, ::1 or localhost")
        return host

    @model_validator(mode="after")
    def _pending_covers_workers(self) -> Self:
        if self.max_pending < self.max_workers:
            raise ValueError(f"max_pending={self.max_pending} must be at least max_workers={self.max_workers}")
        return self


def load_settings(**overrides: object) -> Settings:
    """The settings of this process: `overrides`, else `LYCEUM_*`, else defaults.

    Raises:
        ConfigurationError: a value is wrong, or a variable looks like a misspelt setting. One line, naming the
        variable.
    """
    _refuse_misspelt()
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ConfigurationError(f"settings: {reason}") from None
        name = str(first["loc"][0])
        raise ConfigurationError(f"{_PREFIX}{name.upper()}={first['input']}: {reason}") from None


def _refuse_misspelt() -> None:
    known = {_PREFIX + name.upper() for name in Settings.model_fields}
    for variable in os.environ:
        if variable.startswith(_PREFIX) and variable not in known:
            # 0.85 catches one or two wrong letters and leaves other programs' LYCEUM_ variables alone.
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if close:
                raise ConfigurationError(f"{variable} is not a setting; did you mean {close[0]}?")


def require_writable(settings: Settings) -> None:
    """Creates the state directory, readable by its owner only, and tries a file in it.

    Raises:
        ConfigurationError: it cannot be created or written.
    """
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.state_dir):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"the state directory {settings.state_dir} cannot be written ({error.strerror}); "
            f"set {_PREFIX}STATE_DIR to one that can"
        ) from None
