/* Small operations of a layer, in one pass each: RMSNorm, gated activation, and rotary embedding with the write into
 * the cache. Computed in float32 and rounded once. */
#include "numbers.h"
#include "rotation.h"

int kvscope_linear(const void *l, const void *x, int64_t m, void *out, const void *add, int flags, int threads);
int kvscope_min_tile_rows(void);

/* 1 / sqrt(mean(x^2) + eps) of `size` elements. */
INLINE float norm_factor(const void *x, int64_t at, int64_t size, float eps, int is_f32) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) {
        float v = load_number(x, at + i, is_f32);
        sum += v * v;
    }
    return 1.0f / sqrtf(sum / (float)size + eps);
}

/* rows of x (rows, size) / sqrt(mean(x^2) + eps) * weight. */
API int kvscope_rms_norm(const void *x, const float *weight, float eps, void *out, int64_t rows, int64_t size,
                         int x_f32, int out_f32) {
    for (int64_t r = 0; r < rows; r++) {
        float factor = norm_factor(x, r * size, size, eps, x_f32);
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

/* Rotate one head; with a norm, multiply it by `factor` and `norm` (dim,) first. */
INLINE void turn(const void *x, int64_t at, const float *norm, float factor, const void *cos, const void *sin,
                 int64_t t, int64_t dim, int is_f32, int is_normed, void *out, int64_t to) {
    int64_t half = dim / 2;
#pragma omp simd
    for (int64_t d = 0; d < half; d++) {
        float low = load_number(x, at + d, is_f32), high = load_number(x, at + half + d, is_f32);
        if (is_normed) low *= factor * norm[d], high *= factor * norm[half + d];
        float y = low * load_number(cos, t + d, is_f32) + high * load_number(sin, t + d, is_f32);
        float z = high * load_number(cos, t + half + d, is_f32) + low * load_number(sin, t + half + d, is_f32);
        store_number(out, to + d, is_f32, y);
        store_number(out, to + half + d, is_f32, z);
    }
}

INLINE void turn_head(const rotation *r, int64_t token, int64_t head, int64_t dim, int is_f32, int is_normed, void *out,
                      int64_t to) {
    int64_t at = (token * (r->num_heads + 2 * r->kv_heads) + head) * dim;
    const float *norm = is_normed ? r->norm + head * dim : NULL;
    float factor = is_normed ? norm_factor(r->heads, at, dim, r->eps, is_f32) : 1.0f;
    turn(r->heads, at, norm, factor, r->cos, r->sin, token * r->turn_stride, dim, is_f32, is_normed, out, to);
}

INLINE void rotate_tokens(const rotation *r, int is_f32, int is_normed) {
    int64_t dim = r->dim, bytes = is_f32 ? 4 : 2, behind = r->num_heads + r->kv_heads, width = behind + r->kv_heads;
    for (int64_t t = 0; t < r->tokens; t++) {
        for (int64_t h = 0; h < r->num_heads; h++)
            turn_head(r, t, h, dim, is_f32, is_normed, r->query, (t * r->num_heads + h) * dim);
        if (r->slots[t] < 0) continue;
        int64_t block = r->slots[t] / r->block_size, slot = r->slots[t] % r->block_size;
        for (int64_t h = 0; h < r->kv_heads; h++) {
            int64_t k_to = block * r->k_stride_b + slot * r->k_stride_s + h * r->k_stride_h;
            int64_t v_to = block * r->v_stride_b + slot * r->v_stride_s + h * r->v_stride_h;
            turn_head(r, t, r->num_heads + h, dim, is_f32, is_normed, r->k_cache, k_to);
            const char *value = (const char *)r->heads + (t * width + behind + h) * dim * bytes;
            memcpy((char *)r->v_cache + v_to * bytes, value, (size_t)(dim * bytes));
        }
    }
}

API int kvscope_rotate_write(const rotation *r) {
    if (r->is_f32 && r->norm) rotate_tokens(r, 1, 1);
    else if (r->is_f32) rotate_tokens(r, 1, 0);
    else if (r->norm) rotate_tokens(r, 0, 1);
    else rotate_tokens(r, 0, 0);
    return 0;
}

/* Self-test: run all instructions once on generated inputs. Returns 0 if the sums are right. */
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
    if (fabsf(out[0] - 0.7310586f) > 1e-5f) return 4;
    kvscope_min_tile_rows(); /* runs their instructions; without them or with other bits, nothing uses them */
    return 0;
}
