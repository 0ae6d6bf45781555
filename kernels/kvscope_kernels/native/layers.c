/* The small operations of a layer, in one pass each: RMSNorm, the gated activation, rotation with the write into the
 * cache. All in float32, rounded once. */
#include "numbers.h"

int kvscope_linear(const void *l, const void *x, int64_t m, void *out, const void *add, int flags, int threads);

/* rows of x (rows, size) / sqrt(mean(x^2) + eps) * weight. */
API int kvscope_rms_norm(const void *x, const float *weight, float eps, void *out, int64_t rows, int64_t size,
                         int x_f32, int out_f32) {
    for (int64_t r = 0; r < rows; r++) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) {
            float v = load_number(x, r * size + i, x_f32);
            sum += v * v;
        }
        float factor = 1.0f / sqrtf(sum / (float)size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float y = load_number(x, r * size + i, x_f32) * factor * weight[i];
            store_number(out, r * size + i, out_f32, y);
        }
    }
    return 0;
}

/* act(both[:, :size]) * both[:, size:]; SiLU is kind 0, GELU by tanh kind 1. */
API int kvscope_gate(const void *both, void *out, int64_t rows, int64_t size, int kind, int is_f32) {
    float slope = kind == 0 ? 1.0f : 1.5957691216057308f, cubic = kind == 0 ? 0.0f : 0.044715f;
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = r * 2 * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float gate = load_number(both, at + i, is_f32), up = load_number(both, at + size + i, is_f32);
            float power = -slope * (gate + cubic * gate * gate * gate);
            power = power > 87.0f ? 87.0f : power;
            store_number(out, r * size + i, is_f32, gate / (1.0f + exponential(power)) * up);
        }
    }
    return 0;
}

INLINE void turn(const void *x, int64_t at, const void *cos, const void *sin, int64_t t, int64_t dim, int is_f32,
                 void *out, int64_t to) {
    int64_t half = dim / 2;
#pragma omp simd
    for (int64_t d = 0; d < half; d++) {
        float low = load_number(x, at + d, is_f32), high = load_number(x, at + half + d, is_f32);
        float y = low * load_number(cos, t + d, is_f32) + high * load_number(sin, t + d, is_f32);
        float z = high * load_number(cos, t + half + d, is_f32) + low * load_number(sin, t + half + d, is_f32);
        store_number(out, to + d, is_f32, y);
        store_number(out, to + half + d, is_f32, z);
    }
}

INLINE void rotate_tokens(const void *heads, const void *cos, const void *sin, void *k_cache, void *v_cache,
                          const int64_t *slots, void *query, int64_t tokens, int64_t num_heads, int64_t kv_heads,
                          int64_t dim, int64_t turn_stride, int64_t block_size,
                          int64_t k_stride_b, int64_t k_stride_s, int64_t k_stride_h, int64_t v_stride_b,
                          int64_t v_stride_s, int64_t v_stride_h, int is_f32) {
    int64_t width = (num_heads + 2 * kv_heads) * dim, bytes = is_f32 ? 4 : 2;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t h = 0; h < num_heads; h++)
            turn(heads, t * width + h * dim, cos, sin, t * turn_stride, dim, is_f32, query, (t * num_heads + h) * dim);
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / block_size, slot = slots[t] % block_size;
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t key = t * width + (num_heads + h) * dim, value = key + kv_heads * dim;
            int64_t k_to = block * k_stride_b + slot * k_stride_s + h * k_stride_h;
            int64_t v_to = block * v_stride_b + slot * v_stride_s + h * v_stride_h;
            turn(heads, key, cos, sin, t * turn_stride, dim, is_f32, k_cache, k_to);
            memcpy((char *)v_cache + v_to * bytes, (const char *)heads + value * bytes, (size_t)(dim * bytes));
        }
    }
}

/* heads (tokens, num_heads + 2 * kv_heads, dim) contiguous; cos and signed sin (tokens, dim) with one stride. */
API int kvscope_rotate_write(const void *heads, const void *cos, const void *sin, void *k_cache, void *v_cache,
                             const int64_t *slots, void *query, int64_t tokens, int64_t num_heads, int64_t kv_heads,
                             int64_t dim, int64_t turn_stride, int64_t block_size,
                             int64_t k_stride_b, int64_t k_stride_s, int64_t k_stride_h, int64_t v_stride_b,
                             int64_t v_stride_s, int64_t v_stride_h, int is_f32) {
#define CALL(F32)                                                                                                  \
    rotate_tokens(heads, cos, sin, k_cache, v_cache, slots, query, tokens, num_heads, kv_heads, dim, turn_stride, \
                  block_size, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, F32)
    if (is_f32) CALL(1);
    else CALL(0);
    return 0;
}

/* All instructions once, on numbers made here: 0 when the sums come out. */
API int kvscope_trial(void) {
    enum { INPUTS = 8, GROUP = 64, OUTPUTS = 64 };
    static uint8_t weight[GROUP * OUTPUTS];
    float scale[OUTPUTS], x[INPUTS], out[OUTPUTS], norm[OUTPUTS], ones[OUTPUTS], both[2 * OUTPUTS];
    for (int i = 0; i < GROUP * OUTPUTS; i++) weight[i] = 129;
    for (int i = 0; i < OUTPUTS; i++) scale[i] = ones[i] = both[i] = both[OUTPUTS + i] = 1.0f;
    for (int i = 0; i < INPUTS; i++) x[i] = 2.0f;
    struct {
        const void *w, *s, *b;
        int64_t outputs, inputs, groups;
    } parts = {weight, scale, NULL, OUTPUTS, INPUTS, 1};
    if (kvscope_linear(&parts, x, 1, out, NULL, 3, 1)) return 1;
    for (int i = 0; i < OUTPUTS; i++)
        if (fabsf(out[i] - 16.0f) > 1e-3f) return 2;
    kvscope_rms_norm(out, ones, 0.0f, norm, 1, OUTPUTS, 1, 1);
    if (fabsf(norm[OUTPUTS - 1] - 1.0f) > 1e-5f) return 3;
    kvscope_gate(both, out, 1, OUTPUTS, 0, 1);
    return fabsf(out[0] - 0.7310586f) > 1e-5f ? 4 : 0;
}
