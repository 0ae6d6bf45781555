/* Layout of a weight of 4 or 8 bits in groups on a CPU, for grouped.c and grouped_float.c.
 *
 * Codes are stored as [outputs / 32][inputs / 4][64] bytes with 4 bits, [outputs / 32][inputs / 4][32][4] with 8: a
 * lane of 32 bits holds 4 inputs of an output. With 4 bits, a byte holds an output of 0..15 in its low half and one of
 * 16..31 in its high half. Scales and lows are stored as [outputs / 32][groups][2][32]. Padding after the last input is 0.
 */
#ifndef KVSCOPE_GROUPED_H
#define KVSCOPE_GROUPED_H

#include "numbers.h"

enum { PANEL = 32, CHUNK = 32, QUADS = CHUNK / 4 };
enum { X_F32 = 1, OUT_F32 = 2, ADD_F32 = 4 };

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef struct {
    const uint8_t *codes;
    const void *facts; /* scales and lows: float, or half where is_half */
    const float *bias; /* padded to whole panels, or NULL */
    int64_t outputs, inputs, chunks;
    int64_t span; /* number of chunks per group */
    int32_t bits, is_half;
} grouped;

INLINE float from_half(uint16_t x) { /* finite */
    uint32_t bits = (uint32_t)(x & 0x7fffu) << 13, sign = (uint32_t)(x & 0x8000u) << 16;
    float y;
    memcpy(&y, &bits, 4);
    y *= 0x1p112f;
    memcpy(&bits, &y, 4);
    bits |= sign;
    memcpy(&y, &bits, 4);
    return y;
}

/* Scales and lows of one group of a panel, as floats. */
INLINE void take_facts(const grouped *l, int64_t at, float *both) {
    if (l->is_half) {
        const uint16_t *from = (const uint16_t *)l->facts + at * 2 * PANEL;
#ifdef __AVX512F__
        for (int j = 0; j < 2 * PANEL; j += 16)
            _mm512_storeu_ps(both + j, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + j))));
#else
        for (int j = 0; j < 2 * PANEL; j++) both[j] = from_half(from[j]);
#endif
    } else {
        memcpy(both, (const float *)l->facts + at * 2 * PANEL, sizeof(float) * 2 * PANEL);
    }
}

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_MASKS 1
INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
#endif

/* Sum of the inputs of group `g` in the row of x from `at` on. */
INLINE float group_total(const grouped *l, const void *x, int64_t at, int64_t g, int is_f32) {
    int64_t k = g * l->span * CHUNK, end = k + l->span * CHUNK;
    if (end > l->inputs) end = l->inputs;
#ifdef HAS_MASKS
    __m512 sum = _mm512_setzero_ps();
    for (; k < end; k += 16) {
        __mmask16 inside = end - k < 16 ? (__mmask16)((1u << (end - k)) - 1) : (__mmask16)0xffff;
        sum = _mm512_add_ps(sum, is_f32 ? _mm512_maskz_loadu_ps(inside, (const float *)x + at + k)
                                        : widen(_mm256_maskz_loadu_epi16(inside, (const bf16 *)x + at + k)));
    }
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lanes[16] = {0.0f};
    for (; k + 16 <= end; k += 16)
        for (int j = 0; j < 16; j++) lanes[j] += load_number(x, at + k + j, is_f32);
    for (int j = 0; k + j < end; j++) lanes[j] += load_number(x, at + k + j, is_f32);
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
    return lanes[0];
#endif
}

/* Inlined with constants for the frequent cases, so that compilers vectorize them. */
INLINE void finish_with(int64_t count, const float *y, const float *bias, void *out, const void *add, int64_t at,
                        int flags) {
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
        float value = y[j] + (bias ? bias[j] : 0.0f);
        if (add) value += load_number(add, at + j, flags & ADD_F32);
        store_number(out, at + j, flags & OUT_F32, value);
    }
}

INLINE void finish(const grouped *l, int64_t panel, int64_t m, float *y, void *out, const void *add, int flags) {
    int64_t first = panel * PANEL, count = l->outputs - first < PANEL ? l->outputs - first : PANEL;
    int64_t at = m * l->outputs + first;
    const float *bias = l->bias ? l->bias + first : NULL;
    if (count < PANEL || bias || flags & (OUT_F32 | ADD_F32)) finish_with(count, y, bias, out, add, at, flags);
    else if (add) finish_with(PANEL, y, NULL, out, add, at, 0);
    else finish_with(PANEL, y, NULL, out, NULL, at, 0);
}

#endif
