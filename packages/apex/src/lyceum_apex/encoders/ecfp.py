"""Morgan count fingerprint, log1p, two-layer perceptron: about 20 times faster on a CPU than the message-passing
network.

Fingerprint: Rogers, Hahn, "Extended-connectivity fingerprints", J. Chem. Inf. Model. 50 (2010) 742; radius 2, folded
    to 2,048 counts.
"""

import torch
from torch import nn
from torch.nn import functional

from lyceum_apex.encoders.base import WIDTH, Encoder
from lyceum_apex.features import BITS, Features

HIDDEN = 256
TYPICAL_BITS = 50  # that a drug-like molecule sets; the fan-in that the first layer sees


class EcfpEncoder(Encoder):
    """2048 -> 256 -> 64 on log(1 + count). A molecule sets some 50 of the 2,048 counts, so the first layer is a
    sparse sum."""

    name = "ecfp"

    def __init__(self) -> None:
        super().__init__()
        self.input = _SparseLinear()
        self.output = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, features: Features) -> torch.Tensor:
        output: torch.Tensor = self.output(torch.relu(self.input(features)))
        return output


class _SparseLinear(nn.Module):
    """A linear layer on sparse counts: a weighted sum of rows of its matrix, which is stored [in, out] for that."""

    def __init__(self) -> None:
        super().__init__()
        self.fan_in = float(TYPICAL_BITS)
        self.weight = nn.Parameter(torch.empty(BITS, HIDDEN))
        self.bias = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, features: Features) -> torch.Tensor:
        rows = functional.embedding_bag(
            torch.from_numpy(features.arrays["bit"]).long(),
            self.weight,
            torch.from_numpy(features.offsets["bit"][:-1]),
            per_sample_weights=torch.from_numpy(features.arrays["count"]),
            mode="sum",
        )
        return rows + self.bias
