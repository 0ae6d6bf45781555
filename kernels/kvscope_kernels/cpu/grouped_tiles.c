/* x @ weight.T with weights of 4 or 8 bits in groups and bfloat16 activations, with the tile instructions of AMX.
 *
 * Computes the sums of grouped_float.c, with the same bits, so that callers may choose by the number of rows. A centred
 * code is exact in bfloat16: neither weights nor activations are rounded. A tile instruction multiplies 16 rows of x by
 * 16 outputs over a CHUNK of inputs. Its sums go through memory to vectors, which multiply them by the group's scale.
 * Loading a tile takes longer than multiplying it, so 32 rows and 32 outputs are multiplied together: four
 * multiplications for four loads.
 *
 * The bits are the same because a tile instruction sums the first numbers of all pairs of bfloat16 in order, then the
 * second numbers, and adds the two sums. So the pairs of a tile are the numbers that grouped_float.c adds to its two
 * sums: inputs 2 and 3 of each four, then 0 and 1, with codes of 4 bits (VDPBF16PS adds the second number of a pair
 * first), and inputs 0 and 1, then 2 and 3, with codes of 8. See
 * docs/internals/decisions/0029-tiles-have-the-bits-of-single-rows.md.
 */
#include "grouped_tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* STEP: chunks whose sums are in memory before vectors read them. PART: chunks whose unpacked codes fit into the L1 cache.
 * ROW_BLOCK: rows that share unpacked codes; their x stays in the L2 cache. */
enum { HALF = PANEL / 2, TILE_ROWS = 16, STEP = 3, PART = 6, ROW_BLOCK = 512, LINE = 64 };
enum { PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM of Linux, and the state that it permits */

typedef struct {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

int may_use_tiles(void) { return syscall(SYS_arch_prctl, PERMISSION, TILE_DATA) == 0; }

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 codes. */
static const tile_config CONFIG_16 = {.palette = 1,
                                      .row_bytes = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE},
                                      .rows = {16, 16, 16, 16, 16, 16, 16, 16}},
                         CONFIG_8 = {.palette = 1,
                                     .row_bytes = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE},
                                     .rows = {8, 8, 8, 8, 8, 8, 16, 16}};

INLINE __m512i byte_at(__m512i v, int i) {
    return _mm512_and_si512(_mm512_srli_epi32(v, 8 * i), _mm512_set1_epi32(255));
}

/* Pairs of bfloat16 from codes of 8 bits in the lanes of 32 bits. */
INLINE __m512i pairs_of(__m512i first, __m512i second) {
    const __m512i centre = _mm512_set1_epi32(128);
    __m512i low = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(first, centre)));
    __m512i high = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(second, centre)));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}

/* Unpack a chunk of a panel: two tiles, for outputs 0..15 and 16..31. */
INLINE void unpack_8_bits(const uint8_t *w, uint8_t *to) {
    for (int k = 0; k < QUADS; k++, w += 2 * LINE, to += 2 * LINE)
        for (int half = 0; half < 2; half++) {
            __m512i v = _mm512_loadu_si512(w + half * LINE);
            uint8_t *pairs = to + half * TILE_ROWS * LINE;
            _mm512_store_si512(pairs, pairs_of(byte_at(v, 0), byte_at(v, 1)));
            _mm512_store_si512(pairs + LINE, pairs_of(byte_at(v, 2), byte_at(v, 3)));
        }
}

INLINE void unpack_4_bits(const uint8_t *w, uint8_t *to) {
    const __m512i table = _mm512_set_epi16( /* repeated: the permutation uses 5 bits of each 16-bit lane */
        0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0a0, 0xc0c0,
        0xc0e0, 0xc100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, 0xbf80, 0xc000, 0xc040, 0xc080,
        0xc0a0, 0xc0c0, 0xc0e0, 0xc100);
    const __m512i last = _mm512_set4_epi32(0x0f0f0e0e, 0x0b0b0a0a, 0x07070606, 0x03030202) /* of 4 bytes: 2, 2, 3, 3 */,
                  first = _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000); /* 0, 0, 1, 1 */
#pragma GCC unroll 8
    for (int k = 0; k < QUADS; k++, w += LINE, to += 2 * LINE) {
        __m512i v = _mm512_loadu_si512(w);
        for (int i = 0; i < 2; i++) {
            __m512i codes = _mm512_shuffle_epi8(v, i ? first : last);
            __m512i high = _mm512_srli_epi16(codes, 4);
            _mm512_store_si512(to + LINE * i, _mm512_permutexvar_epi16(codes, table));
            _mm512_store_si512(to + TILE_ROWS * LINE + LINE * i, _mm512_permutexvar_epi16(high, table));
        }
    }
}

/* Part of a weight: a panel's chunks first..end, at most PART. */
typedef struct {
    uint8_t codes[PART][2][TILE_ROWS * LINE];
    float scales[PART][PANEL], middles[PART][PANEL]; /* of the groups of these chunks */
    int64_t first, end, first_group;
    int32_t group[PART], starts_group[PART]; /* of each chunk: index into scales; whether no earlier chunk is in its group */
} weight_part;

static void take_part(const grouped *l, int64_t panel, int64_t first, weight_part *part) {
    int64_t groups = (l->chunks + l->span - 1) / l->span, chunk_bytes = CHUNK * PANEL * l->bits / 8;
    const uint8_t *w = l->codes + (panel * l->chunks + first) * chunk_bytes;
    part->first = first;
    part->end = first + PART < l->chunks ? first + PART : l->chunks;
    part->first_group = first / l->span;
    for (int64_t c = 0; c < part->end - first; c++, w += chunk_bytes) {
        if (l->bits == 4) unpack_4_bits(w, part->codes[c][0]);
        else unpack_8_bits(w, part->codes[c][0]);
        part->group[c] = (int32_t)((first + c) / l->span - part->first_group);
        part->starts_group[c] = (first + c) % l->span == 0;
    }
    for (int64_t g = 0; g <= part->group[part->end - 1 - first]; g++) {
        float both[2 * PANEL];
        take_facts(l, panel * groups + part->first_group + g, both);
        for (int j = 0; j < PANEL; j++) {
            part->scales[g][j] = both[j];
            part->middles[g][j] = both[PANEL + j] + (l->bits == 4 ? 8.0f : 128.0f) * both[j];
        }
    }
}

/* Rows of x in one tile: 16, or 8 if there are no more. Some may be unused memory, which only their own results read. */
typedef struct {
    const bf16 *x;       /* [chunks][rows][CHUNK] */
    const float *totals; /* [groups][rows]: sums of x */
} row_tile;

/* Multiply one or two tiles of rows by a chunk's codes. sums: [2 * tiles][rows][HALF], two halves of each tile's row. */
INLINE void multiply_chunk(int rows, int tiles, const uint8_t *codes, const bf16 *x, const bf16 *second_x, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x, LINE);
    _tile_loadd(6, codes, LINE);
    _tile_loadd(7, codes + TILE_ROWS * LINE, LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (tiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(5, second_x, LINE);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + rows * HALF, LINE);
    if (tiles == 2) {
        _tile_stored(2, sums + 2 * rows * HALF, LINE);
        _tile_stored(3, sums + 3 * rows * HALF, LINE);
    }
}

/* y[r][0..15] += the scaled sums of some chunks from `first` on, for a half of a panel. stride: of the chunks' sums. */
INLINE void add_scaled(int rows, const weight_part *part, int64_t first, int count, int half, const float *totals,
                       const float *sums, int stride, int is_new, float *to) {
    __m512 y[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) y[r] = is_new ? _mm512_setzero_ps() : _mm512_load_ps(to + r * PANEL);
    for (int i = 0; i < count; i++, sums += stride) {
        int64_t c = first - part->first + i, g = part->group[c];
        if (part->starts_group[c]) {
            __m512 middle = _mm512_load_ps(part->middles[g] + half * HALF);
            const float *own = totals + (part->first_group + g) * rows;
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) y[r] = _mm512_fmadd_ps(middle, _mm512_set1_ps(own[r]), y[r]);
        }
        __m512 scale = _mm512_load_ps(part->scales[g] + half * HALF);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) y[r] = _mm512_fmadd_ps(_mm512_load_ps(sums + r * HALF), scale, y[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) _mm512_store_ps(to + r * PANEL, y[r]);
}

/* y[r][0..31] += x @ codes.T over a part, for one or two tiles of `rows` rows each. */
INLINE void multiply_tiles(int rows, int tiles, const weight_part *part, const row_tile *x, float *y) {
    float sums[STEP][2 * 2 * TILE_ROWS * HALF] __attribute__((aligned(LINE)));
    for (int64_t first = part->first; first < part->end; first += STEP) {
        int count = part->end - first < STEP ? (int)(part->end - first) : STEP;
        for (int i = 0; i < count; i++) {
            int64_t at = (first + i) * rows * CHUNK;
            multiply_chunk(rows, tiles, part->codes[first + i - part->first][0], x[0].x + at, x[tiles - 1].x + at, sums[i]);
        }
        __asm__ volatile("" : : "r"(sums) : "memory"); /* tiles wrote them */
        for (int t = 0; t < tiles; t++)
            for (int half = 0; half < 2; half++)
                add_scaled(rows, part, first, count, half, x[t].totals, sums[0] + (2 * t + half) * rows * HALF,
                           2 * 2 * TILE_ROWS * HALF, first == 0, y + t * rows * PANEL + half * HALF);
    }
}

static void two_tiles_of_16(const weight_part *part, const row_tile *x, float *y) { multiply_tiles(16, 2, part, x, y); }
static void tile_of_16(const weight_part *part, const row_tile *x, float *y) { multiply_tiles(16, 1, part, x, y); }
static void tile_of_8(const weight_part *part, const row_tile *x, float *y) { multiply_tiles(8, 1, part, x, y); }

/* Copy a row of x to its place in a tile of `rows` rows, and compute the sums of its groups. */
static void pack_row(const grouped *l, const bf16 *x, int rows, bf16 *to, float *totals) {
    int64_t groups = (l->chunks + l->span - 1) / l->span;
    for (int64_t c = 0; c < l->chunks; c++) {
        int64_t left = l->inputs - c * CHUNK;
        __mmask32 inside = left < CHUNK ? ((__mmask32)1 << left) - 1 : ~(__mmask32)0;
        __m512i v = _mm512_maskz_loadu_epi16(inside, x + c * CHUNK);
        if (l->bits == 4) v = _mm512_shuffle_epi32(v, _MM_PERM_CDAB); /* inputs 2, 3, 0 and 1 of each four */
        _mm512_store_si512(to + c * rows * CHUNK, v);
    }
    for (int64_t g = 0; g < groups; g++) totals[g * rows] = group_total(l, x, 0, g, 0);
}

/* Without it, the stores of `finish` would wait for their cache lines, which are in different pages. */
INLINE void prefetch_output(const grouped *l, int64_t panel, int64_t m, void *out, int flags) {
    char *first = (char *)out + (m * l->outputs + panel * PANEL) * (flags & OUT_F32 ? 4 : 2);
    __builtin_prefetch(first, 1);
    if (flags & OUT_F32) __builtin_prefetch(first + LINE, 1);
}

/* rows: of a tile, 16 or 8; num_rows: of x. */
INLINE void one_panel(const grouped *l, int64_t panel, int64_t start, int rows, int64_t num_rows, const bf16 *x,
                      const float *totals, void *out, const void *add, int flags) {
    int64_t groups = (l->chunks + l->span - 1) / l->span;
    float y[ROW_BLOCK * PANEL] __attribute__((aligned(LINE)));
    weight_part part __attribute__((aligned(LINE)));
    for (int64_t first = 0; first < l->chunks; first += PART) {
        take_part(l, panel, first, &part);
        __asm__ volatile("" : : "r"(&part) : "memory"); /* tiles read it */
        for (int64_t r = 0; r < num_rows;) {
            int tiles = num_rows - r > rows ? 2 : 1;
            row_tile of[2];
            for (int t = 0; t < tiles; t++)
                of[t] = (row_tile){x + (r + t * rows) * l->chunks * CHUNK, totals + (r + t * rows) * groups};
            int64_t end = r + tiles * rows < num_rows ? r + tiles * rows : num_rows;
            int is_last = part.end == l->chunks;
            if (is_last)
                for (int64_t i = r; i < end; i++) prefetch_output(l, panel, start + i, out, flags);
            (tiles == 2 ? two_tiles_of_16 : rows == 16 ? tile_of_16 : tile_of_8)(&part, of, y + r * PANEL);
            if (is_last)
                for (int64_t i = r; i < end; i++) finish(l, panel, start + i, y + i * PANEL, out, add, flags);
            r = end;
        }
    }
}

int multiply_with_tiles(const grouped *l, const bf16 *x, int64_t m, void *out, const void *add, int flags,
                        int threads) {
    int64_t panels = (l->outputs + PANEL - 1) / PANEL, groups = (l->chunks + l->span - 1) / l->span;
    int64_t block = m < ROW_BLOCK ? m : ROW_BLOCK, padded = (block + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    int tile_rows = m > 8 ? 16 : 8;
    bf16 *packed = aligned_alloc(LINE, (size_t)(padded * l->chunks * LINE) + LINE);
    float *totals = malloc(sizeof(float) * (size_t)(padded * groups) + 1);
    int failed = !packed || !totals;
    for (int64_t start = 0; !failed && start < m; start += block) {
        int64_t rows = m - start < block ? m - start : block;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            tile_config before __attribute__((aligned(LINE)));
            _tile_storeconfig(&before);
            _tile_loadconfig(tile_rows == 16 ? &CONFIG_16 : &CONFIG_8);
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                int64_t first = r - r % tile_rows;
                pack_row(l, x + (start + r) * l->inputs, tile_rows,
                         packed + first * l->chunks * CHUNK + r % tile_rows * CHUNK,
                         totals + first * groups + r % tile_rows);
            }
#pragma omp for
            for (int64_t panel = 0; panel < panels; panel++)
                one_panel(l, panel, start, tile_rows, rows, packed, totals, out, add, flags);
            if (before.palette) _tile_loadconfig(&before); /* oneDNN's, if it is not done with them */
            else _tile_release();
        }
    }
    free(packed);
    free(totals);
    return failed;
}
#else
int may_use_tiles(void) { return 0; }

int multiply_with_tiles(const grouped *l, const bf16 *x, int64_t m, void *out, const void *add, int flags,
                        int threads) {
    return 1;
}
#endif
