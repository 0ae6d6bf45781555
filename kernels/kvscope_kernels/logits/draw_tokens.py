"""Samples a token per row: temperature, top-k, top-p, min-p and a race of random numbers, in one launch.

Nothing is sorted. A row's threshold is found by search: sums of weights (or counts) at or above three values show which
of four intervals contains the threshold, and each pass over the row narrows the interval until one value is left in it.
"""

import torch
from torch import Tensor

from kvscope_kernels.checks import require
from kvscope_kernels.logits.random_numbers import exponentials
from kvscope_kernels.logits.token_filter import PIECE, in_pieces, thresholds
from kvscope_kernels.triton_language import jit, require_triton, tl

NUM_OPTIONS = 4
_TILE = 16 << 10
"""Number of logits processed together: enough outstanding loads to saturate one multiprocessor's L2 bandwidth."""
_COLUMNS = 2048
_WARPS = 16


def draw_tokens(logits: Tensor, options: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Sample one token for each of `rows`, in one launch, without synchronization. Returns (n,) int64.

    Weights are w = exp((logit - largest) / temperature). The filters apply one after the other. Min-p retains tokens
    with w >= min-p. Top-k retains those at or above the k-th largest. Top-p retains those at or above the first weight
    at which the sum of weights, largest first, reaches top-p of the total. Tokens of equal weight are retained or
    dropped together. Then pieces of 256 tokens race: the piece with the smallest E / (sum of w) wins, with E an
    exponential random number per piece (`random_numbers`). Then the tokens of the winning piece race in the same way.

    Args:
        logits: (num_rows, vocabulary) float32, contiguous; may be overwritten in `rows`.
        options: (n, 4) float64, contiguous: temperature (above 0), top-k (0 disables it), top-p (1 disables it), min-p
            (0 disables it).
        keys: (n,) int64: start of each row's random numbers.
        rows: (n,) int64, distinct.

    Raises:
        ValueError: Unsupported arguments.

    Sources: vLLM for the order of filters; the threshold search is as in FlashInfer (Ye et al. 2025, Sorting-Free GPU
    Kernels for LLM Sampling), but exact, and completed before a token is drawn.
    """
    _check(logits, options, keys, rows)
    require_triton()
    tokens = torch.empty_like(keys)
    if len(rows):
        constants = draw_constants()
        _draw_tokens_kernel[(len(rows),)](
            logits, options, keys, rows, tokens, logits.shape[1], **constants, num_warps=_WARPS
        )
    return tokens


def draw_constants() -> dict[str, int]:
    return {"TILE_R": _TILE // _COLUMNS, "TILE_C": _COLUMNS, "PIECE": PIECE, "TILE_P": _TILE // PIECE}


@jit
def _draw_tokens_kernel(
    logits: tl.tensor,
    row_options: tl.tensor,  # Triton reserves the name `options`
    keys: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_P: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    values = logits + tl.load(rows + index) * vocabulary
    temperature = tl.load(row_options + index * 4).to(tl.float32)
    top_k = tl.load(row_options + index * 4 + 1).to(tl.float32)
    top_p = tl.load(row_options + index * 4 + 2).to(tl.float32)
    min_p = tl.load(row_options + index * 4 + 3).to(tl.float32)
    scale = 1.4426950408889634 / temperature
    top, lowest, count = _extremes(values, vocabulary, TILE_R, TILE_C)
    min_p_floor = top + temperature * tl.log(tl.maximum(min_p, 1e-37))
    floor = tl.where(min_p > 0.0, tl.minimum(min_p_floor, top), float("-inf"))
    if (top_k > 0.0) & (top_k < count):
        kth = _search(values, vocabulary, top, scale, lowest, count, top_k, True, TILE_R, TILE_C)
        floor = tl.maximum(floor, kth)
    if top_p < 1.0:
        start = tl.maximum(floor, tl.maximum(lowest, top - 126.0 / scale))  # weights below are 0 in float32
        # The largest weight is 1: tokens with less than (1 - top-p) / vocabulary are not needed, even all together.
        near = tl.maximum(start, top - temperature * tl.log(2.0 * vocabulary / (1.0 - top_p)))
        middle = near + 0.5 * (top - near)
        total, above_near, above_middle, _, _ = _sums(
            values, vocabulary, top, scale, start, top, start, near, middle, False, TILE_R, TILE_C
        )
        wanted = top_p * total
        is_above = above_middle >= wanted
        low = tl.where(is_above, middle, near)
        most = tl.where(is_above, above_middle, above_near)
        top_p_floor = _search(values, vocabulary, top, scale, low, most, wanted, False, TILE_R, TILE_C)
        floor = tl.maximum(floor, tl.where(above_near >= wanted, top_p_floor, start))
    key = tl.load(keys + index).to(tl.uint64, bitcast=True)
    winner = _fastest_piece(values, vocabulary, top, scale, floor, key, PIECE, TILE_P)
    piece_index = tl.arange(0, PIECE)
    first = winner * PIECE
    piece_values = tl.load(values + first + piece_index, mask=first + piece_index < vocabulary, other=float("-inf"))
    weights = tl.where(piece_values >= floor, _weight(piece_values, top, scale), 0.0)
    race = weights.to(tl.float64) / _exponentials(key, tl.cdiv(vocabulary, PIECE) + piece_index)
    token = first + tl.min(tl.where(race == tl.max(race, axis=0), piece_index, PIECE - 1), axis=0)
    tl.store(tokens + index, tl.minimum(token, vocabulary - 1).to(tl.int64))


@jit
def _tile(values: tl.tensor, start: tl.tensor, vocabulary: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    index = start + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(values + index, mask=index < vocabulary, other=float("-inf"))


@jit
def _extremes(values: tl.tensor, vocabulary: tl.tensor, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest value, the smallest above -inf, and the number of values above -inf."""
    largest = tl.full((TILE_C,), float("-inf"), tl.float32)
    lowest = tl.full((TILE_C,), float("inf"), tl.float32)
    count = tl.zeros((TILE_C,), tl.float32)
    for start in range(0, vocabulary, TILE_R * TILE_C):
        x = _tile(values, start, vocabulary, TILE_R, TILE_C)
        is_finite = x > float("-inf")
        largest = tl.maximum(largest, tl.max(x, axis=0))
        lowest = tl.minimum(lowest, tl.min(tl.where(is_finite, x, float("inf")), axis=0))
        count += tl.sum(tl.where(is_finite, 1.0, 0.0), axis=0)
    return tl.max(largest, axis=0), tl.min(lowest, axis=0), tl.sum(count, axis=0)


@jit
def _search(  # type: ignore[no-untyped-def]
    values: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    lowest: tl.tensor,
    most: tl.tensor,
    wanted: tl.tensor,
    COUNTS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Return the largest value v of the row, from `lowest` on, for which the sum of weights or counts at or above v is
    at least `wanted`.

    `most` is the sum at or above `lowest`. The search interval [low, high] consists of integers ordered like the
    floats. Three values are tried per pass: close to where the sum would be `wanted` if it fell exponentially; after a
    pass that gained less than two bits, those that quarter the interval; and if that does not converge soon, because
    values have very different magnitudes, those that quarter the range of integers. Seven passes are usual for 128,256
    logits.
    """
    low, high = _ordered_from_float(lowest), _ordered_from_float(top)
    above_low, above_high = most, most * 0.0
    num_passes = 0
    was_quartered = 0
    gain = most * 0.0 + 16.0
    while (low < high) & (num_passes < 72):
        bottom, width = _float_from_ordered(low), _float_from_ordered(high) - _float_from_ordered(low)
        evenly = (above_low - wanted) / tl.maximum(above_low - above_high, 1e-30)
        ratio = above_low / tl.maximum(above_high, 1e-30)
        falling = tl.log(above_low / tl.maximum(wanted, 1e-30)) / tl.log(tl.maximum(ratio, 1.001))
        share = tl.where((above_high > 0.0) & (ratio > 1.001), falling, evenly)
        is_quartered = (gain < 4.0) & (was_quartered == 0)
        was_quartered = tl.where(is_quartered, 1, 0)
        middle = bottom + width * tl.where(is_quartered, 0.5, share)
        step = width * tl.where(is_quartered, 0.25, 0.125)
        quarter = (high - low) // 4
        is_by_integer = num_passes >= 24
        first = tl.where(is_by_integer, low + quarter, _ordered_from_float(middle - step))
        second = tl.where(is_by_integer, low + 2 * quarter, _ordered_from_float(middle))
        third = tl.where(is_by_integer, low + 3 * quarter, _ordered_from_float(middle + step))
        first = tl.where((first > low) & (first <= high), first, high)
        second = tl.where((second > low) & (second <= high), second, high)
        third = tl.where((third > low) & (third <= high), third, high)
        a, b, c, smallest, largest = _sums(
            values,
            vocabulary,
            top,
            scale,
            bottom,
            _float_from_ordered(high),
            _float_from_ordered(first),
            _float_from_ordered(second),
            _float_from_ordered(third),
            COUNTS,
            TILE_R,
            TILE_C,
        )
        low_before, high_before = low, high
        low = tl.maximum(low, tl.where(a >= wanted, first, low_before))
        low = tl.maximum(low, tl.where(b >= wanted, second, low_before))
        low = tl.maximum(low, tl.where(c >= wanted, third, low_before))
        high = tl.minimum(high, tl.where(a < wanted, first - 1, high_before))
        high = tl.minimum(high, tl.where(b < wanted, second - 1, high_before))
        high = tl.minimum(high, tl.where(c < wanted, third - 1, high_before))
        above_low = tl.minimum(above_low, tl.where(a >= wanted, a, most))
        above_low = tl.minimum(above_low, tl.where(b >= wanted, b, most))
        above_low = tl.minimum(above_low, tl.where(c >= wanted, c, most))
        above_high = tl.maximum(above_high, tl.where(a < wanted, a, 0.0))
        above_high = tl.maximum(above_high, tl.where(b < wanted, b, 0.0))
        above_high = tl.maximum(above_high, tl.where(c < wanted, c, 0.0))
        low = tl.maximum(low, _ordered_from_float(smallest))
        high = tl.minimum(high, _ordered_from_float(largest))
        gain = width / tl.maximum(_float_from_ordered(high) - _float_from_ordered(low), 1e-30)
        num_passes += 1
    return _float_from_ordered(low)


@jit
def _sums(  # type: ignore[no-untyped-def]
    values: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    COUNTS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Return the sums of weights, or counts, at or above three values, the smallest value >= `low`, and the largest <=
    `high`.

    Sums decrease monotonically as values grow, even with rounding: each adds the same elements in the same order.
    """
    a = tl.zeros((TILE_C,), tl.float32)
    b = tl.zeros((TILE_C,), tl.float32)
    c = tl.zeros((TILE_C,), tl.float32)
    smallest = tl.full((TILE_C,), float("inf"), tl.float32)
    largest = tl.full((TILE_C,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, TILE_R * TILE_C):
        x = _tile(values, start, vocabulary, TILE_R, TILE_C)
        weight = tl.full((TILE_R, TILE_C), 1.0, tl.float32) if COUNTS else _weight(x, top, scale)
        a += tl.sum(tl.where(x >= first, weight, 0.0), axis=0)
        b += tl.sum(tl.where(x >= second, weight, 0.0), axis=0)
        c += tl.sum(tl.where(x >= third, weight, 0.0), axis=0)
        smallest = tl.minimum(smallest, tl.min(tl.where(x >= low, x, float("inf")), axis=0))
        largest = tl.maximum(largest, tl.max(tl.where(x <= high, x, float("-inf")), axis=0))
    return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0), tl.min(smallest, axis=0), tl.max(largest, axis=0)


@jit
def _weight(x: tl.tensor, top: tl.tensor, scale: tl.tensor):  # type: ignore[no-untyped-def]
    """Return the softmax weights of logits, not normalized: 1 for the largest logit, even if it is infinite."""
    return tl.where(x == top, 1.0, tl.exp2((x - top) * scale))


@jit
def _fastest_piece(  # type: ignore[no-untyped-def]
    values: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    floor: tl.tensor,
    key: tl.tensor,
    PIECE: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """Return the index of the piece of the vocabulary that wins the race, or of the first if several are equal."""
    best = key.to(tl.float64) * 0.0 - 1.0
    winner = vocabulary * 0
    pieces = tl.arange(0, TILE_P)
    for start in range(0, vocabulary, TILE_P * PIECE):
        x = _tile(values, start, vocabulary, TILE_P, PIECE)
        weights = tl.where(x >= floor, _weight(x, top, scale), 0.0)
        numbers = start // PIECE + pieces
        race = tl.sum(weights, axis=1).to(tl.float64) / _exponentials(key, numbers)
        fastest = tl.max(race, axis=0)
        number = tl.min(tl.where(race == fastest, numbers, 0x7FFFFFFF), axis=0)
        winner = tl.where(fastest > best, number, winner)
        best = tl.maximum(best, fastest)
    return winner


@jit
def _exponentials(key: tl.tensor, counters: tl.tensor):  # type: ignore[no-untyped-def]
    """Return the values of `random_numbers.exponentials` at the indices `counters`. The smallest values may
    differ in the last bits.
    """
    state = key + (counters + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    uniform = (state & ((1 << 53) - 1)).to(tl.int64).to(tl.float64) + 0.5
    return tl.maximum(-tl.log(1.0 - uniform * 1.1102230246251565e-16), 1e-17)


@jit
def _ordered_from_float(value: tl.tensor):  # type: ignore[no-untyped-def]
    """Convert a float to an integer with the same order; `_float_from_ordered` is the inverse."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@jit
def _float_from_ordered(number: tl.tensor):  # type: ignore[no-untyped-def]
    bits = number.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


def draw_tokens_torch(logits: Tensor, options: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Reference of `draw_tokens`, and the implementation for CPUs. On a GPU, it synchronizes with the host."""
    _check(logits, options, keys, rows)
    if not len(rows):
        return torch.empty_like(keys)
    is_all = len(rows) == len(logits) and rows.tolist() == list(range(len(rows)))
    scaled = (logits if is_all else logits.index_select(0, rows)).div_(options[:, :1].float())
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    if bool(((options[:, 1] > 0) | (options[:, 2] < 1.0) | (options[:, 3] > 0)).any()):
        weights.mul_(scaled >= thresholds(scaled, weights, options)[:, None])
    return draw(weights, keys)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw an index per row from weights, by exponential races.

    Among tokens with times E / weight, E distributed as Exp(1), each is first with a probability proportional to its
    weight. A race of all tokens needs a random number for each: 3.3 ms for 8 rows of 49,152 tokens on one core, where a
    cumulative sum takes 0.08 ms. So pieces of the vocabulary race first, by their sums of weights, then the tokens of
    the winning piece: the same probabilities with one number per piece and one per position in a piece, in 0.10 ms.

    A row's result depends on its own weights and key only. The weight of a token does not affect the times of other
    pieces, while in a cumulative sum it would shift all later positions.

    Args:
        weights: (n, size) >= 0, not all zero in a row. An index with weight zero is never drawn.
        keys: (n,) int64 (`random_numbers`).

    Returns:
        Indices (n,).
    """
    pieces = in_pieces(weights, 0.0)
    num_pieces = pieces.shape[1]
    times = exponentials(keys, num_pieces + PIECE)
    piece = (pieces.sum(-1).double() / times[:, :num_pieces]).argmax(-1)
    rows = torch.arange(len(weights), device=weights.device)
    return piece * PIECE + (pieces[rows, piece].double() / times[:, num_pieces:]).argmax(-1)


def _check(logits: Tensor, options: Tensor, keys: Tensor, rows: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        require(False, "logits", logits, "(num_rows, vocabulary) float32, contiguous,")
    if rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != logits.device:
        require(False, "rows", rows, "(n,) int64 on the device of logits")
    if keys.shape != rows.shape or keys.dtype != torch.int64 or keys.device != logits.device:
        require(False, "keys", keys, f"({len(rows)},) int64 on the device of logits")
    fits = options.shape == (len(rows), NUM_OPTIONS) and options.is_contiguous()
    if not fits or options.dtype != torch.float64 or options.device != logits.device:
        require(False, "options", options, f"({len(rows)}, {NUM_OPTIONS}) float64, contiguous, beside logits,")
