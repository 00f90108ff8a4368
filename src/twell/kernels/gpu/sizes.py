"""Which sizes the kernels take, and sizes of blocks, lists and pools; needs no GPU and no Triton."""

from __future__ import annotations

from ...problem import FfnArgs

DEFAULT_ROWS = 128  # tokens per block
READ_AHEAD = 256  # entries that kernels read past the end of a list
DECODE_TOKENS = 64  # up to here the two-launch kernels run; beyond, the block path reuses weights better
ROUNDS = 3  # a backward of many tokens has room for a third of the neurons, and takes up to three rounds
# Up to this many bytes the backward has room for all neurons, and takes one round: 8,192 tokens of 5,632
# neurons; 65,536 tokens where so many neurons are expected to be active that it would take three.
ONE_ROUND_BYTES, OVERFLOW_BYTES = 288 << 20, 3 << 30
WEIGHT_STEP = 8  # features or neurons: 16 bytes of 16-bit weights, which vector loads read at once
_INDEX_LIMIT = 2**31  # kernels index weights, and a block's rows of neurons or features, with 32 bits
_PLACES = 1 << 23  # rows of the pool that `places` can tell apart


def unaligned(features: int, neurons: int) -> str | None:
    """Why the kernels cannot read weights of these sizes, if they cannot."""
    if features % WEIGHT_STEP or neurons % WEIGHT_STEP:
        return f"D and H must be multiples of {WEIGHT_STEP}, not {features} and {neurons}"
    return None


def out_of_reach(args: FfnArgs) -> str | None:
    """Why the kernels cannot run this call, if they cannot: nothing to compute, or indices too large."""
    tokens, neurons, outputs = args.x.shape[0], args.up.shape[0], args.down.shape[0]
    if min(tokens, neurons, outputs) == 0:
        return "there is nothing to compute"
    wide = max(outputs, args.x.shape[1])
    if max(neurons * wide, max(neurons, wide) * DEFAULT_ROWS) >= _INDEX_LIMIT:
        return f"H x D = {neurons} x {wide} passes 32-bit indices"
    return None


def out_of_reach_of_training(args: FfnArgs, rows: int) -> str | None:
    """`out_of_reach` for a training step, on blocks of `rows` tokens."""
    reason = out_of_reach(args)
    if reason is not None:
        return reason
    tokens, neurons, outputs = args.x.shape[0], args.up.shape[0], args.down.shape[0]
    if not fits(tokens, neurons, rows):
        return f"{tokens} tokens of {neurons} neurons pass the backward's indices"
    if outputs * args.x.dtype.itemsize % 16:
        return f"{outputs} outputs are no multiple of 16 bytes"
    return None


def fits(tokens: int, neurons: int, rows: int) -> bool:
    """Whether the indices of the backward's kernels reach; rows: tokens per block."""
    return cdiv(tokens, rows) * cdiv(cdiv(neurons, 128), ROUNDS) * 128 < _PLACES


def bucket(tokens: int) -> tuple[int, int]:
    """A key that numbers of tokens (>= 1) share if the same kernels take them, with the same tiles and grids,
    and an automatic plan treats them alike."""
    if tokens <= DECODE_TOKENS:
        return 1 << (tokens - 1).bit_length(), cdiv(tokens, 16)
    return 0, cdiv(tokens, DEFAULT_ROWS)


def whole_blocks(tokens: int) -> int:
    """Tokens that the kernels compute for `tokens`: beyond decode, whole blocks."""
    return tokens if tokens <= DECODE_TOKENS else cdiv(tokens, DEFAULT_ROWS) * DEFAULT_ROWS


def planes_of(gated: bool) -> int:
    """Values of every active neuron and token that the backward keeps: its hidden activation, the gradient of
    its pre-activation, and that of its up value if there is one."""
    return 3 if gated else 2


def backward_rounds(
    tokens: int, neurons: int, rows: int, gated: bool, itemsize: int, overflow: bool | None
) -> int:
    """How often the backward fills its pool; a value takes `itemsize` bytes.

    overflow: whether more than a third of the neurons is expected to be active.
    """
    planes = planes_of(gated)
    room = cdiv(tokens, rows) * rows * cdiv(neurons, 128) * 128 * planes * itemsize
    return 1 if room <= (OVERFLOW_BYTES if overflow else ONE_ROUND_BYTES) else ROUNDS


def list_sizes(tokens: int, neurons: int, rows: int) -> tuple[int, int]:
    """Integers in the lists of active neurons (and what is read past their end), and in the counts."""
    blocks = -(-tokens // (rows or DEFAULT_ROWS))
    return blocks * neurons + READ_AHEAD, blocks


def cdiv(number: int, divisor: int) -> int:
    """Division rounded up."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The smallest power of two at or above `number` (>= 1)."""
    return 1 << (number - 1).bit_length()
