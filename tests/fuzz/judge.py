"""Whether the outcome of a case is right."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Case
from .rounding import Block, Margins
from .run import Outcome, final_operands, run_oracle, run_stock, run_twell
from .tensors import make_operands

_TIMES_STOCK = 2.0  # as in tests/accuracy.py
_ROW_TIMES_STOCK, _ROW_SPREADS = 3.0, 8.0  # of single rows, of which there are many and of few numbers
_SPREADS = 4.0  # of a whole, by the root of how many errors it is made of
_ORACLE_ROUNDS = 16.0  # times as much in float64, where the oracle rounds as often, and long sums show
# Equal numbers, added one after the other in tiles of 64 to 128, err alike in every tile (H200: 4 units).
_TILE_UNITS = 6.0
_ALONE = 16.0  # spreads, where dense PyTorch has no number to compare with


class StockRefusesError(Exception):
    """PyTorch itself cannot run the case."""


def judge(case: Case) -> tuple[list[str], list[str]]:
    """(what is wrong with it, the paths that ran)."""
    operands = final_operands(case)
    try:
        stock = run_stock(case, operands)
    except (RuntimeError, NotImplementedError) as error:
        raise StockRefusesError(str(error)) from error
    exact = run_oracle(case, operands)
    block = Block(case, operands)
    try:
        ours, ran = run_twell(case, make_operands(case))
    except Exception as error:
        return [f"raised {type(error).__name__}: {str(error)[:300]}"], []
    return _Verdict(case, block).of(ours, stock, exact), ran


class _Verdict:
    def __init__(self, case: Case, block: Block) -> None:
        self.case, self.block = case, block
        self.margins = block.margins()
        self.problems: list[str] = []
        self._found: list[tuple[str, Tensor]] = []  # (what is wrong if it is above 1, how much)

    def of(self, ours: Outcome, stock: Outcome, exact: Outcome) -> list[str]:
        if self._same_kind("y", ours.y, stock.y):
            self._compare("y", ours.y, stock.y, exact.y)
            self._where_dense_has_no_number(ours.y, exact.y)
        if ours.l1 is not None:
            self._compare_l1(ours.l1, stock.l1, stock.l1_of_hidden, exact.l1)
            self._compare_firing(ours, stock, exact)
        for name, gradient in exact.gradients.items():
            mine, theirs = ours.gradients[name], stock.gradients[name]
            if mine is None or theirs is None:
                if mine is not theirs:
                    self.problems.append(f"gradient of {name}: {_kind(mine)}, stock has {_kind(theirs)}")
            elif self._same_kind(f"gradient of {name}", mine, theirs):
                matrices = (_as_matrix(name, t) for t in (mine, theirs, gradient))
                self._compare(name, *matrices)
        self._settle()
        return self.problems

    def _same_kind(self, name: str, ours: Tensor, stock: Tensor) -> bool:
        if (ours.shape, ours.dtype) != (stock.shape, stock.dtype):
            self.problems.append(f"{name}: {_kind(ours)}, stock has {_kind(stock)}")
            return False
        return True

    def _compare(self, name: str, ours: Tensor, stock: Tensor, exact: Tensor) -> None:
        """Where exact and stock have numbers: ours has one, and is as accurate."""
        label = "y" if name == "y" else f"gradient of {name}"
        largest = torch.finfo(ours.dtype).max
        ours, stock = ours.double(), stock.double()
        known = exact.isfinite() & stock.isfinite()
        # Next to the dtype's largest number a rounding decides whether the result is infinite.
        fits = exact.abs() < largest * (1 - 16 * self.block.epsilon)
        lost = known & fits & ~ours.isfinite()
        self._found.append((f"{label}: not finite where dense is", lost.sum() * 2.0))
        known = known & ours.isfinite()
        error = torch.where(known, ours - exact, 0.0)
        theirs = torch.where(known, stock - exact, 0.0)
        scale = torch.where(known, exact, 0.0)
        margins: Margins = self.margins[name]
        rows = margins.spread
        if self.case.compute_dtype == "float64":
            rows = _ORACLE_ROUNDS * rows
        per_row = _norms(error) / (
            _ROW_TIMES_STOCK * _norms(theirs)
            + _ROW_SPREADS * rows
            + margins.slack
            + self._floor(_norms(scale))
        )
        self._found.append(
            (
                f"{label}: a row's error over its bound",
                per_row.nan_to_num(0.0).max(0).values if per_row.numel() else per_row.sum(),
            )
        )
        spread = _SPREADS * rows.square().sum().sqrt()
        if self.case.compute_dtype != "float64":  # whose oracle rounds as well
            alike = _how_many_count(scale) / self.block.copies  # expanded tokens count once
            if (
                name == "x"
                and self.case.loss == "l1"
                and not self.case.gated
                and bool(self.block.active.all())
            ):
                # L1 alone gives every pair the same gradient, so all rows of x's are one and round alike. (In
                # float16 one number lay 1.3e-5 of itself from the middle of two: the sum's order decided.)
                alike = alike / max(self.case.tokens / self.block.copies, 1)
            independent = torch.minimum(self.block.independent_errors.double(), alike)
            spread = spread / independent.clamp_min(1).sqrt()
        bound = _TIMES_STOCK * theirs.norm() + spread + margins.slack.norm() + self._floor(scale.norm())
        self._found.append((f"{label}: error over its bound", (error.norm() / bound).nan_to_num(0.0)))

    def _floor(self, scale: Tensor) -> Tensor:
        wide = self.case.compute_dtype == "float64"
        unit = 8 * torch.finfo(torch.float64).eps if wide else torch.finfo(torch.float32).eps
        if self.case.compute_dtype == "float32" and self.case.device != "cpu":
            unit = _TILE_UNITS * unit
        return unit * scale + 2 * self.block.least**0.5

    def _where_dense_has_no_number(self, ours: Tensor, exact: Tensor) -> None:
        """A NaN or Inf that meets an active neuron arrives; one that meets others only may be skipped."""
        if not self.case.specials:
            return
        reached = self.block.must_not_be_finite()
        lost = (reached & ours.isfinite() & ~self.block.near.any(1, keepdim=True)).sum()
        self._found.append(("y: finite where an active neuron has a NaN or Inf", lost * 2.0))
        skipped = ~exact.isfinite() & ~reached & ours.isfinite()
        values = self.block.results()["y"]
        error = torch.where(skipped, ours.double() - values, 0.0)
        rows = _ALONE * self.margins["y"].spread + self.margins["y"].slack + self._floor(_norms(values))
        ratio = (_norms(error) / rows).nan_to_num(0.0)
        self._found.append(
            (
                "y: beside skipped neurons, error over its bound",
                ratio.sum() if not ratio.numel() else ratio.max(),
            )
        )

    def _compare_l1(self, ours: Tensor, stock: Tensor, unlucky: Tensor, exact: Tensor) -> None:
        if (ours.shape, ours.dtype) != (stock.shape, stock.dtype):
            self.problems.append(f"l1: {_kind(ours)}, stock has {_kind(stock)}")
            return
        known = exact.isfinite() & stock.isfinite()
        # Stock may be lucky in adding up; what its hidden values lost is there all the same.
        theirs = torch.maximum((stock.double() - exact).abs(), (unlucky - exact).abs())
        # Squares of few bits often lie halfway between two numbers: even the best rounding is biased then.
        theirs = torch.maximum(theirs, (self.block.rounded_l1() - exact).abs())
        error = (ours.double() - exact).abs()
        margins = self.margins["l1"]
        bound = _TIMES_STOCK * theirs + _ROW_SPREADS * margins.spread[0] + margins.slack[0]
        bound = bound + 2 * self._floor(exact.abs())  # a sum of what is never negative rounds its total
        ratio = torch.where(ours.isfinite(), error / bound, 2.0)
        self._found.append(("l1: error over its bound", torch.where(known, ratio, 0.0).nan_to_num(0.0)))

    def _compare_firing(self, ours: Outcome, stock: Outcome, exact: Outcome) -> None:
        """Counts agree but for pairs next to the threshold, or are stock's, whose sums may be coarser."""
        if ours.firing.dtype != torch.int64 or ours.firing.shape != exact.firing.shape:
            self.problems.append(f"firing: {_kind(ours.firing)}, expected {_kind(exact.firing)}")
            return
        apart = (ours.firing - exact.firing).abs() - self.block.near.sum(0)
        apart = torch.minimum(apart, (ours.firing - stock.firing).abs())
        self._found.append(("firing: counts differ", apart.clamp_min(0).sum() * 2.0))
        l0 = ours.firing.sum().to(ours.l0.dtype) / max(self.case.tokens, 1)
        self._found.append(("l0: not the mean of firing", (ours.l0 - l0).abs() * 2e6 / l0.clamp_min(1)))

    def _settle(self) -> None:
        """One look at the device for all that was found."""
        values = torch.stack([value.double().reshape(()) for _, value in self._found]).tolist()
        for (name, _), value in zip(self._found, values, strict=True):
            if value > 1:
                self.problems.append(f"{name}: {value:.3g}")


def _as_matrix(name: str, gradient: Tensor) -> Tensor:
    """Rows as `rounding` has them: of down, by output; of x, by token; of a bias, by entry."""
    if name == "x":
        return gradient.flatten(0, -2) if gradient.dim() > 1 else gradient.unsqueeze(0)
    return gradient.unsqueeze(1) if gradient.dim() == 1 else gradient


def _how_many_count(values: Tensor) -> Tensor:
    """Over how many numbers a norm is spread: all of them if they are alike, one if it dwarfs the rest."""
    squares = values.square()
    return (squares.sum().square() / squares.square().sum()).nan_to_num(1.0, 1.0, 1.0)


def _norms(matrix: Tensor) -> Tensor:
    return matrix.square().sum(-1).sqrt()


def _kind(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
