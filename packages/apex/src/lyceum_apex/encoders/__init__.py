"""Networks from molecules to vectors: molecules are featurised once into arrays, then batches are cut out of these."""

from collections.abc import Sequence

from lyceum_apex.assembly import join_many
from lyceum_apex.encoders.base import WIDTH, Encoder, Features, initialise, read
from lyceum_apex.encoders.ecfp import EcfpEncoder
from lyceum_apex.encoders.mpnn import MpnnEncoder
from lyceum_apex.errors import FieldError
from lyceum_apex.library import ProductBatch, SynthonLibrary

__all__ = ["WIDTH", "Encoder", "Features", "featurise", "featurise_products", "initialise", "make_encoder"]

_ENCODERS: dict[str, type[Encoder]] = {"ecfp": EcfpEncoder, "mpnn": MpnnEncoder}
_CHUNK = 1024


def make_encoder(name: str) -> Encoder:
    """A new encoder without its weights set. Raises FieldError on `encoder`."""
    if name not in _ENCODERS:
        raise FieldError("encoder", f"{name!r} given; accepted: {', '.join(_ENCODERS)}")
    return _ENCODERS[name]()


def featurise(encoder: Encoder, smiles: Sequence[str], first: int = 0) -> Features:
    """Features of molecules, in chunks that run wherever `joblib.parallel_config` says.

    Raises FieldError on `smiles[first + i]`.
    """
    from joblib import Parallel, delayed

    starts = range(0, max(len(smiles), 1), _CHUNK)
    return Features.concatenate(
        Parallel()(delayed(_chunk)(encoder.name, list(smiles[i : i + _CHUNK]), i) for i in starts)
    )


def featurise_products(encoder: Encoder, library: SynthonLibrary, batch: ProductBatch) -> Features:
    """Features of products of a library, without writing their SMILES. Raises AssemblyError."""
    from joblib import Parallel, delayed

    parts = library.synthon_smiles(batch)
    starts = range(0, max(len(parts), 1), _CHUNK)
    return Features.concatenate(
        Parallel()(delayed(_product_chunk)(encoder.name, parts[i : i + _CHUNK]) for i in starts)
    )


def _product_chunk(name: str, products: list[list[str]]) -> Features:
    return _ENCODERS[name].featurise(list(join_many(products)))


def _chunk(name: str, smiles: list[str], first: int) -> Features:
    return _ENCODERS[name].featurise(read(smiles, first))
