"""What can be wrong with an input, told by the field it is in."""


class FieldError(ValueError):
    """An input is wrong. `field` is the path to it (`synthons[12].rgroup`), `reason` says what was given and what is
    accepted."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)  # as given: an exception that leaves a worker process is made again from these
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class AssemblyError(ValueError):
    """The synthons of a product do not join to one valid molecule."""


class VersionError(ValueError):
    """Two parts that belong together come from different versions, for example an index and a probe of another
    surrogate."""
