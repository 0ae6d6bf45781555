/* Attention of one query token a request over its blocks, read where they lie. See paged_decode_attention.py. */
#include "numbers.h"

enum { CHUNK = 64 };

typedef struct {
    const void *query, *k_cache, *v_cache;
    const int32_t *tables, *seq_lens;
    const float *sinks; /* (heads,) or NULL */
    void *out;
    int64_t query_stride_t, query_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h;
    int64_t table_stride, out_stride_t, out_stride_h;
    int64_t batch, heads, kv_heads, head_dim, value_dim, block_size, window; /* window: 0 for all */
    float scale, softcap;                                                     /* softcap: 0 for none */
    int32_t is_f32, threads;
} attention;

/* The group's heads over tokens of one chunk: scores[g * CHUNK + t]. */
INLINE void chunk_scores(const attention *a, const float *q, int group, int64_t dim, const int64_t *rows, int count,
                         int is_f32, float *scores) {
    for (int t = 0; t < count; t++)
        for (int g = 0; g < group; g++) {
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < dim; d++) sum += q[g * dim + d] * load_number(a->k_cache, rows[t] + d, is_f32);
            scores[g * CHUNK + t] = sum;
        }
}

INLINE void add_values(const attention *a, const float *weights, int group, int64_t dim, const int64_t *rows, int count,
                       int is_f32, float *sums) {
    for (int g = 0; g < group; g++)
        for (int t = 0; t < count; t++) {
            float weight = weights[g * CHUNK + t];
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) sums[g * dim + d] += weight * load_number(a->v_cache, rows[t] + d, is_f32);
        }
}

INLINE void soften(const attention *a, float *scores, int count) {
    if (a->softcap > 0.0f)
        for (int t = 0; t < count; t++) scores[t] = a->softcap * tanhf(scores[t] / a->softcap);
}

/* Scores to weights; `top` and `total` go on, `sums` follow a new top. */
INLINE void to_weights(float *scores, int count, int64_t dim, float *top, float *total, float *sums) {
    float most = *top;
#pragma omp simd reduction(max : most)
    for (int t = 0; t < count; t++) most = scores[t] > most ? scores[t] : most;
    if (most > *top) {
        float factor = *top == -INFINITY ? 0.0f : exponential(*top - most);
        *total *= factor;
        for (int64_t d = 0; d < dim; d++) sums[d] *= factor;
        *top = most;
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < count; t++) {
        scores[t] = exponential(scores[t] - most);
        sum += scores[t];
    }
    *total += sum;
}

INLINE void one_group(const attention *a, int64_t request, int64_t kv_head, int64_t dim, int64_t value_dim, int is_f32,
                      float *room) {
    int group = (int)(a->heads / a->kv_heads);
    float *q = room, *sums = q + group * dim, *scores = sums + group * value_dim;
    float *top = scores + group * CHUNK, *total = top + group;
    int64_t first_head = kv_head * group, length = a->seq_lens[request];
    int64_t begin = a->window > 0 && length > a->window ? length - a->window : 0;
    for (int g = 0; g < group; g++) {
        int64_t at = request * a->query_stride_t + (first_head + g) * a->query_stride_h;
        for (int64_t d = 0; d < dim; d++) q[g * dim + d] = a->scale * load_number(a->query, at + d, is_f32);
        top[g] = a->sinks ? a->sinks[first_head + g] : -INFINITY;
        total[g] = a->sinks ? 1.0f : 0.0f;
    }
    memset(sums, 0, sizeof(float) * (size_t)(group * value_dim));
    const int32_t *table = a->tables + request * a->table_stride;
    for (int64_t start = begin; start < length; start += CHUNK) {
        int count = (int)(length - start < CHUNK ? length - start : CHUNK);
        int64_t keys[CHUNK], values[CHUNK];
        for (int t = 0; t < count; t++) {
            int64_t block = table[(start + t) / a->block_size], slot = (start + t) % a->block_size;
            keys[t] = block * a->k_stride_b + slot * a->k_stride_s + kv_head * a->k_stride_h;
            values[t] = block * a->v_stride_b + slot * a->v_stride_s + kv_head * a->v_stride_h;
        }
        chunk_scores(a, q, group, dim, keys, count, is_f32, scores);
        for (int g = 0; g < group; g++) {
            soften(a, scores + g * CHUNK, count);
            to_weights(scores + g * CHUNK, count, value_dim, top + g, total + g, sums + g * value_dim);
        }
        add_values(a, scores, group, value_dim, values, count, is_f32, sums);
    }
    for (int g = 0; g < group; g++) {
        int64_t at = request * a->out_stride_t + (first_head + g) * a->out_stride_h;
        float factor = length > 0 ? 1.0f / total[g] : 0.0f;
        for (int64_t d = 0; d < value_dim; d++) store_number(a->out, at + d, is_f32, sums[g * value_dim + d] * factor);
    }
}

static void any_group(const attention *a, int64_t request, int64_t kv_head, float *room) {
    int64_t dim = a->head_dim;
    if (a->is_f32) one_group(a, request, kv_head, dim, a->value_dim, 1, room);
    else if (dim == 64 && a->value_dim == 64) one_group(a, request, kv_head, 64, 64, 0, room);
    else if (dim == 128 && a->value_dim == 128) one_group(a, request, kv_head, 128, 128, 0, room);
    else one_group(a, request, kv_head, dim, a->value_dim, 0, room);
}

/* Not 0: no memory. */
API int kvscope_decode(const attention *a) {
    int64_t group = a->heads / a->kv_heads, pairs = a->batch * a->kv_heads;
    int64_t each = group * (a->head_dim + a->value_dim + CHUNK + 2);
    each = (each + 63) / 64 * 64;
    int threads = a->threads < 1 ? 1 : a->threads;
    float *room = malloc(sizeof(float) * (size_t)(each * threads));
    if (!room) return 1;
    int64_t next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *own = room;
        if (threads > 1) {
            int64_t mine;
#pragma omp atomic capture
            mine = next++;
            own = room + mine * each;
        }
#pragma omp for schedule(dynamic)
        for (int64_t pair = 0; pair < pairs; pair++) any_group(a, pair / a->kv_heads, pair % a->kv_heads, own);
    }
    free(room);
    return 0;
}
