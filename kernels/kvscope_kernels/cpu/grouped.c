/* x @ weight.T with weights of 4 or 8 bits in groups, and activations rounded to 8 bits with a scale for each CHUNK.
 *
 * With c the chunks of inputs and g(c) the group of a chunk, a[m, c] = max|x[m, c]| / 127 and q = round(x / a):
 *     out[m, n] = sum_c a[m, c] * (scale[n, g(c)] * sum_{k in c} q[m, k] * code[n, k] + low[n, g(c)] * sum_{k in c} q[m, k])
 *                 + bias[n] + add[m, n].
 * Inner sums are integers and the outer sum has a fixed order, so a row's result does not depend on the other rows. An
 * infinity or NaN in a row gives NaN.
 *
 * With the layout of grouped.h, one lane of a dot product instruction computes 4 products of an unsigned and a signed
 * byte.
 */
#include "grouped.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LANES_16 1
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES_8 1
#endif

enum { MAX_ROWS = 6, ROW_BLOCK = 96 };

typedef struct {
    float scale, sum; /* sum of the rounded inputs, times the scale */
} chunk_facts;

INLINE chunk_facts round_chunk(const void *x, int64_t at, int n, int is_f32, int8_t *q) {
    int32_t sum;
    float scale = round_to_bytes(x, at, n, CHUNK, is_f32, q, &sum);
    chunk_facts facts = {scale, scale * (float)sum};
    return facts;
}

INLINE void round_row(const void *x, int64_t at, const grouped *l, int is_f32, int8_t *q, chunk_facts *facts) {
    int64_t whole = l->inputs / CHUNK;
    for (int64_t c = 0; c < whole; c++) facts[c] = round_chunk(x, at + c * CHUNK, CHUNK, is_f32, q + c * CHUNK);
    if (whole < l->chunks)
        facts[whole] = round_chunk(x, at + whole * CHUNK, (int)(l->inputs - whole * CHUNK), is_f32, q + whole * CHUNK);
}

/* y[r][0..31] of `rows` rows (1..MAX_ROWS) with one panel. The q and facts of the rows follow one another. */
#ifdef LANES_16
INLINE void two_vectors(int bits, const uint8_t *w, __m512i *first, __m512i *second) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    __m512i both = _mm512_loadu_si512(w);
    *first = bits == 4 ? _mm512_and_si512(both, low_bits) : both;
    *second = bits == 4 ? _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits) : _mm512_loadu_si512(w + 64);
}

INLINE void panel_of(int rows, int bits, const grouped *l, int64_t panel, const int8_t *q, const chunk_facts *facts,
                     float *out) {
    int64_t step = bits * CHUNK / 8, groups = (l->chunks + l->span - 1) / l->span;
    const uint8_t *w = l->codes + panel * l->chunks * PANEL * step;
    __m512 y[MAX_ROWS][2];
    float both[2 * PANEL];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) y[r][0] = y[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0, c = 0; g < groups; g++) {
        take_facts(l, panel * groups + g, both);
        int64_t end = c + l->span < l->chunks ? c + l->span : l->chunks;
        for (; c < end; c++) {
            __m512i acc[MAX_ROWS][2];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int k = 0; k < QUADS; k++, w += 16 * bits) {
                __m512i w0, w1;
                two_vectors(bits, w, &w0, &w1);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    int32_t four;
                    memcpy(&four, q + (r * l->chunks + c) * CHUNK + 4 * k, 4);
                    __m512i x = _mm512_set1_epi32(four);
                    acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], w0, x);
                    acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], w1, x);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                chunk_facts known = facts[r * l->chunks + c];
                __m512 factor = _mm512_set1_ps(known.scale), sum = _mm512_set1_ps(known.sum);
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++) {
                    __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(both + 16 * v), factor);
                    y[r][v] = _mm512_fmadd_ps(_mm512_loadu_ps(both + PANEL + 16 * v), sum, y[r][v]);
                    y[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][v]), scale, y[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(out + r * PANEL, y[r][0]);
        _mm512_storeu_ps(out + r * PANEL + 16, y[r][1]);
    }
}
#else
INLINE void add_chunk(const int32_t *sums, chunk_facts known, const float *both, float *y) {
#pragma omp simd
    for (int j = 0; j < PANEL; j++)
        y[j] += known.sum * both[PANEL + j] + (float)sums[j] * (both[j] * known.scale);
}

#ifdef LANES_8
/* 4 bits: two products fit into 16 bits, four into 32. */
INLINE void sums_of_4_bits(const uint8_t *w, const int8_t *q, int32_t *sums) {
    const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i acc[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int k = 0; k < QUADS; k++, w += 64) {
        int32_t four;
        memcpy(&four, q + 4 * k, 4);
        __m256i x = _mm256_set1_epi32(four);
        for (int h = 0; h < 2; h++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * h));
            __m256i low = _mm256_and_si256(both, low_bits), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
            acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones));
            acc[2 + h] = _mm256_add_epi32(acc[2 + h], _mm256_madd_epi16(_mm256_maddubs_epi16(high, x), ones));
        }
    }
    for (int c = 0; c < 4; c++) _mm256_storeu_si256((__m256i *)(sums + 8 * c), acc[c]);
}
#else
INLINE void sums_of_4_bits(const uint8_t *w, const int8_t *q, int32_t *sums) {
    for (int j = 0; j < PANEL; j++) sums[j] = 0;
    for (int k = 0; k < QUADS; k++, w += 64)
        for (int j = 0; j < PANEL / 2; j++)
            for (int i = 0; i < 4; i++) {
                sums[j] += (w[4 * j + i] & 15) * q[4 * k + i];
                sums[PANEL / 2 + j] += (w[4 * j + i] >> 4) * q[4 * k + i];
            }
}
#endif

INLINE void sums_of_8_bits(const uint8_t *w, const int8_t *q, int32_t *sums) {
    for (int j = 0; j < PANEL; j++) sums[j] = 0;
    for (int k = 0; k < QUADS; k++, w += 128)
        for (int j = 0; j < PANEL; j++)
            for (int i = 0; i < 4; i++) sums[j] += w[4 * j + i] * q[4 * k + i];
}

INLINE void chunk_of(int rows, int bits, const uint8_t *w, const int8_t *q, int64_t stride, const chunk_facts *facts,
                     int64_t chunks, const float *both, float *y) {
    for (int r = 0; r < rows; r++) {
        int32_t sums[PANEL];
        if (bits == 4) sums_of_4_bits(w, q + r * stride, sums);
        else sums_of_8_bits(w, q + r * stride, sums);
        add_chunk(sums, facts[r * chunks], both, y + r * PANEL);
    }
}

INLINE void panel_of(int rows, int bits, const grouped *l, int64_t panel, const int8_t *q, const chunk_facts *facts,
                     float *y) {
    int64_t chunk_bytes = CHUNK * PANEL * bits / 8, groups = (l->chunks + l->span - 1) / l->span;
    const uint8_t *w = l->codes + panel * l->chunks * chunk_bytes;
    float both[2 * PANEL];
    for (int i = 0; i < rows * PANEL; i++) y[i] = 0.0f;
    for (int64_t g = 0, c = 0; g < groups; g++) {
        take_facts(l, panel * groups + g, both);
        int64_t end = c + l->span < l->chunks ? c + l->span : l->chunks;
        for (; c < end; c++, w += chunk_bytes)
            chunk_of(rows, bits, w, q + c * CHUNK, l->chunks * CHUNK, facts + c, l->chunks, both, y);
    }
}
#endif

INLINE void some_rows(int rows, int bits, const grouped *l, int64_t panel, const int8_t *q, const chunk_facts *facts,
                      float *y) {
    switch (rows) {
    case 1: panel_of(1, bits, l, panel, q, facts, y); break;
    case 2: panel_of(2, bits, l, panel, q, facts, y); break;
    case 3: panel_of(3, bits, l, panel, q, facts, y); break;
    case 4: panel_of(4, bits, l, panel, q, facts, y); break;
    default: panel_of(6, bits, l, panel, q, facts, y);
    }
}

static void rows_of_4_bits(int rows, const grouped *l, int64_t panel, const int8_t *q, const chunk_facts *facts,
                           float *y) {
    some_rows(rows, 4, l, panel, q, facts, y);
}

static void rows_of_8_bits(int rows, const grouped *l, int64_t panel, const int8_t *q, const chunk_facts *facts,
                           float *y) {
    some_rows(rows, 8, l, panel, q, facts, y);
}

INLINE int rows_at_once(int64_t left) { return left >= MAX_ROWS ? MAX_ROWS : left > 4 ? 4 : (int)left; }

INLINE void one_panel(const grouped *l, int64_t panel, int64_t start, int64_t rows, const int8_t *q,
                      const chunk_facts *facts, void *out, const void *add, int flags) {
    float y[MAX_ROWS * PANEL];
    for (int64_t r = 0; r < rows;) {
        int some = rows_at_once(rows - r);
        (l->bits == 4 ? rows_of_4_bits : rows_of_8_bits)(some, l, panel, q + r * l->chunks * CHUNK,
                                                         facts + r * l->chunks, y);
        for (int i = 0; i < some; i++) finish(l, panel, start + r + i, y + i * PANEL, out, add, flags);
        r += some;
    }
}

/* x (m, inputs), out and add (m, outputs), all contiguous; add may be NULL. Returns non-zero if memory is exhausted. */
API int kvscope_grouped(const grouped *l, const void *x, int64_t m, void *out, const void *add, int flags,
                        int threads) {
    int64_t panels = (l->outputs + PANEL - 1) / PANEL, block = m < ROW_BLOCK ? m : ROW_BLOCK;
    int8_t *q = malloc((size_t)(block * l->chunks * CHUNK) + 1);
    chunk_facts *facts = malloc(sizeof(chunk_facts) * (size_t)(block * l->chunks) + 1);
    int failed = !q || !facts;
    for (int64_t start = 0; !failed && start < m; start += block) {
        int64_t rows = m - start < block ? m - start : block;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                int64_t at = (start + r) * l->inputs, own = r * l->chunks;
                if (flags & X_F32) round_row(x, at, l, 1, q + own * CHUNK, facts + own);
                else round_row(x, at, l, 0, q + own * CHUNK, facts + own);
            }
#pragma omp for
            for (int64_t panel = 0; panel < panels; panel++)
                one_panel(l, panel, start, rows, q, facts, out, add, flags);
        }
    }
    free(q);
    free(facts);
    return failed;
}
