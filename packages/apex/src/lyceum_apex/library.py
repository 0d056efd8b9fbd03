"""A combinatorial synthesis library: reactions, their R-groups, and lists of synthons; its products are never written
out.

A product is one synthon per R-group of one reaction. A *leg* is a triple (reaction r, R-group g, synthon s); legs are
numbered r-major, then g, then s, and everything that belongs to a leg (its embedding, its contributions, exact
columns) is an array in that order. Counts of products are Python integers, because a library of four-component
reactions exceeds int64.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lyceum_apex.assembly import Attachments, Molecule, attachments, describe, join, join_smiles, parse_synthon
from lyceum_apex.contributions import MAX_MAGNITUDE
from lyceum_apex.errors import FieldError
from lyceum_base import Streams, decode_state, encode_state, sha256_json

MAX_RGROUPS = 4
MAX_ROWS = 10_000_000
"""Most rows of a Parquet table: a small file can stand for more than memory holds."""

_SEPARATOR = "~"
_CHUNK = 1024

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ProductBatch:
    """Products by index: reaction `r` int32 [n], synthon within each R-group `s` int32 [n, 4], -1 where there is no
    R-group."""

    r: IntArray
    s: IntArray

    def __len__(self) -> int:
        return len(self.r)


@dataclass(frozen=True, eq=False)
class SynthonLibrary:
    """Immutable; make one by `from_tsv`, `from_parquet`, `from_reagents` or `from_brics`.

    Args:
        reaction_ids: one per reaction.
        smarts: one per reaction, "" where unknown; not used to assemble products.
        sizes: synthons in each R-group of each reaction.
        smiles: distinct synthon SMILES.
        leg_smiles: int32 [L], which of `smiles` a leg has.
        synthon_ids: [L]; unique within an R-group.
        columns: exact additive columns, float64 [L] each: a product's value is the sum over its legs.
    """

    reaction_ids: tuple[str, ...]
    smarts: tuple[str, ...]
    sizes: list[list[int]]
    smiles: tuple[str, ...]
    leg_smiles: IntArray
    synthon_ids: tuple[str, ...]
    columns: Mapping[str, FloatArray] = field(default_factory=dict)

    # --- shape -------------------------------------------------------------------------------------------------------

    @property
    def n_reactions(self) -> int:
        return len(self.sizes)

    @property
    def n_legs(self) -> int:
        return len(self.leg_smiles)

    @cached_property
    def n_products(self) -> int:
        return sum(self.products_of)

    @cached_property
    def products_of(self) -> list[int]:
        """Products of each reaction."""
        return [math.prod(groups) for groups in self.sizes]

    @cached_property
    def first_leg(self) -> list[list[int]]:
        """The leg of synthon 0 of each R-group of each reaction."""
        starts, position = [], 0
        for groups in self.sizes:
            starts.append([position + sum(groups[:g]) for g in range(len(groups))])
            position += sum(groups)
        return starts

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of reactions, synthons and their order. Columns are left out: they do not change what a leg is."""
        return sha256_json([self.reaction_ids, self.sizes, self.smiles, self.leg_smiles.tolist(), self.synthon_ids])

    def legs(self, batch: ProductBatch) -> IntArray:
        """Leg numbers of products, int32 [n, 4], -1 where there is no R-group."""
        starts = np.full((self.n_reactions, MAX_RGROUPS), -1, np.int32)
        for r, row in enumerate(self.first_leg):
            starts[r, : len(row)] = row
        return np.where(batch.s >= 0, starts[batch.r] + batch.s, -1).astype(np.int32)

    # --- products ----------------------------------------------------------------------------------------------------

    @cached_property
    def _molecules(self) -> dict[int, Molecule]:
        return {}

    def _leg(self, r: int, g: int, s: int) -> int:
        return self.first_leg[r][g] + s

    def _checked(self, r: int, s: Sequence[int]) -> list[int]:
        if not 0 <= r < self.n_reactions:
            raise FieldError("reaction", f"{r} given; the library has reactions 0 to {self.n_reactions - 1}")
        if len(s) != len(self.sizes[r]):
            raise FieldError(
                "synthons", f"{len(s)} given; reaction {self.reaction_ids[r]!r} has {len(self.sizes[r])} R-groups"
            )
        for g, (synthon, size) in enumerate(zip(s, self.sizes[r])):
            if not 0 <= synthon < size:
                raise FieldError(f"synthons[{g}]", f"{synthon} given; this R-group has synthons 0 to {size - 1}")
        return [self._leg(r, g, synthon) for g, synthon in enumerate(s)]

    def product_smiles(self, r: int, s: Sequence[int]) -> str:
        """SMILES of one product. Raises FieldError for an index out of range, AssemblyError when the synthons do not
        join."""
        from rdkit import Chem

        parts = []
        for leg in self._checked(r, s):
            key = int(self.leg_smiles[leg])
            if key not in self._molecules:
                self._molecules[key] = parse_synthon(self.smiles[key], "smiles")
            parts.append(self._molecules[key])
        return str(Chem.MolToSmiles(join(parts)))

    def products_smiles(self, batch: ProductBatch) -> list[str | None]:
        """SMILES of many products, None where one does not assemble. Chunks run wherever `joblib.parallel_config`
        says."""
        from joblib import Parallel, delayed

        parts = self.synthon_smiles(batch)
        chunks = (parts[i : i + _CHUNK] for i in range(0, len(parts), _CHUNK))
        return [smiles for chunk in Parallel()(delayed(join_smiles)(chunk) for chunk in chunks) for smiles in chunk]

    def synthon_smiles(self, batch: ProductBatch) -> list[list[str]]:
        """SMILES of the synthons of each product."""
        return [[self.smiles[self.leg_smiles[leg]] for leg in row if leg >= 0] for row in self.legs(batch).tolist()]

    def product_name(self, r: int, s: Sequence[int]) -> str:
        """`reaction~synthon~synthon...`, by ids."""
        return _SEPARATOR.join([self.reaction_ids[r], *(self.synthon_ids[leg] for leg in self._checked(r, s))])

    @cached_property
    def _reaction_index(self) -> dict[str, int]:
        return {name: r for r, name in enumerate(self.reaction_ids)}

    @cached_property
    def _synthon_index(self) -> list[list[dict[str, int]]]:
        return [
            [{self.synthon_ids[start + s]: s for s in range(size)} for start, size in zip(starts, groups)]
            for starts, groups in zip(self.first_leg, self.sizes)
        ]

    def parse_name(self, name: str, field: str = "name") -> tuple[int, tuple[int, ...]]:
        """Indices (r, s) of a product name. Raises FieldError on `field` when the library has no such product."""
        reaction, *synthons = name.split(_SEPARATOR)
        r = self._reaction_index.get(reaction)
        if r is None:
            raise FieldError(field, f"product {name!r}: the library has no reaction {reaction!r}")
        if len(synthons) != len(self.sizes[r]):
            raise FieldError(
                field, f"product {name!r}: reaction {reaction!r} has {len(self.sizes[r])} R-groups, not {len(synthons)}"
            )
        for g, synthon in enumerate(synthons):
            if synthon not in self._synthon_index[r][g]:
                raise FieldError(
                    field, f"product {name!r}: R-group {g + 1} of reaction {reaction!r} has no synthon {synthon!r}"
                )
        return r, tuple(self._synthon_index[r][g][synthon] for g, synthon in enumerate(synthons))

    def sample(self, n: int, seed: int, stratify: bool = True) -> ProductBatch:
        """`n` different products: the same number from every reaction (`stratify`) or uniform over all products.

        A reaction with fewer products than its share gives all of them. Raises FieldError when the library has fewer
        than `n`.
        """
        if not 1 <= n <= self.n_products:
            raise FieldError("n", f"{n} given; the library has {self.n_products} products, ask for 1 to that many")
        streams = Streams(seed)
        if not stratify:
            return self.draw(n, range(self.n_reactions), streams)
        parts, left = [], n
        by_size = sorted(range(self.n_reactions), key=lambda r: self.products_of[r])
        for position, r in enumerate(by_size):
            quota = min(self.products_of[r], left // (self.n_reactions - position))
            left -= quota
            if quota:
                parts.append(self.draw(quota, [r], streams.child("apex.sample.reaction", r)))
        return ProductBatch(np.concatenate([p.r for p in parts]), np.concatenate([p.s for p in parts]))

    def draw(self, n: int, reactions: Sequence[int], streams: Streams) -> ProductBatch:
        """`n` different products, uniform over the products of `reactions`."""
        counts = [self.products_of[r] for r in reactions]
        total = sum(counts)
        groups = np.ones((len(reactions), MAX_RGROUPS), np.int64)
        missing = np.ones((len(reactions), MAX_RGROUPS), bool)
        for i, r in enumerate(reactions):
            groups[i, : len(self.sizes[r])] = self.sizes[r]
            missing[i, : len(self.sizes[r])] = False
        if total <= 4 * n:  # rejection would be slow: shuffle all
            flat = np.argsort(streams.uniform("apex.sample.shuffle", shape=(total,)), kind="stable")[:n]
            sizes = np.array(counts, np.int64)
            ends = np.cumsum(sizes)
            row = np.searchsorted(ends, flat, side="right").astype(np.int64)
            flat = flat - (ends - sizes)[row]
            s = np.empty((n, MAX_RGROUPS), np.int64)
            for g in reversed(range(MAX_RGROUPS)):
                flat, s[:, g] = np.divmod(flat, groups[row, g])
        else:
            shares = np.cumsum([count / total for count in counts])
            row, s = np.empty(0, np.int64), np.empty((0, MAX_RGROUPS), np.int64)
            for attempt in itertools.count():
                u = streams.uniform("apex.sample.draw", attempt, shape=(n - len(row), 1 + MAX_RGROUPS))
                new = np.minimum(np.searchsorted(shares, u[:, 0], side="right"), len(reactions) - 1)
                row = np.concatenate([row, new])
                s = np.concatenate([s, (u[:, 1:] * groups[new]).astype(np.int64)])
                keep = np.sort(np.unique(np.column_stack([row, s]), axis=0, return_index=True)[1])
                row, s = row[keep], s[keep]
                if len(row) == n:
                    break
        s[missing[row]] = -1
        return ProductBatch(np.asarray(reactions, np.int32)[row], s.astype(np.int32))

    # --- exact columns -----------------------------------------------------------------------------------------------

    def with_columns(self, name: str, leg_values: npt.ArrayLike) -> Self:
        """The library with one more exact additive column: `leg_values` [L], finite, in the order of the legs."""
        values = np.array(leg_values, dtype=np.float64)
        if values.shape != (self.n_legs,):
            raise FieldError(
                "leg_values", f"shape {list(values.shape)} given; the library has {self.n_legs} legs: [{self.n_legs}]"
            )
        if not np.isfinite(values).all():
            raise FieldError(f"leg_values[{int(np.argmin(np.isfinite(values)))}]", "not finite")
        if not name or name in self.columns:
            raise FieldError("name", f"column name {name!r} is {'taken' if name else 'empty'}")
        values.flags.writeable = False
        return replace(self, columns={**self.columns, name: values})

    def with_weight(self, name: str = "mw") -> Self:
        """With the molecular weight in g/mol as an exact column: a leg's weight is that of its synthon without the
        metals."""
        from rdkit import Chem

        metals = {a: Chem.GetPeriodicTable().GetAtomicWeight(a) for a in (92, 93, 94, 95)}
        return self.with_columns(
            name,
            self._per_leg(
                lambda m: _molecular_weight(m) - sum(metals.get(a.GetAtomicNum(), 0.0) for a in m.GetAtoms())
            ),
        )

    def with_heavy_atoms(self, name: str = "heavy_atoms") -> Self:
        """With the number of heavy atoms as an exact column."""
        return self.with_columns(
            name, self._per_leg(lambda m: sum(a.GetAtomicNum() not in (92, 93, 94, 95) for a in m.GetAtoms()))
        )

    def _per_leg(self, value: Any) -> FloatArray:
        from rdkit import Chem

        return np.array([value(Chem.MolFromSmiles(smiles)) for smiles in self.smiles], np.float64)[self.leg_smiles]

    # --- storage -----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """One safetensors blob; equal libraries give equal bytes."""
        arrays = {f"column.{i}": values for i, values in enumerate(self.columns.values())}
        values = {
            "kind": "apex.library/1",
            "reaction_ids": list(self.reaction_ids),
            "smarts": list(self.smarts),
            "sizes": self.sizes,
            "smiles": "\n".join(self.smiles),
            "synthon_ids": "\n".join(self.synthon_ids),
            "columns": list(self.columns),
        }
        return encode_state({**values, **arrays, "leg_smiles": self.leg_smiles})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Inverse of `to_bytes`; raises ValueError for anything else."""
        state = decode_state(blob)
        if state.get("kind") != "apex.library/1":
            raise ValueError(f"not a synthon library: the blob says it is {state.get('kind')!r}")
        return cls(
            reaction_ids=tuple(state["reaction_ids"]),
            smarts=tuple(state["smarts"]),
            sizes=state["sizes"],
            smiles=tuple(state["smiles"].split("\n")),
            leg_smiles=state["leg_smiles"],
            synthon_ids=tuple(state["synthon_ids"].split("\n")),
            columns={name: state[f"column.{i}"] for i, name in enumerate(state["columns"])},
        )

    # --- importers ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_parquet(cls, reactions: Path, synthons: Path, *, columns: Sequence[str] = ()) -> Self:
        """The layout of the paper's data: reactions (reaction_id, smarts), synthons (synthon_id, smiles, reaction_id,
        rgroup). `columns` are numeric columns of the synthons that become exact additive columns."""
        reaction_table = _read_parquet(reactions, "reactions", ("reaction_id", "smarts"))
        table = _read_parquet(synthons, "synthons", ("reaction_id", "rgroup", "synthon_id", "smiles", *columns))
        return cls.from_rows(zip(*table[:4]), _smarts_of(*reaction_table), dict(zip(columns, table[4:])))

    @classmethod
    def from_tsv(cls, synthons: Path, reactions: Path | None = None, *, columns: Sequence[str] = ()) -> Self:
        """Tab-separated text with a header: synthons (smiles, synthon_id, position, reaction_id), reactions
        (reaction_id, Reaction). `columns` are numeric columns of the synthons that become exact additive columns."""
        smarts = None
        if reactions is not None:
            smarts = _smarts_of(*_read_tsv(reactions, "reactions", ("reaction_id", "Reaction")))
        ids, positions, synthon_ids, smiles, *texts = _read_tsv(
            synthons, "synthons", ("reaction_id", "position", "synthon_id", "smiles", *columns)
        )
        rgroups = []
        for i, text in enumerate(positions):
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                raise FieldError(f"synthons[{i}].position", f"{text!r} given; R-groups are numbered 1 to {MAX_RGROUPS}")
            rgroups.append(int(text))
        numbers = {name: [_number(text, i, name) for i, text in enumerate(rows)] for name, rows in zip(columns, texts)}
        return cls.from_rows(zip(ids, rgroups, synthon_ids, smiles), smarts, numbers)

    @classmethod
    def from_reagents(cls, smarts: str, lists: Sequence[Sequence[str]], *, reaction_id: str = "r1") -> Self:
        """One reaction SMARTS and the reagents (SMILES) of each of its 2 to 4 reactants, in the order of the reactants.

        Reagents become synthons by the reaction itself, so products need no reaction any more. A reagent that matches
        in several ways takes RDKit's first match. Ids are `R1-0`, `R1-1`, ... Raises FieldError (`smarts`,
        `lists[g][i]`).
        """
        from lyceum_apex.assembly import split_reaction, synthon_of

        halves = split_reaction(smarts)
        if len(lists) != len(halves):
            raise FieldError("lists", f"{len(lists)} reagent lists given; the reaction has {len(halves)} reactants")
        for g, reagents in enumerate(lists):
            if not reagents:
                raise FieldError(f"lists[{g}]", "empty; an R-group needs at least one reagent")
        rows = [
            (reaction_id, g + 1, f"R{g + 1}-{i}", synthon_of(half, reagent, f"lists[{g}][{i}]"))
            for g, (half, reagents) in enumerate(zip(halves, lists))
            for i, reagent in enumerate(reagents)
        ]
        return cls.from_rows(rows, {reaction_id: smarts})

    @classmethod
    def from_brics(cls, smiles: Sequence[str], n_max: int, seed: int) -> Self:
        """Cut at most `n_max` of the molecules into BRICS fragments and recombine them: see `lyceum_apex.brics`."""
        from lyceum_apex.brics import fragment, recombine

        return cls.from_rows(recombine(fragment(smiles, n_max, seed)), None)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[tuple[str, int, str, str]],
        smarts: Mapping[str, str] | None,
        columns: Mapping[str, Sequence[float]] | None = None,
    ) -> Self:
        """Check rows (reaction id, R-group from 1, synthon id, SMILES) and number them; `columns` has one number a row.

        Reactions are in the order of `smarts`, or of first appearance; synthons in the order of the rows. An id that
        an R-group repeats with other SMILES gets `#2`, `#3`, ... so that product names stay unique; a row repeated as
        a whole is an error.
        """
        groups: dict[str, dict[int, _RGroup]] = {reaction: {} for reaction in smarts or ()}
        distinct: dict[str, int] = {}
        joints: list[Attachments] = []
        for i, (reaction, number, synthon_id, smiles) in enumerate(rows):
            where = f"synthons[{i}]"
            for column, text in (("reaction_id", reaction), ("synthon_id", synthon_id)):
                if not text or _SEPARATOR in text or not text.isprintable():
                    raise FieldError(
                        f"{where}.{column}", f"{text!r} given; an id is printable, not empty and without '{_SEPARATOR}'"
                    )
            if not smiles.isprintable():  # RDKit lets a name with a line's end follow; our file separates by it
                raise FieldError(f"{where}.smiles", f"{smiles!r} given; a SMILES has no control characters")
            if reaction not in groups:
                if smarts is not None:
                    raise FieldError(f"{where}.reaction_id", f"{reaction!r} is not among the reactions")
                groups[reaction] = {}
            if not 1 <= number <= MAX_RGROUPS:
                raise FieldError(
                    f"{where}.rgroup", f"{number} given; a reaction has 2 to {MAX_RGROUPS} R-groups, numbered from 1"
                )
            key = distinct.setdefault(smiles, len(distinct))
            if key == len(joints):
                joints.append(attachments(parse_synthon(smiles, f"{where}.smiles"), f"{where}.smiles"))
            group = groups[reaction].setdefault(number, _RGroup(joints[key]))
            if joints[key] != group.joints:
                raise FieldError(
                    f"{where}.smiles",
                    f"{smiles!r} has joints {describe(joints[key])}, "
                    f"R-group {number} of reaction {reaction!r} has {describe(group.joints)}",
                )
            group.add(synthon_id, key, i)
        if not groups:
            raise FieldError("synthons", "no rows; a library needs at least one reaction")
        for k, (reaction, by_number) in enumerate(groups.items()):
            _check_reaction(f"reactions[{k}]", reaction, by_number)
        ordered = {reaction: [by_number[g] for g in sorted(by_number)] for reaction, by_number in groups.items()}
        legs = [group for row in ordered.values() for group in row]
        library = cls(
            reaction_ids=tuple(ordered),
            smarts=tuple((smarts or {}).get(reaction, "") for reaction in ordered),
            sizes=[[len(group.smiles) for group in row] for row in ordered.values()],
            smiles=tuple(distinct),
            leg_smiles=np.array([key for group in legs for key in group.smiles], np.int32),
            synthon_ids=tuple(name for group in legs for name in group.ids),
        )
        order = [row for group in legs for row in group.rows]
        for name, numbers in (columns or {}).items():
            values = np.asarray(numbers, np.float64)
            for row in np.flatnonzero(~(np.abs(values) <= MAX_MAGNITUDE)):
                limits = f"a number is finite and at most {MAX_MAGNITUDE:g} in size"
                raise FieldError(f"synthons[{row}].{name}", f"{values[row]} given; {limits}")
            library = library.with_columns(name, values[order])
        return library


class _RGroup:
    """The synthons of one R-group while a library is read."""

    def __init__(self, joints: Attachments) -> None:
        self.joints = joints
        self.ids: dict[str, None] = {}
        self.smiles: list[int] = []
        self.rows: list[int] = []
        self._seen: set[tuple[str, int]] = set()

    def add(self, synthon_id: str, key: int, row: int) -> None:
        if (synthon_id, key) in self._seen:
            raise FieldError(f"synthons[{row}]", f"synthon {synthon_id!r} is repeated in its R-group; list it once")
        self._seen.add((synthon_id, key))
        self.rows.append(row)
        name, copy = synthon_id, 1
        while name in self.ids:
            copy += 1
            name = f"{synthon_id}#{copy}"
        self.ids[name] = None
        self.smiles.append(key)


def _check_reaction(where: str, reaction: str, groups: Mapping[int, _RGroup]) -> None:
    """2 to 4 R-groups without a gap, every metal in exactly two of them with one bond order, all R-groups joined."""
    for number in range(1, max(groups, default=0) + 1):
        if number not in groups:
            raise FieldError(f"{where}.rgroups[{number}]", f"R-group {number} of reaction {reaction!r} is empty")
    if len(groups) < 2:
        raise FieldError(where, f"reaction {reaction!r} has {len(groups)} R-groups; 2 to {MAX_RGROUPS} are accepted")
    ends: dict[str, list[tuple[int, str]]] = {}
    for number, group in groups.items():
        for metal, order in group.joints:
            ends.setdefault(metal, []).append((number, order))
    joined = {1}
    for _ in groups:
        joined |= {number for pair in ends.values() if joined & {n for n, _ in pair} for number, _ in pair}
    for metal, pair in ends.items():
        if len(pair) != 2 or pair[0][1] != pair[1][1]:
            text = "; ".join(f"R-group {number} {order.lower()}" for number, order in pair)
            raise FieldError(
                where, f"reaction {reaction!r}: {metal} must occur in two R-groups with one bond order, found {text}"
            )
    if joined != set(groups):
        raise FieldError(
            where, f"reaction {reaction!r}: R-groups {sorted(set(groups) - joined)} are not joined to R-group 1"
        )


def _molecular_weight(molecule: Molecule) -> float:
    from rdkit.Chem import Descriptors

    return float(Descriptors.MolWt(molecule))  # type: ignore[attr-defined]  # defined when RDKit is imported


def _smarts_of(ids: Sequence[str], smarts: Sequence[str]) -> dict[str, str]:
    """SMARTS by reaction id. Raises FieldError (`reactions[i].reaction_id`) for an id that comes twice."""
    found: dict[str, str] = {}
    for i, (reaction, text) in enumerate(zip(ids, smarts)):
        if reaction in found:
            raise FieldError(f"reactions[{i}].reaction_id", f"{reaction!r} is repeated; list each reaction once")
        found[reaction] = text
    return found


def _read_tsv(path: Path, table: str, names: Sequence[str]) -> list[list[str]]:
    import csv

    columns: list[list[str]] = [[] for _ in names]
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            header = next(reader, [])
            places = []
            for name in names:
                if name not in header:
                    known = ", ".join(header) or "no header"
                    raise FieldError(f"{table}.{name}", f"no such column; the file has {known}")
                places.append(header.index(name))
            for i, row in enumerate(reader):
                if len(row) != len(header):
                    raise FieldError(f"{table}[{i}]", f"{len(row)} columns, the header has {len(header)}")
                for column, place in zip(columns, places):
                    column.append(row[place])
    except UnicodeDecodeError as error:
        raise FieldError(table, "is not UTF-8 text") from error
    except csv.Error as error:
        raise FieldError(table, f"is not tab-separated text: {error}") from error
    return columns


def _number(text: str, row: int, name: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise FieldError(f"synthons[{row}].{name}", f"{text!r} is not a number") from error


def _read_parquet(path: Path, table: str, names: Sequence[str]) -> list[list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise FieldError(table, "not a Parquet file") from error
    if metadata.num_rows > MAX_ROWS:
        raise FieldError(table, f"{metadata.num_rows} rows given; at most {MAX_ROWS} are read")
    for name in names:
        if name not in schema.names:
            raise FieldError(f"{table}.{name}", f"no such column; the table has {', '.join(schema.names) or 'none'}")
        if schema.names.count(name) > 1:
            raise FieldError(f"{table}.{name}", "several columns have this name")
    try:
        data = pq.read_table(path, columns=list(dict.fromkeys(names)))
        data.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise FieldError(table, "a damaged Parquet file") from error
    columns = []
    for name in names:
        texts = ("reaction_id", "synthon_id", "smiles", "smarts")
        target = pa.int64() if name == "rgroup" else pa.string() if name in texts else pa.float64()
        try:
            column = data[name].cast(target)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise FieldError(f"{table}.{name}", f"type {data[name].type} given, {target} expected") from error
        if column.null_count:
            raise FieldError(f"{table}[{column.is_null().to_pylist().index(True)}].{name}", "null")
        columns.append(column.to_pylist())
    return columns
