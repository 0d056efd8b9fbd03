"""Networks from molecules, featurised as in `lyceum_apex.features`, to vectors."""

from lyceum_apex.encoders.base import WIDTH, Encoder, initialise
from lyceum_apex.encoders.ecfp import EcfpEncoder
from lyceum_apex.encoders.mpnn import MpnnEncoder
from lyceum_apex.errors import FieldError

__all__ = ["WIDTH", "Encoder", "initialise", "make_encoder"]

_ENCODERS: dict[str, type[Encoder]] = {"ecfp": EcfpEncoder, "mpnn": MpnnEncoder}


def make_encoder(name: str) -> Encoder:
    """A new encoder without its weights set. Raises FieldError on `encoder`."""
    if name not in _ENCODERS:
        raise FieldError("encoder", f"{name!r} given; accepted: {', '.join(_ENCODERS)}")
    return _ENCODERS[name]()
