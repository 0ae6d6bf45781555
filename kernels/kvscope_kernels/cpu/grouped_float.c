/* x @ weight.T with weights of 4 or 8 bits in groups and unrounded activations: only the float32 sums round.
 *
 * With g the groups, c[n, k] = code[n, k] - CENTRE, and CENTRE half of the range of a code:
 *     out[m, n] = sum_g (middle[n, g] * sum_{k in g} x[m, k] + scale[n, g] * sum_{k in g} x[m, k] * c[n, k])
 *                 + bias[n] + add[m, n],  middle = low + CENTRE * scale.
 * Centred codes keep inner sums, and thereby their errors, small. All sums have a fixed order, so a row's result does
 * not depend on the other rows. With AMX, grouped_tiles.c computes several rows of bfloat16 with the same bits, so a
 * change of the order of sums must be made in both files.
 *
 * A single request is bound by memory: 4 bits are an eighth of float32. With AVX-512, a shift and a permutation convert
 * 16 codes to floats (or 32 to bfloat16, with products summed in float32, if x is bfloat16): 4 bits are the index into
 * a table of 16. Other CPUs shift twice to extend the sign, and convert. All rows share the converted weights.
 */
#include "grouped.h"
#include "grouped_tiles.h"

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif

enum { HALF = PANEL / 2, PARTS = HALF / WIDTH, MAX_ROWS = WIDTH == 16 ? 6 : 2, ROW_BLOCK = 96 };

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));

INLINE words load_words(const uint8_t *p) {
    words v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE floats load_floats(const float *p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* A macro, because a factor may be a vector or a number. */
#define add_product(p, a, b)                                                                                          \
    do {                                                                                                              \
        floats sum_ = load_floats(p);                                                                                 \
        sum_ += (a) * (b);                                                                                            \
        memcpy(p, &sum_, sizeof sum_);                                                                                \
    } while (0)

/* The centred number in the `bits` bits from bit `at` on of each lane. `v` is a result of `centred`. */
#if WIDTH == 16
INLINE words centred(int bits, words v) { return bits == 4 ? v : v ^ 0x80808080u; }

INLINE floats number_at(int bits, words v, int at) {
    const floats table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    if (bits == 4) return (floats)_mm512_permutexvar_ps((__m512i)(v >> at), (__m512)table); /* reads only 4 bits */
    return __builtin_convertvector((ints)(v << (24 - at)) >> 24, floats);
}
#else
INLINE words centred(int bits, words v) { return v ^ (bits == 4 ? 0x88888888u : 0x80808080u); }

INLINE floats number_at(int bits, words v, int at) {
    return __builtin_convertvector((ints)(v << (32 - bits - at)) >> (32 - bits), floats);
}
#endif

/* sums[r][v][h] of WIDTH outputs each over a chunk. v: low and high bits for 4 bits, halves of a panel for 8. h:
 * alternating accumulators, because a sum waits for the previous one. x: [CHUNK][rows]. */
INLINE void chunk_of(int rows, int bits, const uint8_t *w, const float *x, floats sums[][2][2]) {
#pragma GCC unroll 4
    for (int k = 0; k < QUADS; k++, w += 16 * bits) {
        words first = centred(bits, load_words(w)), second = bits == 4 ? first : centred(bits, load_words(w + 64));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            floats w0 = number_at(bits, first, 8 * i);
            floats w1 = bits == 4 ? number_at(4, second, 8 * i + 4) : number_at(8, second, 8 * i);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                float one = x[(4 * k + i) * rows + r];
                sums[r][0][i % 2] += w0 * one;
                sums[r][1][i % 2] += w1 * one;
            }
        }
    }
}

#if HAS_BF16
/* The same for 4 bits and pairs of bfloat16, [CHUNK / 2][rows]: inputs 0 and 2 of each four, in the order of the bytes
 * of a lane, then 1 and 3. */
INLINE void chunk_of_pairs(int rows, const uint8_t *w, const int32_t *x, floats sums[][2][2]) {
    const __m512i table = _mm512_set_epi16( /* repeated: the permutation uses 5 bits of each 16-bit lane */
        0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0a0, 0xc0c0,
        0xc0e0, 0xc100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, 0xbf80, 0xc000, 0xc040, 0xc080,
        0xc0a0, 0xc0c0, 0xc0e0, 0xc100);
#pragma GCC unroll 4
    for (int k = 0; k < QUADS; k++, w += 64) {
        __m512i v = _mm512_loadu_si512(w);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            __m512bh w0 = (__m512bh)_mm512_permutexvar_epi16(i ? _mm512_srli_epi16(v, 8) : v, table);
            __m512bh w1 = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8 * i + 4), table);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32(x[(2 * k + i) * rows + r]);
                sums[r][0][i] = (floats)_mm512_dpbf16_ps((__m512)sums[r][0][i], w0, pair);
                sums[r][1][i] = (floats)_mm512_dpbf16_ps((__m512)sums[r][1][i], w1, pair);
            }
        }
    }
}
#else
INLINE void chunk_of_pairs(int rows, const uint8_t *w, const int32_t *x, floats sums[][2][2]) {}
#endif

/* Scales and middles of one group of a panel. */
INLINE void take_middles(const grouped *l, int64_t at, float *both) {
    take_facts(l, at, both);
    for (int j = 0; j < PANEL; j++) both[PANEL + j] += (l->bits == 4 ? 8.0f : 128.0f) * both[j];
}

/* y[r][0..31] of `rows` rows with one panel. x: rows written by `pack_row`; `totals`: each row's sums by group. */
INLINE void panel_of(int rows, int bits, int is_bf16, const grouped *l, int64_t panel, const void *x,
                     const float *totals, float *y) {
    int64_t chunk_bytes = CHUNK * PANEL * bits / 8, groups = (l->chunks + l->span - 1) / l->span;
    const uint8_t *w = l->codes + panel * l->chunks * chunk_bytes;
    float both[2 * PANEL];
    for (int i = 0; i < rows * PANEL; i++) y[i] = 0.0f;
    for (int64_t g = 0, c = 0; g < groups; g++) {
        take_middles(l, panel * groups + g, both);
        int64_t end = c + l->span < l->chunks ? c + l->span : l->chunks;
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int j = part * WIDTH; j < PANEL; j += HALF)
                    add_product(y + r * PANEL + j, load_floats(both + PANEL + j), totals[r * groups + g]);
            for (int64_t at = c; at < end; at++) {
                const uint8_t *codes = w + at * chunk_bytes + part * 4 * WIDTH;
                floats sums[MAX_ROWS][2][2];
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    sums[r][0][0] = sums[r][0][1] = sums[r][1][0] = sums[r][1][1] = (floats){0};
                if (is_bf16) chunk_of_pairs(rows, codes, (const int32_t *)x + at * CHUNK / 2 * rows, sums);
                else chunk_of(rows, bits, codes, (const float *)x + at * CHUNK * rows, sums);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < 2; v++) {
                        int j = v * HALF + part * WIDTH;
                        add_product(y + r * PANEL + j, sums[r][v][0] + sums[r][v][1], load_floats(both + j));
                    }
            }
        }
        c = end;
    }
}

INLINE void some_rows(int rows, int bits, int is_bf16, const grouped *l, int64_t panel, const void *x,
                      const float *totals, float *y) {
    switch (rows) {
    case 1: panel_of(1, bits, is_bf16, l, panel, x, totals, y); break;
    case 2: panel_of(2, bits, is_bf16, l, panel, x, totals, y); break;
#if WIDTH == 16
    case 3: panel_of(3, bits, is_bf16, l, panel, x, totals, y); break;
    case 4: panel_of(4, bits, is_bf16, l, panel, x, totals, y); break;
    case 5: panel_of(5, bits, is_bf16, l, panel, x, totals, y); break;
    default: panel_of(6, bits, is_bf16, l, panel, x, totals, y);
#endif
    }
}

static void rows_of_4_bits(int rows, const grouped *l, int64_t panel, const void *x, const float *totals, float *y) {
    some_rows(rows, 4, 0, l, panel, x, totals, y);
}

static void rows_of_4_bits_in_bf16(int rows, const grouped *l, int64_t panel, const void *x, const float *totals,
                                   float *y) {
    some_rows(rows, 4, HAS_BF16, l, panel, x, totals, y);
}

static void rows_of_8_bits(int rows, const grouped *l, int64_t panel, const void *x, const float *totals, float *y) {
    some_rows(rows, 8, 0, l, panel, x, totals, y);
}

/* Write a row of x in the layout that the products read, interleaved with the others of `rows` that are multiplied
 * together and padded with zeros, and compute the sums of its groups. */
INLINE void pack_row(const grouped *l, const void *x, int64_t at, int is_f32, int is_bf16, int64_t rows, void *to,
                     float *totals) {
    int64_t groups = (l->chunks + l->span - 1) / l->span;
    if (is_bf16)
        for (int64_t k = 0; k < l->chunks * CHUNK; k += 4) {
            uint16_t four[4] = {0};
            int64_t left = l->inputs - k;
            if (left > 0) memcpy(four, (const bf16 *)x + at + k, sizeof(bf16) * (size_t)(left < 4 ? left : 4));
            ((uint32_t *)to)[k / 2 * rows] = four[0] | (uint32_t)four[2] << 16;
            ((uint32_t *)to)[(k / 2 + 1) * rows] = four[1] | (uint32_t)four[3] << 16;
        }
    else
        for (int64_t k = 0; k < l->chunks * CHUNK; k++)
            ((float *)to)[k * rows] = k < l->inputs ? load_number(x, at + k, is_f32) : 0.0f;
    for (int64_t g = 0; g < groups; g++) totals[g] = group_total(l, x, at, g, is_f32);
}

/* Rows per product when `rows` are divided evenly among products; the last product may have fewer. */
INLINE int64_t rows_per_product(int64_t rows) {
    int64_t times = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return (rows + times - 1) / times;
}

INLINE void one_panel(const grouped *l, int64_t panel, int64_t start, int64_t rows, int is_bf16, const char *x,
                      int64_t row_bytes, const float *totals, void *out, const void *add, int flags) {
    float y[MAX_ROWS * PANEL];
    int64_t groups = (l->chunks + l->span - 1) / l->span, most = rows_per_product(rows);
    for (int64_t r = 0; r < rows; r += most) {
        int some = (int)(rows - r < most ? rows - r : most);
        const char *at = x + r * row_bytes;
        if (is_bf16) rows_of_4_bits_in_bf16(some, l, panel, at, totals + r * groups, y);
        else if (l->bits == 4) rows_of_4_bits(some, l, panel, at, totals + r * groups, y);
        else rows_of_8_bits(some, l, panel, at, totals + r * groups, y);
        for (int i = 0; i < some; i++) finish(l, panel, start + r + i, y + i * PANEL, out, add, flags);
    }
}

static int multiply_without_tiles(const grouped *l, const void *x, int64_t m, void *out, const void *add, int flags,
                                  int threads) {
    int64_t panels = (l->outputs + PANEL - 1) / PANEL, block = m < ROW_BLOCK ? m : ROW_BLOCK;
    int64_t groups = (l->chunks + l->span - 1) / l->span;
    int is_f32 = (flags & X_F32) != 0, is_bf16 = HAS_BF16 && l->bits == 4 && !is_f32;
    int64_t row_bytes = l->chunks * CHUNK * (is_bf16 ? 2 : 4);
    char *rows_of_x = malloc((size_t)(block * row_bytes) + 1);
    float *totals = malloc(sizeof(float) * (size_t)(block * groups) + 1);
    int failed = !rows_of_x || !totals;
    for (int64_t start = 0; !failed && start < m; start += block) {
        int64_t rows = m - start < block ? m - start : block, most = rows_per_product(rows);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                int64_t at = (start + r) * l->inputs, first = r - r % most;
                int64_t num_packed = rows - first < most ? rows - first : most;
                char *to = rows_of_x + first * row_bytes + r % most * 4;
                if (is_f32) pack_row(l, x, at, 1, 0, num_packed, to, totals + r * groups);
                else pack_row(l, x, at, 0, is_bf16, num_packed, to, totals + r * groups);
            }
#pragma omp for
            for (int64_t panel = 0; panel < panels; panel++)
                one_panel(l, panel, start, rows, is_bf16, rows_of_x, row_bytes, totals, out, add, flags);
        }
    }
    free(rows_of_x);
    free(totals);
    return failed;
}

/* Whether tiles give the bits of `multiply_without_tiles`, tried on generated numbers. */
static int do_tiles_agree(int bits) {
    enum { ROWS = 11, INPUTS = 2 * CHUNK, LENGTH = INPUTS * PANEL };
    uint8_t codes[LENGTH];
    bf16 x[ROWS * INPUTS];
    float facts[2 * 2 * PANEL], found[ROWS * PANEL], expected[ROWS * PANEL];
    uint32_t state = 1;
    for (int i = 0; i < LENGTH; i++) codes[i] = (uint8_t)((state = state * 1664525u + 1013904223u) >> 24);
    for (int i = 0; i < ROWS * INPUTS; i++) x[i] = to_bf16((float)(int32_t)(state = state * 1664525u + 1013904223u));
    for (int i = 0; i < 2 * 2 * PANEL; i++) facts[i] = (float)((state = state * 1664525u + 1013904223u) >> 8);
    grouped weight = {codes, facts, NULL, PANEL, INPUTS, INPUTS / CHUNK, 1, bits, 0};
    if (multiply_with_tiles(&weight, x, ROWS, found, NULL, OUT_F32, 1)) return 0;
    if (multiply_without_tiles(&weight, x, ROWS, expected, NULL, OUT_F32, 1)) return 0;
    return memcmp(found, expected, sizeof found) == 0;
}

/* Number of rows of bfloat16 from which this process uses tiles; 0: never. */
API int kvscope_min_tile_rows(void) {
    static int answer; /* 0: not known yet, 1: no, 2: yes. Threads that ask at the same time find the same. */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (!known) {
        known = may_use_tiles() && do_tiles_agree(4) && do_tiles_agree(8) ? 2 : 1;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known == 2 ? MIN_TILE_ROWS : 0;
}

/* x (m, inputs), out and add (m, outputs), all contiguous; add may be NULL. Returns non-zero if memory is exhausted. */
API int kvscope_grouped_float(const grouped *l, const void *x, int64_t m, void *out, const void *add, int flags,
                              int threads) {
    if (!(flags & X_F32) && m >= MIN_TILE_ROWS && kvscope_min_tile_rows())
        return multiply_with_tiles(l, x, m, out, add, flags, threads);
    return multiply_without_tiles(l, x, m, out, add, flags, threads);
}
