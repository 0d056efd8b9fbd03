"""What every core may rely on: checkpoints, keyed random streams, fingerprints, intervals. No gRPC, fast to import."""

from lyceum_base.checkpoint import (
    Checkpoint,
    ShouldStop,
    State,
    Stopped,
    decode_state,
    encode_state,
    run_to_end,
)
from lyceum_base.fingerprint import canonical_json, sha256_arrays, sha256_file, sha256_json
from lyceum_base.stats import (
    Interval,
    binomial_interval,
    bootstrap,
    clopper_pearson,
    conformal_quantile,
    paired_bootstrap,
)
from lyceum_base.streams import Streams

__all__ = [
    "Checkpoint",
    "Interval",
    "ShouldStop",
    "State",
    "Stopped",
    "Streams",
    "binomial_interval",
    "bootstrap",
    "canonical_json",
    "clopper_pearson",
    "conformal_quantile",
    "decode_state",
    "encode_state",
    "paired_bootstrap",
    "run_to_end",
    "sha256_arrays",
    "sha256_file",
    "sha256_json",
]
