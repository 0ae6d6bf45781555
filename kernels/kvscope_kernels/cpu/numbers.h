/* Number formats and the exponential function, in plain C that compilers vectorize. */
#ifndef KVSCOPE_NUMBERS_H
#define KVSCOPE_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define API __attribute__((visibility("default")))

typedef uint16_t bf16;

INLINE float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Round to nearest, ties to even, like torch; NaN stays NaN. */
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)(x != x ? 0x7fc0u : rounded);
}

/* The first position that a query at `position` sees; window 0 means all. See `AttentionArgs.is_chunked`. */
INLINE int64_t first_seen(int64_t position, int64_t window, int is_chunked) {
    if (window <= 0 || position < window) return 0;
    return is_chunked ? position / window * window : position + 1 - window;
}

INLINE float load_number(const void *p, int64_t i, int is_f32) {
    return is_f32 ? ((const float *)p)[i] : from_bf16(((const bf16 *)p)[i]);
}

INLINE void store_number(void *p, int64_t i, int is_f32, float x) {
    if (is_f32) ((float *)p)[i] = x;
    else ((bf16 *)p)[i] = to_bf16(x);
}

/* Round `n` elements of x from `at` on, padded with zeros to `length` (at most 64), to integer multiples of a scale.
 * Returns the scale: the largest absolute value divided by 127. With an infinity or NaN, returns NaN and
 * writes zeros. */
INLINE float round_to_bytes(const void *x, int64_t at, int n, int length, int is_f32, int8_t *q, int32_t *sum) {
    float values[64], largest = 0.0f, poison = 0.0f;
    for (int i = 0; i < n; i++) values[i] = load_number(x, at + i, is_f32);
    for (int i = n; i < length; i++) values[i] = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
    for (int i = 0; i < length; i++) {
        float size = fabsf(values[i]);
        largest = size > largest ? size : largest;
        poison += values[i] * 0.0f; /* NaN if any element is infinite or NaN */
    }
    float inverse = largest > 1e-30f && poison == 0.0f ? 127.0f / largest : 0.0f;
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < length; i++) {
        float shifted = (poison == 0.0f ? values[i] : 0.0f) * inverse + 12582912.0f; /* rounds to the nearest integer */
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        q[i] = (int8_t)(bits - 0x4b400000);
        total += bits - 0x4b400000;
    }
    *sum = total;
    return largest / 127.0f + poison;
}

/* e^x to 2 units in the last place; 0 below -87, NaN for NaN. Only for x <= 88. */
INLINE float exponential(float x) {
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the last bits become the nearest integer */
    float whole = shifted - 12582912.0f;
    float rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float y = 1.0f / 720.0f;
    y = y * rest + 1.0f / 120.0f;
    y = y * rest + 1.0f / 24.0f;
    y = y * rest + 1.0f / 6.0f;
    y = y * rest + 0.5f;
    y = y * rest + 1.0f;
    y = y * rest + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (int32_t)(((uint32_t)bits - 0x4b400000u + 127u) << 23);
    float power;
    memcpy(&power, &bits, 4);
    float result = y * power;
    return x < -87.0f ? 0.0f : (x != x ? x : result);
}

#endif
