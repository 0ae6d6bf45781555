/* Attention of one query token per request over its blocks, read in place. See paged_decode_attention.py. */
#include "decode.h"
#include "numbers.h"

enum { CHUNK = 64, MAX_HEADS = 16 };

/* Without AVX-512, vectors this wide are split into halves or quarters, and compiling them takes a minute. */
#ifdef __AVX512F__
typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t whole_lanes __attribute__((vector_size(64)));
typedef uint16_t half_lanes __attribute__((vector_size(32), aligned(2), may_alias));

INLINE lanes load_lanes(const void *p, int64_t i, int is_f32) {
    if (is_f32) return *(const lanes *)((const float *)p + i);
    whole_lanes wide = __builtin_convertvector(*(const half_lanes *)((const bf16 *)p + i), whole_lanes) << 16;
    return (lanes)wide;
}

/* Sums of adjacent elements: 8 of x, then 8 of y. */
INLINE lanes add_pairs(lanes x, lanes y) {
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Horizontal sums of 16 vectors, in order. */
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

/* Convert scores to weights (online softmax): `top` and `total` are updated, and `sums` are rescaled to a new top. */
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

/* Add the weights of positions from `start` on to the sums of their blocks: 16 at once for blocks of 16 tokens, with
 * one division per call. */
static __attribute__((noinline)) void add_to_blocks(const attention *a, const float *weights, int64_t start, int count,
                                                    float *blocks) {
#ifdef __AVX512F__
    if (a->block_size == 16 && start % 16 == 0 && count == CHUNK) { /* four blocks at once */
        const lanes *of = (const lanes *)weights;
        lanes sums = add_pairs(add_pairs(of[0], of[1]), add_pairs(of[2], of[3]));
        sums = add_pairs(sums, sums);
        sums = add_pairs(sums, sums);
        for (int i = 0; i < 4; i++) blocks[start / 16 + i] += sums[i];
        return;
    }
#endif
    int64_t block = start / a->block_size, left = (block + 1) * a->block_size - start;
    for (int t = 0; t < count; block++, left = a->block_size) {
        int stop = left < count - t ? t + (int)left : count;
        float sum = 0.0f;
        for (; t + 16 <= stop; t += 16) {
            float of_16 = 0.0f;
#pragma omp simd reduction(+ : of_16)
            for (int i = 0; i < 16; i++) of_16 += weights[t + i];
            sum += of_16;
        }
        for (; t < stop; t++) sum += weights[t];
        blocks[block] += sum;
    }
}

static __attribute__((noinline)) void follow_top(float *blocks, int64_t count, float before, float top) {
    float factor = before == -INFINITY ? 0.0f : exponential(before - top);
    for (int64_t i = 0; i < count; i++) blocks[i] *= factor;
}

/* Add one head's block sums to the mean over all heads. Sinks are excluded, so the shares of all blocks sum to 1. */
static __attribute__((noinline)) void add_shares(const attention *a, const float *blocks, int64_t count, float *shares) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) sum += blocks[i];
    float factor = sum > 0.0f ? 1.0f / (sum * (float)a->heads) : 0.0f;
    for (int64_t i = 0; i < count; i++) shares[i] += blocks[i] * factor;
}

/* Intermediate results of some query heads of one KV head. */
typedef struct {
    float *q, *sums, *scores, *blocks; /* heads of head_dim, of value_dim, of CHUNK, and with shares of `num_blocks` */
    float top[MAX_HEADS], total[MAX_HEADS];
    int64_t num_blocks;
} state;

/* Process `heads` (1..4) heads from `first` on over `count` tokens from `start` on. Keys and values have 16 * wide
 * elements. */
INLINE void some_heads(const attention *a, state *of, int first, int heads, int wide, int value_wide, int is_f32,
                       const int64_t *keys, const int64_t *values, int64_t start, int count) {
    int64_t dim = 16 * value_wide;
    float *sums = of->sums + first * dim, *scores = of->scores, *blocks = of->blocks + first * of->num_blocks;
    for (int t = 0; t < count; t += 16)
        scores_of_16(a, of->q + first * 16 * wide, heads, wide, keys + t, is_f32, scores + t);
    for (int h = 0; h < heads; h++) {
        float *top = of->top + first + h, before = *top;
        soften(a, scores + h * CHUNK, count);
        to_weights(scores + h * CHUNK, count, dim, top, of->total + first + h, sums + h * dim);
        if (!a->shares) continue;
        if (*top > before) follow_top(blocks + h * of->num_blocks, start / a->block_size + 1, before, *top);
        add_to_blocks(a, scores + h * CHUNK, start, count, blocks + h * of->num_blocks);
    }
    add_values(a, scores, heads, value_wide, values, count, is_f32, sums);
}

INLINE void of_width(const attention *a, state *of, int first, int heads, int wide, int value_wide, int is_f32,
                     const int64_t *keys, const int64_t *values, int64_t start, int count) {
    switch (heads) {
    case 1: some_heads(a, of, first, 1, wide, value_wide, is_f32, keys, values, start, count); break;
    case 2: some_heads(a, of, first, 2, wide, value_wide, is_f32, keys, values, start, count); break;
    case 3: some_heads(a, of, first, 3, wide, value_wide, is_f32, keys, values, start, count); break;
    default: some_heads(a, of, first, 4, wide, value_wide, is_f32, keys, values, start, count);
    }
}

static void over_tokens(const attention *a, state *of, int heads, const int64_t *keys, const int64_t *values,
                        int64_t start, int count) {
    int wide = (int)a->head_dim / 16, value_wide = (int)a->value_dim / 16;
    for (int first = 0; first < heads; first += 4) {
        int some = heads - first < 4 ? heads - first : 4;
        if (a->is_f32) of_width(a, of, first, some, wide, value_wide, 1, keys, values, start, count);
        else if (wide == 4 && value_wide == 4) of_width(a, of, first, some, 4, 4, 0, keys, values, start, count);
        else if (wide == 8 && value_wide == 8) of_width(a, of, first, some, 8, 8, 0, keys, values, start, count);
        else of_width(a, of, first, some, wide, value_wide, 0, keys, values, start, count);
    }
}

/* `heads` (1..MAX_HEADS) query heads of one KV head from `first_head` on; each token is read once for all. */
static void one_part(const attention *a, int64_t request, int64_t kv_head, int64_t first_head, int heads,
                     float *workspace, float *shares) {
    int64_t length = a->seq_lens[request], begin = first_seen(length - 1, a->window, a->is_chunked);
    state of = {.q = workspace, .num_blocks = (length + a->block_size - 1) / a->block_size};
    of.sums = of.q + heads * a->head_dim;
    of.scores = of.sums + heads * a->value_dim;
    of.blocks = of.scores + 4 * CHUNK;
    for (int h = 0; h < heads; h++) {
        int64_t at = request * a->query_stride_t + (first_head + h) * a->query_stride_h;
        for (int64_t d = 0; d < a->head_dim; d++)
            of.q[h * a->head_dim + d] = a->scale * load_number(a->query, at + d, a->is_f32);
        of.top[h] = a->sinks ? a->sinks[first_head + h] : -INFINITY;
        of.total[h] = a->sinks ? 1.0f : 0.0f;
    }
    memset(of.sums, 0, sizeof(float) * (size_t)(heads * a->value_dim));
    if (shares) memset(of.blocks, 0, sizeof(float) * (size_t)(heads * of.num_blocks));
    const int32_t *table = a->tables + request * a->table_stride;
    for (int64_t start = begin; start < length; start += CHUNK) {
        int count = (int)(length - start < CHUNK ? length - start : CHUNK);
        int64_t keys[CHUNK], values[CHUNK];
        for (int t = 0; t < CHUNK; t++) { /* past the end, the last one again: it is read but not used */
            int64_t position = start + (t < count ? t : count - 1);
            int64_t block = table[position / a->block_size], slot = position % a->block_size;
            keys[t] = block * a->k_stride_b + slot * a->k_stride_s + kv_head * a->k_stride_h;
            values[t] = block * a->v_stride_b + slot * a->v_stride_s + kv_head * a->v_stride_h;
        }
        over_tokens(a, &of, heads, keys, values, start, count);
    }
    for (int h = 0; h < heads; h++) {
        int64_t at = request * a->out_stride_t + (first_head + h) * a->out_stride_h;
        float factor = length > 0 ? 1.0f / of.total[h] : 0.0f;
        for (int64_t d = 0; d < a->value_dim; d++)
            store_number(a->out, at + d, a->is_f32, of.sums[h * a->value_dim + d] * factor);
        if (shares) add_shares(a, of.blocks + h * of.num_blocks, of.num_blocks, shares);
    }
}

static int64_t max_blocks(const attention *a) {
    int64_t most = 0;
    for (int64_t r = 0; r < a->batch; r++) most = a->seq_lens[r] > most ? a->seq_lens[r] : most;
    return (most + a->block_size - 1) / a->block_size;
}

/* Merge the parts of each request, always in the same order. */
static void gather_shares(const attention *a, const float *of_parts, int64_t parts, int64_t width) {
    for (int64_t part = 0; part < a->batch * parts; part++) {
        float *to = a->shares + part / parts * a->shares_stride;
        for (int64_t i = 0; i < width; i++) to[i] += of_parts[part * width + i];
    }
}

/* Returns non-zero if memory is exhausted. */
API int kvscope_decode(const attention *a) {
    int64_t group = a->heads / a->kv_heads, cuts = (group + MAX_HEADS - 1) / MAX_HEADS, parts = a->kv_heads * cuts;
    int64_t width = a->shares ? max_blocks(a) : 0, most = group < MAX_HEADS ? group : MAX_HEADS;
    int64_t each = most * (a->head_dim + a->value_dim + width) + 4 * CHUNK;
    int threads = a->threads < 1 ? 1 : a->threads;
    float *workspace = malloc(sizeof(float) * (size_t)(each * threads));
    float *of_parts = width ? calloc((size_t)(a->batch * parts * width), sizeof(float)) : NULL;
    if (!workspace || (width && !of_parts)) {
        free(workspace);
        free(of_parts);
        return 1;
    }
    int64_t next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *own = workspace;
        if (threads > 1) {
            int64_t mine;
#pragma omp atomic capture
            mine = next++;
            own = workspace + mine * each;
        }
#pragma omp for schedule(dynamic)
        for (int64_t part = 0; part < a->batch * parts; part++) {
            int64_t kv_head = part % parts / cuts, first = part % cuts * MAX_HEADS;
            int heads = (int)(group - first < MAX_HEADS ? group - first : MAX_HEADS);
            one_part(a, part / parts, kv_head, kv_head * group + first, heads, own,
                     of_parts ? of_parts + part * width : NULL);
        }
    }
    if (of_parts) gather_shares(a, of_parts, parts, width);
    free(workspace);
    free(of_parts);
    return 0;
}
