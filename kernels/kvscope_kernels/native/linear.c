/* x @ weight.T with weights of 8 bits and a scale for each output, activations rounded to 8 bits a row.
 *
 * With s_m = max|x[m]| / 127:  out[m, n] = s_m * scale[n] * sum_k round(x[m, k] / s_m) * w[n, k] + bias[n] + add[m, n].
 * The sum is one of whole numbers, so a row's result does not hang on the rows beside it, nor on the CPU. A row with
 * an infinity or NaN in it gives NaN.
 *
 * Weights lie as [outputs / 64][inputs / 4][64][4] bytes, each with 128 added: 4 products of an unsigned and a signed
 * byte are one lane of a dot product instruction.
 */
#include "numbers.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LANES_16 1
#endif

enum { PANEL = 64, ROWS = 6, ROW_BLOCK = 96 };
enum { X_F32 = 1, OUT_F32 = 2, ADD_F32 = 4 };

typedef struct {
    const uint8_t *weight;
    const float *scale; /* padded to whole panels */
    const float *bias;  /* padded alike, or NULL */
    int64_t outputs, inputs, padded_inputs;
} linear;

typedef struct {
    float scale;
    int32_t sum;
} row_facts;

static row_facts quantize_row(const void *x, int64_t at, int64_t n, int64_t padded, int is_f32, int8_t *q) {
    float largest = 0.0f, poison = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
    for (int64_t i = 0; i < n; i++) {
        float v = load_number(x, at + i, is_f32);
        float size = fabsf(v);
        largest = size > largest ? size : largest;
        poison += v * 0.0f; /* NaN of an infinity and of NaN */
    }
    float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int32_t sum = 0;
    if (!(poison == 0.0f)) inverse = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        float v = poison == 0.0f ? load_number(x, at + i, is_f32) : 0.0f;
        float shifted = v * inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        int32_t whole = bits - 0x4b400000;
        q[i] = (int8_t)whole;
        sum += whole;
    }
    for (int64_t i = n; i < padded; i++) q[i] = 0;
    row_facts facts = {largest / 127.0f + poison, sum};
    return facts;
}

/* sums[r][0..63] of `rows` rows (1..ROWS) with one panel. */
#ifdef LANES_16
INLINE void panel_sums(int rows, const uint8_t *w, int64_t quads, const int8_t *q, int64_t stride, int32_t *sums) {
    __m512i acc[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) acc[r][c] = _mm512_setzero_si512();
    for (int64_t k = 0; k < quads; k++, w += 256) {
        __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
        __m512i w2 = _mm512_loadu_si512(w + 128), w3 = _mm512_loadu_si512(w + 192);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, q + r * stride + 4 * k, 4);
            __m512i x = _mm512_set1_epi32(four);
            acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], w0, x);
            acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], w1, x);
            acc[r][2] = _mm512_dpbusd_epi32(acc[r][2], w2, x);
            acc[r][3] = _mm512_dpbusd_epi32(acc[r][3], w3, x);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) _mm512_storeu_si512(sums + r * PANEL + 16 * c, acc[r][c]);
}
#else
INLINE void panel_sums(int rows, const uint8_t *w, int64_t quads, const int8_t *q, int64_t stride, int32_t *sums) {
    memset(sums, 0, sizeof(int32_t) * PANEL * (size_t)rows);
    for (int64_t k = 0; k < quads; k++, w += 256)
        for (int r = 0; r < rows; r++) {
            const int8_t *x = q + r * stride + 4 * k;
            int32_t x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
            int32_t *to = sums + r * PANEL;
            for (int j = 0; j < PANEL; j++)
                to[j] += w[4 * j] * x0 + w[4 * j + 1] * x1 + w[4 * j + 2] * x2 + w[4 * j + 3] * x3;
        }
}
#endif

static void some_rows(int rows, const uint8_t *w, int64_t quads, const int8_t *q, int64_t stride, int32_t *sums) {
    switch (rows) {
    case 1: panel_sums(1, w, quads, q, stride, sums); break;
    case 2: panel_sums(2, w, quads, q, stride, sums); break;
    case 3: panel_sums(3, w, quads, q, stride, sums); break;
    case 4: panel_sums(4, w, quads, q, stride, sums); break;
    case 5: panel_sums(5, w, quads, q, stride, sums); break;
    default: panel_sums(6, w, quads, q, stride, sums);
    }
}

INLINE void finish(const linear *l, int64_t panel, int64_t m, row_facts facts, const int32_t *sums, void *out,
                   const void *add, int flags) {
    int64_t first = panel * PANEL, count = l->outputs - first < PANEL ? l->outputs - first : PANEL;
    int64_t at = m * l->outputs + first;
    float y[PANEL];
    for (int j = 0; j < PANEL; j++) y[j] = (float)(sums[j] - 128 * facts.sum) * (facts.scale * l->scale[first + j]);
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

/* x (m, inputs), out and add (m, outputs), all contiguous; add may be NULL. Not 0: no memory. */
API int kvscope_linear(const linear *l, const void *x, int64_t m, void *out, const void *add, int flags, int threads) {
    int64_t stride = l->padded_inputs, panels = (l->outputs + PANEL - 1) / PANEL;
    int64_t block = m < ROW_BLOCK ? m : ROW_BLOCK;
    int8_t *q = malloc((size_t)(block * stride));
    row_facts *facts = malloc(sizeof(row_facts) * (size_t)block);
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
                int is_f32 = flags & X_F32;
                int64_t at = (start + r) * l->inputs;
                facts[r] = is_f32 ? quantize_row(x, at, l->inputs, stride, 1, q + r * stride)
                                  : quantize_row(x, at, l->inputs, stride, 0, q + r * stride);
            }
#pragma omp for
            for (int64_t panel = 0; panel < panels; panel++) {
                int32_t sums[ROWS * PANEL];
                const uint8_t *w = l->weight + panel * PANEL * stride;
                for (int64_t r = 0; r < rows; r += ROWS) {
                    int some = (int)(rows - r < ROWS ? rows - r : ROWS);
                    some_rows(some, w, stride / 4, q + r * stride, stride, sums);
                    for (int i = 0; i < some; i++)
                        finish(l, panel, start + r + i, facts[r + i], sums + i * PANEL, out, add, flags);
                }
            }
        }
    }
    free(q);
    free(facts);
    return 0;
}
