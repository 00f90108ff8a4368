"""How a call on the CPU reads its weights: dtype, orientation, and the copies it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...problem import FfnArgs
from . import gemm
from .csr import PIECE_ROWS, RowPattern

# bf16 on a CPU without bf16 units, same product, native against cast-to-fp32-and-multiply:
# M 8: 3.7 / 4.4 ms; 64: 29 / 7; 512: 237 / 39.
_UPCAST_MIN_TOKENS = 16

# From here on, one full copy of a weight (cast or transposed) beats gathering rows per chunk.
_FULL_COPY_MIN_TOKENS = 256


class CpuSite(NamedTuple):
    """Everything that decides a path's speed on this CPU, except the activations.

    neuron_major_down: whether each neuron's down weights lie together.
    """

    tokens: int
    hidden: int
    neurons: int
    dtype: torch.dtype
    gated: bool
    neuron_major_down: bool
    threads: int

    @property
    def low_precision(self) -> bool:
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def native_16_bit(self) -> bool:
        return self.low_precision and gemm.has_native_gemm(self.dtype)

    @property
    def upcast(self) -> bool:
        """Whether whole projections run in float32 although the operands are narrower."""
        return self.low_precision and not self.native_16_bit and self.tokens >= _UPCAST_MIN_TOKENS

    @property
    def projection_dtype(self) -> torch.dtype:
        """The dtype of activations: the operands' own unless projections are upcast."""
        return torch.float32 if self.upcast else self.dtype


def site_of(args: FfnArgs) -> CpuSite:
    return CpuSite(
        tokens=args.x.shape[0],
        hidden=args.up.shape[1],
        neurons=args.up.shape[0],
        dtype=args.x.dtype,
        gated=args.gate is not None,
        neuron_major_down=args.down.mT.is_contiguous(),
        threads=torch.get_num_threads(),
    )


class WeightViews:
    """The weights of one call, in the forms its chunks ask for; copies are made once, when needed.

    tuned:       products may take the form that is fastest on this machine; a named path does not, so that
                 its results depend on torch alone.
    wide_dtype:  what the row and block paths compute in; float32 for bf16 and fp16 inputs. Whole projections
                 return it too, except for a few 16-bit tokens, where casts would cost more than they bring
                 and the input's dtype stays, as in stock PyTorch.
    """

    def __init__(self, args: FfnArgs, *, tuned: bool) -> None:
        self._args = args
        self._tuned = tuned
        self._copies: dict[str, Tensor] = {}
        self.x = args.x
        self.gated = args.gate is not None
        self.wide_dtype = torch.promote_types(args.x.dtype, torch.float32)
        self.site = site_of(args)

    # Projections of whole chunks.

    def activate_selector(self, x: Tensor) -> Tensor:
        args = self._args
        pre = self._project("selector", x, args.selector, args.selector_bias)
        return args.activation.apply_(pre)

    def project_up(self, x: Tensor) -> Tensor:
        """What multiplies the activation of the gate."""
        args = self._args
        return args.activation.factor_(self._project("up", x, args.up, args.up_bias))

    def project_down(self, hidden: Tensor) -> Tensor:
        """y [m, D_out] of x's dtype, with the bias."""
        down, bias = self._args.down, self._args.down_bias
        if self.site.neuron_major_down and not self.site.upcast and gemm.reads_badly(down):
            return gemm.sum_all_rows(hidden, down, bias)
        return self._project("down", hidden, down, bias).to(self._args.x.dtype)

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.site.low_precision and not self.site.upcast:
            # The bias may cancel most of the sum, so it is added before rounding to 16 bits.
            return linear(x, weight, bias)
        if self.site.upcast:
            weight = self._copy(f"{name}:wide", lambda: weight.to(self.wide_dtype))
        product = gemm.multiply(x.to(weight.dtype), weight, self._tuned)
        return product if bias is None else product.add_(bias)

    # Neuron-major rows [K, D] for the row path, and the column numbers that address them.

    def up_rows(self, pattern: RowPattern) -> tuple[Tensor, Tensor]:
        return self._rows("up:rows", self._args.up, pattern)

    def down_rows(self, pattern: RowPattern) -> tuple[Tensor, Tensor]:
        return self._rows("down:rows", self._args.down.mT, pattern)

    def _rows(self, name: str, rows: Tensor, pattern: RowPattern) -> tuple[Tensor, Tensor]:
        if rows.is_contiguous() and rows.dtype == self.wide_dtype:
            return rows, pattern.columns
        if self.site.tokens >= _FULL_COPY_MIN_TOKENS:
            full = self._copy(name, lambda: rows.to(self.wide_dtype).contiguous())
            return full, pattern.columns
        return rows.index_select(0, pattern.union).to(self.wide_dtype), pattern.union_columns

    # Gathered neuron rows [K, D] for the block path and single tokens.

    def gather_up(self, neurons: Tensor) -> Tensor:
        return self._args.up.index_select(0, neurons)

    def gather_down(self, neurons: Tensor) -> Tensor:
        rows = self._args.down.mT
        if not self.site.neuron_major_down and self.site.tokens >= _FULL_COPY_MIN_TOKENS:
            rows = self._copy("down:major", rows.contiguous)
        return rows.index_select(0, neurons)

    def single_down(self, hidden: Tensor, neurons: Tensor) -> Tensor:
        """[D]: the sum of hidden[i] * down[:, neurons[i]]; hidden [K] in `wide_dtype`."""
        if not self.site.neuron_major_down or self.site.low_precision:
            return torch.mv(self.gather_down(neurons).to(self.wide_dtype).mT, hidden)
        starts = torch.arange(0, max(neurons.numel(), 1), PIECE_ROWS, device="cpu")
        bags, *_ = torch.embedding_bag(self._args.down.mT, neurons, starts, mode=0, per_sample_weights=hidden)
        return bags[0] if starts.numel() == 1 else bags.sum(0)

    def _copy(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._copies:
            self._copies[name] = make()
        return self._copies[name]

    # Biases, and what is done to finished sums.

    def up_factor(self, products: Tensor, neurons: Tensor) -> Tensor:
        """What multiplies the activation of the gate, from x up^T, of these neurons along the last dimension;
        may change `products`."""
        bias = self._args.up_bias
        up = products if bias is None else products + bias.index_select(0, neurons)
        return self._args.activation.factor_(up)

    def finish(self, result: Tensor) -> Tensor:
        """`result`, in `wide_dtype`, plus the down bias, in the dtype of x."""
        bias = self._args.down_bias
        return (result if bias is None else result + bias).to(self._args.x.dtype)
