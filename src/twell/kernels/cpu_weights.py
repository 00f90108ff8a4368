"""How the CPU backend multiplies and gathers weights: dtype, orientation and memory layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from .args import FfnArgs
from .cpu_choice import row_wins, sparse_can_pay
from .csr import RowPattern

# fp32, [M, 1024] x [1024, 4096], 2 Zen 3 cores: x @ W^T against (W @ x^T)^T
# M 2: 1.4 / 1.0 ms; 4: 2.1 / 0.7; 8: 2.3 / 1.8; 16: 2.8 / 1.5; 32: 4.1 / 3.1; 64: 5.9 / 4.1.
_FEW_TOKENS = range(2, 65)

# oneDNN's matrix-vector product, which torch registers for its own compiler but does not call for
# eager fp32: [1, 1024] x [1024, 4096] with cold weights 0.79 ms, F.linear (MKL) 1.10 ms.
_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

# bf16 on a CPU without bf16 units, same product, native against cast-to-fp32-and-multiply:
# M 8: 3.7 / 4.4 ms; 64: 29 / 7; 512: 237 / 39.
_UPCAST_MIN_TOKENS = 16

# Tokens from which one full copy of a weight (cast or transposed) beats gathering per chunk.
_FULL_COPY_MIN_TOKENS = 256

_ONE_BAG = torch.zeros(1, dtype=torch.int64)


class WeightViews:
    """The weights of one call, in the forms its chunks ask for; copies are made once, when needed.

    wide_dtype: what the row and block paths compute in; float32 for bf16 and fp16 inputs. Whole
    projections return wide_dtype too, except for a few 16-bit tokens, where casts would cost more than
    they bring and the input's dtype is kept as stock PyTorch keeps it.
    """

    def __init__(self, args: FfnArgs) -> None:
        self._args = args
        self._tokens = args.x.shape[0]
        self._copies: dict[str, Tensor] = {}
        self.gated = args.gate is not None
        self.wide_dtype = torch.promote_types(args.x.dtype, torch.float32)
        self._low_precision = self.wide_dtype != args.x.dtype
        self._upcast = (
            self._low_precision and self._tokens >= _UPCAST_MIN_TOKENS and not _has_native_gemm(args.x.dtype)
        )
        self._neuron_major_down = args.down.mT.is_contiguous()

    def sparse_can_pay(self) -> bool:
        """Whether this call is large enough for any sparse path to beat the dense finish."""
        neurons, hidden = self._args.up.shape
        return sparse_can_pay(
            self._tokens,
            hidden,
            neurons,
            itemsize=self._args.x.dtype.itemsize,
            gated=self.gated,
            threads=torch.get_num_threads(),
        )

    def row_wins(self, tokens: int, density: float) -> bool:
        """Whether the row path is expected to beat the dense finish with these weights."""
        return row_wins(
            tokens,
            density,
            low_precision=self._low_precision,
            cheap_down_rows=self._neuron_major_down or self._tokens >= _FULL_COPY_MIN_TOKENS,
        )

    # Projections of whole chunks.

    def activate_selector(self, x: Tensor) -> Tensor:
        args = self._args
        pre = self._project("selector", x, args.selector, args.selector_bias)
        return args.activation.apply_(pre)

    def project_up(self, x: Tensor) -> Tensor:
        return self._project("up", x, self._args.up, self._args.up_bias)

    def project_down(self, hidden: Tensor) -> Tensor:
        """Without the bias, which `finish` adds on every path."""
        if self._low_precision and self._neuron_major_down and not self._upcast:
            return self._sum_all_rows(hidden)
        return self._project("down", hidden, self._args.down, None)

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._upcast:
            weight = self._copy(f"{name}:wide", lambda: weight.to(self.wide_dtype))
        product = _multiply(x.to(weight.dtype), weight)
        return product if bias is None else product.add_(bias)

    def _sum_all_rows(self, hidden: Tensor) -> Tensor:
        """hidden @ down^T over neuron-major rows, which no 16-bit CPU matrix product reads well.

        bf16, H 4096, D 1024, weights in cache: 1 token 0.45 ms here, 12.4 as a matrix product (0.44
        with down stored row-major); 8 tokens 1.6 / 106 (3.2).
        """
        tokens, neurons = hidden.shape
        # Bags are what runs in parallel: cut the sums of very few tokens into parts. Cold weights,
        # 1 token: 1 part 0.86 ms, 2 0.54, 4 0.49, 8 0.42; 2 tokens: 1.04, 0.97, 1.08, 0.82.
        parts = 8 if tokens < 4 and neurons else 1
        rows, starts = _all_rows(tokens, neurons, parts)
        scale = hidden.to(self._args.down.dtype).view(-1)
        bags, *_ = torch.embedding_bag(self._args.down.mT, rows, starts, mode=0, per_sample_weights=scale)
        return bags if parts == 1 else bags.view(tokens, parts, -1).sum(dim=1)

    # Neuron-major rows [K, D] for the row path, with the column numbers that address them.

    def up_rows(self, pattern: RowPattern) -> tuple[Tensor, Tensor]:
        return self._rows("up:rows", self._args.up, pattern)

    def down_rows(self, pattern: RowPattern) -> tuple[Tensor, Tensor]:
        return self._rows("down:rows", self._args.down.mT, pattern)

    def _rows(self, name: str, rows: Tensor, pattern: RowPattern) -> tuple[Tensor, Tensor]:
        if rows.is_contiguous() and rows.dtype == self.wide_dtype:
            return rows, pattern.columns
        if self._tokens >= _FULL_COPY_MIN_TOKENS:
            full = self._copy(name, lambda: rows.to(self.wide_dtype).contiguous())
            return full, pattern.columns
        return self._gather(rows, pattern.union).to(self.wide_dtype), pattern.union_columns

    # Gathered neuron rows [K, D] for the block path and single tokens.

    def gather_up(self, neurons: Tensor) -> Tensor:
        return self._gather(self._args.up, neurons)

    def gather_down(self, neurons: Tensor) -> Tensor:
        rows = self._args.down.mT
        if not self._neuron_major_down and self._tokens >= _FULL_COPY_MIN_TOKENS:
            rows = self._copy("down:major", rows.contiguous)
        return self._gather(rows, neurons)

    def _gather(self, rows: Tensor, neurons: Tensor) -> Tensor:
        return rows.index_select(0, neurons)

    def single_down(self, hidden: Tensor, neurons: Tensor) -> Tensor:
        """[D]: the sum of hidden[i] * down[:, neurons[i]]; hidden [K] in the weight's dtype."""
        if not self._neuron_major_down:
            return torch.mv(self.gather_down(neurons).mT, hidden)
        bags, *_ = torch.embedding_bag(
            self._args.down.mT, neurons, _ONE_BAG, mode=0, per_sample_weights=hidden
        )
        return bags[0]

    def _copy(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._copies:
            self._copies[name] = make()
        return self._copies[name]

    # Biases.

    def add_up_bias(self, values: Tensor, neurons: Tensor) -> Tensor:
        """Add up_bias[neurons] along the last dimension."""
        bias = self._args.up_bias
        return values if bias is None else values + bias.index_select(0, neurons)

    def finish(self, result: Tensor) -> Tensor:
        """`result` plus the down bias, in the dtype of x."""
        bias = self._args.down_bias
        return (result if bias is None else result + bias).to(self._args.x.dtype)


@lru_cache(maxsize=16)
def _all_rows(tokens: int, neurons: int, parts: int) -> tuple[Tensor, Tensor]:
    """Indices and bag starts that sum every row for every token, each sum cut into `parts` bags."""
    starts = torch.arange(tokens * parts) * neurons // parts
    return torch.arange(neurons).repeat(tokens), starts


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T in the fastest form that this torch has for the shape; always a new tensor."""
    if weight.dtype == torch.float32 and weight.is_contiguous():
        if x.shape[0] == 1 and _ONEDNN_LINEAR is not None and torch.backends.mkldnn.is_available():
            return _ONEDNN_LINEAR(x, weight, None, "none", [], "")
        if x.shape[0] in _FEW_TOKENS:
            return torch.mm(weight, x.mT).mT.contiguous()
    return linear(x, weight)


def _has_native_gemm(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` matrices in hardware."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()
