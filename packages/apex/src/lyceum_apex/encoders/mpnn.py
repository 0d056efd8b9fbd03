"""Edge message-passing network over the Kekulised molecular graph [paper][repo].

Four layers; in each, every directed edge is updated from its ends and itself, every atom from the sum of its incoming
edges, and the sum over atoms is added to the graph vector. All updates are residual with LayerNorm first. Batched
graphs are flat arrays: atoms of all molecules one after another, edges as index pairs, sums by `index_add`.
"""

import numpy as np
import torch
from torch import nn

from lyceum_apex.encoders.base import WIDTH, Encoder
from lyceum_apex.features import CHARGES, DEGREES, ELEMENTS, ORDERS, Features

LAYERS = 4
ATOM_CLASSES = len(ELEMENTS) + 1 + DEGREES + CHARGES


class MpnnEncoder(Encoder):
    """Width 64 throughout, graph vector -> bias-free linear -> 64."""

    name = "mpnn"

    def __init__(self) -> None:
        super().__init__()
        self.atom = nn.Linear(ATOM_CLASSES, WIDTH)
        self.atom.fan_in = 3.0  # type: ignore[assignment]
        self.bond = nn.Linear(ORDERS, WIDTH)
        self.bond.fan_in = 1.0  # type: ignore[assignment]
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, features: Features) -> torch.Tensor:
        atoms = torch.from_numpy(features.arrays["atom"]).long()
        molecules = len(features)
        atom_counts = np.diff(features.offsets["atom"])
        owner = torch.from_numpy(np.repeat(np.arange(molecules), atom_counts))
        bonds = torch.from_numpy(features.arrays["bond"]).long()
        shift = np.repeat(features.offsets["atom"][:-1], np.diff(features.offsets["bond"]))
        begin, end = (bonds[:, i] + torch.from_numpy(shift) for i in (0, 1))
        source, target = torch.cat([begin, end]), torch.cat([end, begin])
        # A one-hot input times a matrix is a choice of columns.
        weight = self.atom.weight.T
        h = weight.index_select(0, atoms[:, 0])
        h = h + weight.index_select(0, atoms[:, 1] + len(ELEMENTS) + 1)
        h = h + weight.index_select(0, atoms[:, 2] + len(ELEMENTS) + 1 + DEGREES) + self.atom.bias
        e = (self.bond.weight.T + self.bond.bias).index_select(0, bonds[:, 2].repeat(2))
        graph = h.new_zeros(molecules, WIDTH)
        for layer in self.layers:
            h, e, graph = layer(h, e, graph, source, target, owner)
        output: torch.Tensor = self.output(graph)
        return output


class _Layer(nn.Module):
    """One round. A linear map of concatenated inputs is written as a sum of maps, so that atoms are mapped once, not
    per edge."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_h, self.norm_e, self.norm_m = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.from_source, self.from_target, self.from_edge, self.edge_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.from_self, self.from_messages, self.node_out, self.graph_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self,
        h: torch.Tensor,
        e: torch.Tensor,
        graph: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        owner: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.norm_h(h)
        ends = self.from_source(n).index_select(0, source) + self.from_target(n).index_select(0, target)
        e = e + self.edge_out(torch.relu(ends + self.from_edge(self.norm_e(e))))
        messages = torch.zeros_like(h).index_add(0, target, e)
        h = h + self.node_out(torch.relu(self.from_self(n) + self.from_messages(self.norm_m(messages))))
        graph = graph.index_add(0, owner, self.graph_out(torch.relu(h)))
        return h, e, graph
