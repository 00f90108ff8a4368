"""What a token passes around its feed-forward blocks when text is generated: norms, products, attention.

Every kernel is launched while the one before still runs (on GPUs that can), and waits only for what it needs
of it: weights are on their way by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .device import Gpu, gpu_of
from .launch import Tokens, kind_number, launch
from .sizes import cdiv, power_of_two
from .triton.token_attention import join_attention, token_attention
from .triton.token_linear import token_linear
from .triton.token_norm import token_norm

_STEP_BYTES = 16_384  # of keys that attention takes at a time, at most
_HOPPER_NEURONS = 32
_SHORT = 2048  # features; see `linear_tiles`


@dataclass(frozen=True)
class LinearTiles:
    """neurons and rows of a program, and its warps; depth: features at a time, of `token_linear`. Of Hopper's
    kernel, which splits the depth over its warps, 0."""

    neurons: int
    rows: int
    warps: int
    depth: int = 0


def linear_tiles(
    gpu: Gpu, tokens: int, outputs: int, features: int, dtype: torch.dtype
) -> LinearTiles | None:
    """None: cuBLAS is as fast. H200, bf16, weights cold, a chain of such products, microseconds; the last two
    columns are Hopper's kernel:

                             8 neurons  2 neurons   32 neurons
    N x D         tokens  cuBLAS  4 warps     1 warp  4 warps  8 warps
    6144 x 2048        1     9.8      7.7        7.9      7.4      8.0
                    2, 4     9.6  9.7, 12.7  8.2, 9.7  7.6, 8.0  8.1, 8.3
                   8, 16     9.7     20.9       14.9  8.2, 8.5  8.8, 9.3
                      32    10.1                        10.9     12.5
    2048 x 2048        1     6.2      3.2        3.1               3.0
                    2, 4     6.2  3.8, 4.9  3.3, 4.4          3.3, 3.4
                   8, 16     6.3      7.9        5.9          3.5, 3.6
                      32     6.4                                  5.1
    5120 x 4096        1    13.7  11.9 (4096 deep), 13.1         17.2
                    2, 4    13.4  16.2, 24.0  13.4, 23.4    14.6, 15.0
    """
    rows, depth = power_of_two(tokens), power_of_two(features)
    if gpu.capability == (0, 0):
        return LinearTiles(16, rows, 4, 32) if tokens <= 4 else None
    if tokens == 1:
        return LinearTiles(8, rows, 4, min(8192 // dtype.itemsize, depth))
    if features > _SHORT:
        return None
    if gpu.hopper and dtype.itemsize == 2:
        one_wave = cdiv(outputs, _HOPPER_NEURONS) <= gpu.processors
        if tokens <= (32 if one_wave else 16):
            return LinearTiles(_HOPPER_NEURONS, max(16, rows), 8 if one_wave else 4)
        return None
    return LinearTiles(2, rows, 1, min(2 * _SHORT // dtype.itemsize, depth)) if tokens <= 4 else None


def chained(gpu: Gpu) -> dict[str, bool]:
    """Options of a launch that overlaps the one before."""
    return {"launch_pdl": True} if gpu.capability >= (9, 0) else {}


def linear_of_few(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x w^T + bias; x [B, D], w [N, D], both contiguous."""
    tokens, features = x.shape
    outputs = w.shape[0]
    gpu = gpu_of(x.device)
    tiles = linear_tiles(gpu, tokens, outputs, features, x.dtype)
    if tiles is None:
        return linear(x, w, bias)
    y = x.new_empty(tokens, outputs)
    options = chained(gpu)
    kernel = token_linear
    constants = {"HAS_BIAS": bias is not None, "NEURONS": tiles.neurons, "ROWS": tiles.rows}
    if tiles.depth:
        constants |= {"DEPTH": tiles.depth, "CHAINED": bool(options)}
    else:
        from .hopper.token_linear import token_linear_hopper as kernel  # other devices need no Gluon
    kind = kind_number(("linear", x.dtype, outputs, features, tiles, bias is not None))
    arguments = (x, w, w if bias is None else bias, y, Tokens(tokens), outputs, features)
    grid = (cdiv(outputs, tiles.neurons),)
    launch(kind, kernel, grid, arguments, constants, num_warps=tiles.warps, **options)
    return y


def add_and_norm(x: Tensor, change: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + change and its RMSNorm; x, change [B, D], contiguous."""
    tokens, features = x.shape
    gpu = gpu_of(x.device)
    normed = torch.empty_like(x)
    total = x if change is None else torch.empty_like(x)
    options = chained(gpu)
    width = power_of_two(features)
    constants = {"HAS_CHANGE": change is not None, "WIDTH": width, "CHAINED": bool(options)}
    kind = kind_number(("norm", x.dtype, weight.dtype, features, change is not None))
    arguments = (x, x if change is None else change, weight, total, normed, features, epsilon)
    warps = min(8, max(1, width // 256))
    launch(kind, token_norm, (tokens,), arguments, constants, num_warps=warps, **options)
    return total, normed


def attend(
    projected: Tensor,
    cosines: Tensor,
    sines: Tensor,
    mask: Tensor,
    column: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> Tensor:
    """[B, heads * size], what the new tokens see; their keys and values go into the cache.

    projected:      [B, (heads + 2 * key heads) * size], queries, key and value.
    cosines, sines: [B, size].
    mask:           [B, columns], added to the scores.
    column:         int64 [1], of the new tokens; columns beyond are not looked at.
    keys, values:   [B, key heads, columns, size].
    All are contiguous.
    """
    batch, key_heads, columns, size = keys.shape
    heads = projected.shape[1] // size - 2 * key_heads
    group = heads // key_heads
    gpu = gpu_of(keys.device)
    splits = attention_splits(gpu, batch * key_heads, columns)
    step = attention_step(gpu, cdiv(columns, splits), size, keys.dtype.itemsize)
    out = projected.new_empty(batch, heads * size)
    sums = out if splits == 1 else out.new_empty(batch * heads, splits, size + 2, dtype=torch.float32)
    options = chained(gpu)
    constants = {
        "KEY_HEADS": key_heads,
        "GROUP": group,
        "SIZE": size,
        "HEADS": max(16, power_of_two(group)),
        "WIDTH": max(16, power_of_two(size)),
        "STEP": step,
        "SPLITS": splits,
        "CHAINED": bool(options),
    }
    kind = kind_number(("attention", keys.dtype, cosines.dtype, mask.dtype, columns, *constants.values()))
    arguments = (projected, cosines, sines, mask, column, keys, values, out, sums, scale, columns)
    grid = (batch * key_heads, splits)
    options |= {"num_warps": 4, "num_stages": 2}
    launch(kind, token_attention, grid, arguments, constants, **options)
    if splits > 1:
        names = ("SIZE", "WIDTH", "SPLITS", "CHAINED")
        constants = {name: constants[name] for name in names} | {"ROUND": power_of_two(splits)}
        kind = kind_number(("join", out.dtype, *constants.values()))
        options["num_warps"] = 1
        launch(kind, join_attention, (batch * heads,), (sums, out), constants, **options)
    return out


def attention_splits(gpu: Gpu, programs: int, columns: int) -> int:
    """Parts of the columns, so that all processors have work and parts are long enough to be worth joining.

    H200, bf16, microseconds with the best steps: 32 heads, 200 columns: 1 part 3.6, 4 parts 3.4; 900: 4 parts
    5.8, 8 parts 4.9; 5,000: 8 parts 15.6, 16 parts 14.9. 256 heads, 200 columns: 1 part 7.1, 2 parts 6.7.
    (PyTorch's attention and the copies into the cache: 12.6, 14.3, 29.2; 14.0.)
    """
    if gpu.capability == (0, 0):
        return 2 if columns > 64 else 1
    worth = max(min(4, cdiv(columns, 64)), cdiv(columns, 128))
    return max(1, min(4 * gpu.processors // programs, worth))


def attention_step(gpu: Gpu, columns: int, size: int, itemsize: int) -> int:
    """Columns that a program takes at a time, of `columns` that it has. H200, bf16, heads of 64: parts of 113
    columns 4.9 us in one step of 128, 5.7 in two of 64; parts of 312 and 1,024 heads are fastest with 64."""
    if gpu.capability == (0, 0):
        return 16
    fitting = _STEP_BYTES // itemsize // power_of_two(size)
    return max(16, min(fitting, 128 if 64 < columns <= 128 else 64))
