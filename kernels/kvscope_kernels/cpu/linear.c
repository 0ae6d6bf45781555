/* x @ weight.T with weights and activations rounded to 8 bits, both with one scale per GROUP inputs of a row.
 *
 * With g the groups, a[m, g] = max|x[m, g]| / 127 and s[n, g] the weights' scales:
 *     out[m, n] = sum_g a[m, g] * s[n, g] * sum_{k in g} round(x[m, k] / a[m, g]) * w[n, k] + bias[n] + add[m, n].
 * Inner sums are integers and the outer sum has a fixed order, so a row's result does not depend on the other rows. An
 * infinity or NaN in a row gives NaN.
 *
 * Weights are stored as [outputs / 64][inputs / 4][64][4] bytes, each with 128 added: one lane of a dot product
 * instruction computes 4 products of an unsigned and a signed byte. Scales are stored as [outputs / 64][groups][64].
 */
#include "numbers.h"
#include <sys/mman.h>
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LANES_16 1
#endif

enum { PANEL = 64, GROUP = 64, QUADS = GROUP / 4, ROWS = 4, ROW_BLOCK = 96 };
enum { X_F32 = 1, OUT_F32 = 2, ADD_F32 = 4 };

typedef struct {
    const uint8_t *weight;
    const float *scale;
    const float *bias; /* padded to whole panels, or NULL */
    int64_t outputs, inputs, groups;
} linear;

typedef struct {
    float scale;
    int32_t offset; /* negated contribution to the sum of the 128 added to each weight */
} group_facts;

INLINE group_facts round_group(const void *x, int64_t at, int n, int is_f32, int8_t *q) {
    int32_t sum;
    float scale = round_to_bytes(x, at, n, GROUP, is_f32, q, &sum);
    group_facts facts = {scale, -128 * sum};
    return facts;
}

INLINE void round_row(const void *x, int64_t at, const linear *l, int is_f32, int8_t *q, group_facts *facts) {
    int64_t whole = l->inputs / GROUP;
    for (int64_t g = 0; g < whole; g++) facts[g] = round_group(x, at + g * GROUP, GROUP, is_f32, q + g * GROUP);
    if (whole < l->groups)
        facts[whole] = round_group(x, at + whole * GROUP, (int)(l->inputs - whole * GROUP), is_f32, q + whole * GROUP);
}

/* y[r][0..63] of `rows` rows (1..ROWS) with one panel. */
#ifdef LANES_16
INLINE void panel_of(int rows, const uint8_t *w, const float *scale, int64_t groups, const int8_t *q,
                     const group_facts *facts, float *y) {
    for (int i = 0; i < rows * PANEL; i++) y[i] = 0.0f;
    for (int64_t g = 0; g < groups; g++, scale += PANEL) {
        __m512i acc[ROWS][4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = _mm512_set1_epi32(facts[r * groups + g].offset);
        for (int k = 0; k < QUADS; k++, w += 256) {
            __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
            __m512i w2 = _mm512_loadu_si512(w + 128), w3 = _mm512_loadu_si512(w + 192);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, q + (r * groups + g) * GROUP + 4 * k, 4);
                __m512i x = _mm512_set1_epi32(four);
                acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], w0, x);
                acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], w1, x);
                acc[r][2] = _mm512_dpbusd_epi32(acc[r][2], w2, x);
                acc[r][3] = _mm512_dpbusd_epi32(acc[r][3], w3, x);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512 factor = _mm512_set1_ps(facts[r * groups + g].scale);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                float *to = y + r * PANEL + 16 * c;
                __m512 both = _mm512_mul_ps(_mm512_loadu_ps(scale + 16 * c), factor);
                __m512 more = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][c]), both, _mm512_loadu_ps(to));
                _mm512_storeu_ps(to, more);
            }
        }
    }
}
#else
INLINE void panel_of(int rows, const uint8_t *w, const float *scale, int64_t groups, const int8_t *q,
                     const group_facts *facts, float *y) {
    for (int i = 0; i < rows * PANEL; i++) y[i] = 0.0f;
    for (int64_t g = 0; g < groups; g++, scale += PANEL, w += GROUP * PANEL)
        for (int r = 0; r < rows; r++) {
            group_facts known = facts[r * groups + g];
            const int8_t *x = q + (r * groups + g) * GROUP;
            int32_t sums[PANEL];
            for (int j = 0; j < PANEL; j++) sums[j] = known.offset;
            for (int k = 0; k < QUADS; k++)
                for (int j = 0; j < PANEL; j++) {
                    const uint8_t *four = w + 4 * (k * PANEL + j);
                    for (int i = 0; i < 4; i++) sums[j] += four[i] * x[4 * k + i];
                }
            for (int j = 0; j < PANEL; j++) y[r * PANEL + j] += (float)sums[j] * (scale[j] * known.scale);
        }
}
#endif

static void some_rows(int rows, const uint8_t *w, const float *scale, int64_t groups, const int8_t *q,
                      const group_facts *facts, float *y) {
    switch (rows) {
    case 1: panel_of(1, w, scale, groups, q, facts, y); break;
    case 2: panel_of(2, w, scale, groups, q, facts, y); break;
    case 3: panel_of(3, w, scale, groups, q, facts, y); break;
    default: panel_of(4, w, scale, groups, q, facts, y);
    }
}

INLINE void finish(const linear *l, int64_t panel, int64_t m, float *y, void *out, const void *add, int flags) {
    int64_t first = panel * PANEL, count = l->outputs - first < PANEL ? l->outputs - first : PANEL;
    int64_t at = m * l->outputs + first;
    if (l->bias)
        for (int j = 0; j < PANEL; j++) y[j] += l->bias[first + j];
    if (add && (flags & ADD_F32))
        for (int64_t j = 0; j < count; j++) y[j] += ((const float *)add)[at + j];
    else if (add)
        for (int64_t j = 0; j < count; j++) y[j] += from_bf16(((const bf16 *)add)[at + j]);
    if (flags & OUT_F32)
        memcpy((float *)out + at, y, sizeof(float) * (size_t)count);
    else
        for (int64_t j = 0; j < count; j++) ((bf16 *)out)[at + j] = to_bf16(y[j]);
}

INLINE void one_panel(const linear *l, int64_t panel, int64_t start, int64_t rows, const int8_t *q,
                      const group_facts *facts, void *out, const void *add, int flags) {
    float y[ROWS * PANEL];
    const uint8_t *w = l->weight + panel * PANEL * l->groups * GROUP;
    const float *scale = l->scale + panel * PANEL * l->groups;
    for (int64_t r = 0; r < rows; r += ROWS) {
        int some = (int)(rows - r < ROWS ? rows - r : ROWS);
        some_rows(some, w, scale, l->groups, q + r * l->groups * GROUP, facts + r * l->groups, y);
        for (int i = 0; i < some; i++) finish(l, panel, start + r + i, y + i * PANEL, out, add, flags);
    }
}

/* x (m, inputs), out and add (m, outputs), all contiguous; add may be NULL. Returns non-zero if memory is exhausted. */
API int kvscope_linear(const linear *l, const void *x, int64_t m, void *out, const void *add, int flags, int threads) {
    int64_t panels = (l->outputs + PANEL - 1) / PANEL, block = m < ROW_BLOCK ? m : ROW_BLOCK;
    int8_t *q = malloc((size_t)(block * l->groups * GROUP) + 1);
    group_facts *facts = malloc(sizeof(group_facts) * (size_t)(block * l->groups) + 1);
    if (!q || !facts) {
        free(q);
        free(facts);
        return 1;
    }
    for (int64_t start = 0; start < m; start += block) {
        int64_t rows = m - start < block ? m - start : block;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                int64_t at = (start + r) * l->inputs, own = r * l->groups;
                if (flags & X_F32) round_row(x, at, l, 1, q + own * GROUP, facts + own);
                else round_row(x, at, l, 0, q + own * GROUP, facts + own);
            }
#pragma omp for
            for (int64_t panel = 0; panel < panels; panel++)
                one_panel(l, panel, start, rows, q, facts, out, add, flags);
        }
    }
    free(q);
    free(facts);
    return 0;
}

/* Request large pages for all whole ones in [p, p + bytes). Returns non-zero if the system has none. */
API int kvscope_large_pages(void *p, int64_t bytes) {
    const uintptr_t page = (uintptr_t)1 << 21;
    uintptr_t first = ((uintptr_t)p + page - 1) / page * page, last = ((uintptr_t)p + (uintptr_t)bytes) / page * page;
    return last > first ? madvise((void *)first, last - first, MADV_HUGEPAGE) : 0;
}

API int kvscope_has_dot_product(void) {
#ifdef LANES_16
    return 1;
#else
    return 0;
#endif
}
