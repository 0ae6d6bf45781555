/* Number formats and the exponential, in plain C that compilers vectorise. */
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

/* To the nearest, ties to even, as torch rounds; NaN stays NaN. */
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)(x != x ? 0x7fc0u : rounded);
}

INLINE float load_number(const void *p, int64_t i, int is_f32) {
    return is_f32 ? ((const float *)p)[i] : from_bf16(((const bf16 *)p)[i]);
}

INLINE void store_number(void *p, int64_t i, int is_f32, float x) {
    if (is_f32) ((float *)p)[i] = x;
    else ((bf16 *)p)[i] = to_bf16(x);
}

/* e^x to 2 units in the last place; 0 below -87, NaN of NaN. Only for x <= 88. */
INLINE float exponential(float x) {
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: its last bits are the nearest whole number */
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
