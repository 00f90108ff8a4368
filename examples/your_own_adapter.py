"""Describe a feed-forward block whose code `twell.sparsify_` does not understand.

This one keeps its projections in a dictionary and multiplies with their weights itself, so the search finds
no call of an `nn.Linear`. An adapter names the projections; `sparsify_` compares the description with the
module's own forward before it takes it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import twell


class HandMade(nn.Module):
    def __init__(self, hidden: int, neurons: int) -> None:
        super().__init__()
        self.weights = nn.ModuleDict(
            {
                "select": nn.Linear(hidden, neurons),
                "lift": nn.Linear(hidden, neurons, bias=False),
                "lower": nn.Linear(neurons, hidden, bias=False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        select = self.weights["select"]
        gate = linear(x, select.weight, select.bias).relu()
        return linear(gate * linear(x, self.weights["lift"].weight), self.weights["lower"].weight)


@twell.register_adapter(HandMade)
def describe(module: HandMade) -> twell.BlockDescription:
    return twell.BlockDescription(
        gate="weights.select", up="weights.lift", down="weights.lower", activation="relu"
    )


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(HandMade(256, 1024), nn.LayerNorm(256), HandMade(256, 1024))
    model.eval().requires_grad_(False)
    x = torch.randn(64, 256)
    wanted = model(x)
    print(twell.sparsify_(model, plan=twell.Plan(path="row")))
    difference = (model(x) - wanted).abs().max().item()
    print(f"outputs differ by {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
