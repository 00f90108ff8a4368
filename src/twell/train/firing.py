"""Which neurons fire, over all processes: exact counts, at the price of one reduction per optimiser step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import reject
from .processes import sum_over_all


class FiringTracker:
    """Counts of every layer's neurons since the last report, and for how many tokens each has been silent.

    Layers lie one after the other in flat tensors [N], N the neurons of all layers. Nothing waits for the
    device until something is asked for.
    """

    def __init__(self, layer_sizes: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.layer_sizes = tuple(layer_sizes)
        neurons = sum(self.layer_sizes)
        # The last entry counts tokens, so that one reduction brings both.
        self._step = torch.zeros(neurons + 1, dtype=torch.int64, device=device)
        self._window = torch.zeros(neurons + 1, dtype=torch.int64, device=device)
        self.silent = torch.zeros(neurons, dtype=torch.int64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)  # tokens since the first step

    def add(self, firing: Sequence[Tensor], tokens: int) -> None:
        """Counts of one micro-batch on this process: int64 [H] per layer."""
        sizes = tuple(counts.numel() for counts in firing)
        if sizes != self.layer_sizes:
            reject("firing", f"layers of {sizes}", f"layers of {self.layer_sizes}")
        self._step[:-1] += torch.cat([counts.detach() for counts in firing])
        self._step[-1] += tokens

    def finish_step(self) -> None:
        """End of an optimiser step, on every process."""
        sum_over_all(self._step)
        fired, tokens = self._step[:-1] > 0, self._step[-1]
        self.silent = torch.where(fired, 0, self.silent + tokens)
        self._seen += tokens
        self._window += self._step
        self._step.zero_()

    def active_per_token(self, reset: bool = True) -> list[float] | None:
        """Mean active neurons per token of every layer since the last reset; None without any token."""
        sums = [part.sum() for part in self._window[:-1].split(self.layer_sizes)]
        totals = torch.stack([*sums, self._window[-1]]).tolist()
        if reset:
            self._window.zero_()
        return [total / totals[-1] for total in totals[:-1]] if totals[-1] else None

    def dead(self, after: int) -> list[Tensor]:
        """bool [H] per layer: neurons that have been silent for at least `after` tokens."""
        return list((self.silent >= after).split(self.layer_sizes))

    def dead_shares(self, after: int | None = None) -> tuple[list[float], int]:
        """Of every layer the share of neurons that have not fired in the last tokens, and how many those are:
        `after`, or all while there have not been as many."""
        window = self._seen if after is None else self._seen.clamp(max=after)
        silent = (self.silent >= window) & (window > 0)
        shares = [part.double().mean() for part in silent.split(self.layer_sizes)]
        *shares, tokens = torch.stack([*shares, window.double()]).tolist()
        return shares, int(tokens)

    def revived(self, layer: int, neurons: Tensor) -> None:
        """Neurons (indices) of a layer that start anew."""
        self.silent.split(self.layer_sizes)[layer][neurons] = 0

    def state_dict(self) -> dict[str, Tensor]:
        """The same on every process, after `finish_step`."""
        return {"silent": self.silent.cpu(), "window": self._window.cpu(), "seen": self._seen.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state["silent"].shape != self.silent.shape:
            reject("firing state", f"{state['silent'].numel()} neurons", f"{self.silent.numel()} neurons")
        self.silent.copy_(state["silent"])
        self._window.copy_(state["window"])
        # Checkpoints of earlier versions do not say; who has been silent longest knows best.
        self._seen.copy_(state["seen"] if "seen" in state else state["silent"].max())
