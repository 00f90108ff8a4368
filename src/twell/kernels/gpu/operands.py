"""The operands of a call as the kernels read them: contiguous, biases or a stand-in, activation numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...activations import largest_at_most
from ...problem import FfnArgs


@dataclass(frozen=True)
class Operands:
    """x [M, D]; select, up [H, D]; down [H, E], neuron-major; all contiguous. `up` is None if not gated.

    threshold, square: the activation is where(v <= threshold, 0, v), squared if `square`.
    clamp_up: whether it is multiplied by relu(up) instead of up.
    """

    x: Tensor
    select: Tensor
    up: Tensor | None
    down: Tensor
    select_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    threshold: float
    square: bool
    clamp_up: bool

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    @property
    def features(self) -> int:
        return self.x.shape[1]

    @property
    def neurons(self) -> int:
        return self.select.shape[0]

    @property
    def outputs(self) -> int:
        return self.down.shape[1]

    @property
    def plain(self) -> bool:
        """Whether the activation of the selector is relu."""
        return self.threshold == 0 and not self.square

    @property
    def kind(self) -> tuple:
        """All but the number of tokens and the addresses: what decides which compiled kernels run."""
        return (
            self.x.device,
            self.x.dtype,
            self.x.shape[1],
            self.down.shape,
            self.up is None,
            self.threshold,
            self.square,
            self.clamp_up,
            self.select_bias is None,
            self.up_bias is None,
            self.down_bias is None,
        )

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        return self.select, self.up, self.down, self.select_bias, self.up_bias, self.down_bias

    def pointer(self, bias: Tensor | None) -> Tensor:
        """`bias`, or any tensor in its place where a kernel is told that there is none."""
        return self.x if bias is None else bias


def prepare(args: FfnArgs) -> Operands:
    """Copies what is not contiguous and aligned; a neuron-major `down` costs nothing."""
    gated = args.gate is not None
    activation = args.activation
    return Operands(
        x=readable(args.x),
        select=readable(args.selector),
        up=readable(args.up) if gated else None,
        down=readable(args.down.mT),
        select_bias=readable(args.selector_bias),
        up_bias=readable(args.up_bias) if gated else None,
        down_bias=readable(args.down_bias),
        threshold=largest_at_most(activation.threshold, args.x.dtype),
        square=activation.name == "relu2",
        clamp_up=activation.name == "drelu",
    )


def readable(tensor: Tensor | None) -> Tensor | None:
    """Contiguous and 16-byte aligned, as TMA and vector loads need it; of values as they are stored."""
    if tensor is None:
        return None
    tensor = tensor.resolve_neg().contiguous()
    if tensor.dim() == 2 and tensor.stride() != (tensor.shape[1], 1):
        # "Contiguous" lets a dimension of size 1 keep any stride; descriptors do not.
        tensor = tensor.as_strided(tensor.shape, (tensor.shape[1], 1))
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def is_readable(tensor: Tensor | None) -> bool:
    """Whether `readable` gives the tensor itself."""
    return tensor is None or (tensor.is_contiguous() and readable(tensor).data_ptr() == tensor.data_ptr())


STEADY = 7  # tensors of a call that rarely move: `Operands.weights`, and a workspace


def element_bytes(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits // 8
