"""What both encoders share: their interface and their initial weights."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from lyceum_apex.features import Features
from lyceum_base import Streams

WIDTH = 64
"""d and H: size of product embeddings and of synthon features [repo]."""


class Encoder(nn.Module, ABC):
    """From molecules to vectors. Weights are set by `initialise`, never by torch's global generator."""

    name: ClassVar[str]

    @abstractmethod
    def forward(self, features: Features) -> torch.Tensor:
        """Float32 [n, 64]."""


def initialise(module: nn.Module, streams: Streams) -> None:
    """Kaiming-uniform matrices (He et al., arXiv 1502.01852), zero biases, unit LayerNorms.

    A part may carry `fan_in`, the number of inputs that count where most are 0, or infinity to start its map at 0.
    """
    generator = streams.torch_generator("apex.weights")
    with torch.no_grad():
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if isinstance(part, nn.LayerNorm):
                    parameter.fill_(1.0 if name == "weight" else 0.0)
                elif name == "bias":
                    parameter.zero_()
                else:
                    bound = math.sqrt(3.0 / getattr(part, "fan_in", parameter.shape[-1]))
                    parameter.uniform_(-bound, bound, generator=generator)
