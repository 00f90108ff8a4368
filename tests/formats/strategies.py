"""Hypothesis strategies for activation matrices."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from .cases import DTYPES, LAYOUTS, PATTERNS, VALUES, MatrixCase, build_case

small_dims = st.one_of(st.sampled_from([0, 1, 2, 3, 5, 7, 13, 31]), st.integers(0, 48))


@st.composite
def matrices(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    rows: st.SearchStrategy[int] = small_dims,
    columns: st.SearchStrategy[int] = small_dims,
) -> MatrixCase:
    """Matrices of every kind that `cases` knows, half of them requiring grad."""
    case = build_case(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        (draw(rows), draw(columns)),
        draw(st.sampled_from(dtypes)),
        pattern=draw(st.sampled_from(PATTERNS)),
        values=draw(st.sampled_from(VALUES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        negative_zeros=draw(st.booleans()),
    )
    case.dense.requires_grad_(draw(st.booleans()))
    return case
