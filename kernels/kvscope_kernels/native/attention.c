/* Attention of one query token a request over its blocks, read where they lie. See paged_decode_attention.py. */
#include "decode.h"
#include "numbers.h"

enum { CHUNK = 64 };

/* Below AVX-512 vectors this wide are halves and quarters of themselves, and compiling them takes a minute. */
#ifdef __AVX512F__
typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t whole_lanes __attribute__((vector_size(64)));
typedef uint16_t half_lanes __attribute__((vector_size(32), aligned(2), may_alias));

INLINE lanes load_lanes(const void *p, int64_t i, int is_f32) {
    if (is_f32) return *(const lanes *)((const float *)p + i);
    whole_lanes wide = __builtin_convertvector(*(const half_lanes *)((const bf16 *)p + i), whole_lanes) << 16;
    return (lanes)wide;
}

/* Sums of neighbours: 8 of x, then 8 of y. */
INLINE lanes add_pairs(lanes x, lanes y) {
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* The sum of each of 16 vectors, in order. */
INLINE lanes sums_of(lanes *x) {
    for (int count = 8; count > 0; count /= 2)
        for (int i = 0; i < count; i++) x[i] = add_pairs(x[2 * i], x[2 * i + 1]);
    return x[0];
}

/* Scores of `heads` heads with 16 tokens, each WIDE vectors long: scores[h * CHUNK + t]. */
INLINE void scores_of_16(const attention *a, const float *q, int heads, int wide, const int64_t *rows, int is_f32,
                         float *scores) {
    lanes products[4][16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++) {
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) products[h][t] = (lanes){0};
        for (int i = 0; i < wide; i++) {
            lanes key = load_lanes(a->k_cache, rows[t] + 16 * i, is_f32);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) products[h][t] += key * *(const lanes *)(q + (h * wide + i) * 16);
        }
    }
    for (int h = 0; h < heads; h++) *(lanes *)(scores + h * CHUNK) = sums_of(products[h]);
}

INLINE void add_values(const attention *a, const float *weights, int heads, int wide, const int64_t *rows, int count,
                       int is_f32, float *sums) {
    for (int first = 0; first < wide; first += 4) {
        int some = wide - first < 4 ? wide - first : 4;
        lanes total[4][4];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < some; i++) total[h][i] = *(const lanes *)(sums + (h * wide + first + i) * 16);
        for (int t = 0; t < count; t++)
#pragma GCC unroll 4
            for (int i = 0; i < some; i++) {
                lanes value = load_lanes(a->v_cache, rows[t] + 16 * (first + i), is_f32);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) total[h][i] += value * weights[h * CHUNK + t];
            }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < some; i++) *(lanes *)(sums + (h * wide + first + i) * 16) = total[h][i];
    }
}

#else
INLINE void scores_of_16(const attention *a, const float *q, int heads, int wide, const int64_t *rows, int is_f32,
                         float *scores) {
    float parts[16];
    for (int t = 0; t < 16; t++)
        for (int h = 0; h < heads; h++) {
            for (int j = 0; j < 16; j++) parts[j] = 0.0f;
            for (int i = 0; i < 16 * wide; i += 16)
                for (int j = 0; j < 16; j++)
                    parts[j] += load_number(a->k_cache, rows[t] + i + j, is_f32) * q[h * 16 * wide + i + j];
            float sum = 0.0f;
            for (int j = 0; j < 16; j++) sum += parts[j];
            scores[h * CHUNK + t] = sum;
        }
}

INLINE void add_values(const attention *a, const float *weights, int heads, int wide, const int64_t *rows, int count,
                       int is_f32, float *sums) {
    for (int i = 0; i < wide; i++)
        for (int h = 0; h < heads; h++) {
            float *to = sums + (h * wide + i) * 16, total[16];
            memcpy(total, to, sizeof total);
            for (int t = 0; t < count; t++)
                for (int j = 0; j < 16; j++)
                    total[j] += load_number(a->v_cache, rows[t] + 16 * i + j, is_f32) * weights[h * CHUNK + t];
            memcpy(to, total, sizeof total);
        }
}
#endif

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

/* Weights of positions from `start` on, added up by blocks. */
static __attribute__((noinline)) void add_to_blocks(const attention *a, const float *weights, int64_t start, int count, float *blocks) {
    for (int t = 0; t < count;) {
        int64_t block = (start + t) / a->block_size, behind = (block + 1) * a->block_size - start;
        int stop = behind < count ? (int)behind : count;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int i = t; i < stop; i++) sum += weights[i];
        blocks[block] += sum;
        t = stop;
    }
}

static __attribute__((noinline)) void follow_top(float *blocks, int64_t count, float before, float top) {
    float factor = before == -INFINITY ? 0.0f : exponential(before - top);
    for (int64_t i = 0; i < count; i++) blocks[i] *= factor;
}

/* A head's sums as its part of the mean over all heads. Without sinks: what blocks have sums to 1. */
static __attribute__((noinline)) void add_shares(const attention *a, const float *blocks, int64_t count, float *shares) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) sum += blocks[i];
    float factor = sum > 0.0f ? 1.0f / (sum * (float)a->heads) : 0.0f;
    for (int64_t i = 0; i < count; i++) shares[i] += blocks[i] * factor;
}

/* `heads` (1..4) query heads from `first_head` on, all of one KV head; 16 * wide numbers each. */
INLINE void some_heads(const attention *a, int64_t request, int64_t kv_head, int64_t first_head, int heads, int wide,
                       int is_f32, float *room, float *shares) {
    int64_t dim = 16 * wide, length = a->seq_lens[request], num_blocks = (length + a->block_size - 1) / a->block_size;
    float *q = room, *sums = q + heads * dim, *scores = sums + heads * dim, top[4], total[4];
    float *blocks = scores + heads * CHUNK; /* of each head `num_blocks`, where there are shares */
    int64_t begin = a->window > 0 && length > a->window ? length - a->window : 0;
    for (int h = 0; h < heads; h++) {
        int64_t at = request * a->query_stride_t + (first_head + h) * a->query_stride_h;
        for (int64_t d = 0; d < dim; d++) q[h * dim + d] = a->scale * load_number(a->query, at + d, is_f32);
        top[h] = a->sinks ? a->sinks[first_head + h] : -INFINITY;
        total[h] = a->sinks ? 1.0f : 0.0f;
    }
    memset(sums, 0, sizeof(float) * (size_t)(heads * dim));
    if (shares) memset(blocks, 0, sizeof(float) * (size_t)(heads * num_blocks));
    const int32_t *table = a->tables + request * a->table_stride;
    for (int64_t start = begin; start < length; start += CHUNK) {
        int count = (int)(length - start < CHUNK ? length - start : CHUNK);
        int64_t keys[CHUNK], values[CHUNK];
        for (int t = 0; t < CHUNK; t++) { /* behind the last one, it again: read and not used */
            int64_t position = start + (t < count ? t : count - 1);
            int64_t block = table[position / a->block_size], slot = position % a->block_size;
            keys[t] = block * a->k_stride_b + slot * a->k_stride_s + kv_head * a->k_stride_h;
            values[t] = block * a->v_stride_b + slot * a->v_stride_s + kv_head * a->v_stride_h;
        }
        for (int t = 0; t < count; t += 16) scores_of_16(a, q, heads, wide, keys + t, is_f32, scores + t);
        for (int h = 0; h < heads; h++) {
            float before = top[h];
            soften(a, scores + h * CHUNK, count);
            to_weights(scores + h * CHUNK, count, dim, top + h, total + h, sums + h * dim);
            if (!shares) continue;
            if (top[h] > before) follow_top(blocks + h * num_blocks, start / a->block_size + 1, before, top[h]);
            add_to_blocks(a, scores + h * CHUNK, start, count, blocks + h * num_blocks);
        }
        add_values(a, scores, heads, wide, values, count, is_f32, sums);
    }
    for (int h = 0; h < heads; h++) {
        int64_t at = request * a->out_stride_t + (first_head + h) * a->out_stride_h;
        float factor = length > 0 ? 1.0f / total[h] : 0.0f;
        for (int64_t d = 0; d < dim; d++) store_number(a->out, at + d, is_f32, sums[h * dim + d] * factor);
        if (shares) add_shares(a, blocks + h * num_blocks, num_blocks, shares);
    }
}

INLINE void of_width(const attention *a, int64_t request, int64_t kv_head, int64_t head, int heads, int wide, int is_f32,
                     float *room, float *shares) {
    switch (heads) {
    case 1: some_heads(a, request, kv_head, head, 1, wide, is_f32, room, shares); break;
    case 2: some_heads(a, request, kv_head, head, 2, wide, is_f32, room, shares); break;
    case 3: some_heads(a, request, kv_head, head, 3, wide, is_f32, room, shares); break;
    default: some_heads(a, request, kv_head, head, 4, wide, is_f32, room, shares);
    }
}

static void one_kv_head(const attention *a, int64_t request, int64_t kv_head, float *room, float *shares) {
    int64_t group = a->heads / a->kv_heads, wide = a->head_dim / 16;
    for (int64_t first = 0; first < group; first += 4) {
        int some = (int)(group - first < 4 ? group - first : 4);
        int64_t head = kv_head * group + first;
        if (a->is_f32) of_width(a, request, kv_head, head, some, (int)wide, 1, room, shares);
        else if (wide == 4) of_width(a, request, kv_head, head, some, 4, 0, room, shares);
        else if (wide == 8) of_width(a, request, kv_head, head, some, 8, 0, room, shares);
        else of_width(a, request, kv_head, head, some, (int)wide, 0, room, shares);
    }
}

static int64_t most_blocks(const attention *a) {
    int64_t most = 0;
    for (int64_t r = 0; r < a->batch; r++) most = a->seq_lens[r] > most ? a->seq_lens[r] : most;
    return (most + a->block_size - 1) / a->block_size;
}

/* Of each request those of its KV heads, always in the same order. */
static void gather_shares(const attention *a, const float *of_pairs, int64_t width) {
    for (int64_t pair = 0; pair < a->batch * a->kv_heads; pair++) {
        float *to = a->shares + pair / a->kv_heads * a->shares_stride;
        for (int64_t i = 0; i < width; i++) to[i] += of_pairs[pair * width + i];
    }
}

/* Not 0: no memory. */
API int kvscope_decode(const attention *a) {
    int64_t pairs = a->batch * a->kv_heads, width = a->shares ? most_blocks(a) : 0;
    int64_t each = 4 * (2 * a->head_dim + CHUNK + width);
    int threads = a->threads < 1 ? 1 : a->threads;
    float *room = malloc(sizeof(float) * (size_t)(each * threads));
    float *of_pairs = width ? calloc((size_t)(pairs * width), sizeof(float)) : NULL;
    if (!room || (width && !of_pairs)) {
        free(room);
        free(of_pairs);
        return 1;
    }
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
        for (int64_t pair = 0; pair < pairs; pair++)
            one_kv_head(a, pair / a->kv_heads, pair % a->kv_heads, own, of_pairs ? of_pairs + pair * width : NULL);
    }
    if (of_pairs) gather_shares(a, of_pairs, width);
    free(room);
    free(of_pairs);
    return 0;
}
