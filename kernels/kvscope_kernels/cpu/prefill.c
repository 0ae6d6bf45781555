/* Attention of runs of new tokens over their requests' blocks, read in place. See paged_prefill_attention.py.
 *
 * The rows of a tile are some queries of one request times the heads of one KV head. Keys are processed in tiles that
 * start at multiples of KEYS, wherever the run starts, and each product has ROWS rows, padded with zeros: a row's
 * result depends neither on the other rows nor on how its run was split.
 *
 * Elements are stored in words of 32 bits: one float each, or a pair of bfloat16 if the CPU multiplies pairs. Sums are
 * float.
 */
#include "numbers.h"
#if defined(__AVX512F__)
enum { LANES = 16, WIDE = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, WIDE = 2 };
#else
enum { LANES = 4, WIDE = 2 };
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define PAIRS 1
#else
#define PAIRS 0
#endif

enum { ROWS = 6, COLUMNS = LANES * WIDE, KEYS = 64, TILE_ROWS = 192, LEAST_ROWS = 48 };

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t word;

typedef struct {
    const void *query, *k_cache, *v_cache;
    const int32_t *tables, *query_start, *seq_lens;
    const float *sinks; /* (heads,) or NULL */
    void *out;
    int64_t query_stride_t, query_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h;
    int64_t table_stride, out_stride_t, out_stride_h;
    int64_t batch, heads, kv_heads, head_dim, value_dim, block_size, window; /* window: 0 for all */
    float scale, softcap;                                                    /* softcap: 0 for none */
    int32_t is_f32, is_chunked, threads; /* is_chunked: the window is a chunk of the text */
} prefill;

/* Workspace of one thread. */
typedef struct {
    int64_t depth, width, key_words; /* words of a query or key; value_dim padded to COLUMNS; words of KEYS elements */
    word *queries;                   /* [rows][depth] */
    word *keys;                      /* [depth][KEYS] */
    word *values;                    /* [key_words][width] */
    word *weights;                   /* [ROWS][key_words] */
    float *scores;                   /* [ROWS][KEYS] */
    float *sums;                     /* [rows][width] */
    float *top, *total;              /* [rows] */
} workspace;

typedef struct {
    int64_t request, kv_head, first, count; /* queries of the request */
    int64_t before;                         /* tokens of the request before its first query */
    const int32_t *table;
} tile;

INLINE word word_of(float x) {
    word y;
    memcpy(&y, &x, 4);
    return y;
}

/* Element i of a row, or its elements 2 i and 2 i + 1. */
INLINE word take(const void *from, int64_t at, int64_t i, int is_f32, int pairs) {
    if (!pairs) return word_of(load_number(from, at + i, is_f32));
    word both;
    memcpy(&both, (const bf16 *)from + at + 2 * i, 4);
    return both;
}

INLINE lanes add_product(lanes sum, lanes column, word x, int pairs) {
#if PAIRS
    if (pairs) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)column, (__m512bh)_mm512_set1_epi32((int)x));
#endif
    float number;
    memcpy(&number, &x, 4);
    return sum + column * number;
}

/* c[r][j] = sum_k a[r][k] b[k][j], added to c if `adds`; ROWS rows, COLUMNS columns. */
INLINE void multiply(const word *a, int64_t a_stride, const word *b, int64_t b_stride, int64_t depth, float *c,
                     int64_t c_stride, int adds, int pairs) {
    lanes sums[ROWS][WIDE], columns[WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; i++)
            sums[r][i] = adds ? *(const lanes *)(c + r * c_stride + i * LANES) : (lanes){0};
    for (int64_t k = 0; k < depth; k++) {
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; i++) columns[i] = *(const lanes *)(b + k * b_stride + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++) sums[r][i] = add_product(sums[r][i], columns[i], a[r * a_stride + k], pairs);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; i++) *(lanes *)(c + r * c_stride + i * LANES) = sums[r][i];
}

INLINE void load_queries(const prefill *a, const tile *t, int64_t rows, workspace *own, int pairs) {
    int64_t group = a->heads / a->kv_heads, full = (rows + ROWS - 1) / ROWS * ROWS;
    for (int64_t row = 0; row < rows; row++) {
        int64_t token = a->query_start[t->request] + t->first + row / group, head = t->kv_head * group + row % group;
        int64_t at = token * a->query_stride_t + head * a->query_stride_h;
        for (int64_t k = 0; k < own->depth; k++)
            own->queries[row * own->depth + k] = take(a->query, at, k, a->is_f32, pairs);
        own->top[row] = a->sinks ? a->sinks[head] : -INFINITY;
        own->total[row] = a->sinks ? 1.0f : 0.0f;
    }
    memset(own->queries + rows * own->depth, 0, sizeof(word) * (size_t)((full - rows) * own->depth));
    memset(own->sums, 0, sizeof(float) * (size_t)(full * own->width));
}

/* Load keys and values of positions [from, to) of the tile at `start`; the others become zero. */
INLINE void load_tokens(const prefill *a, const tile *t, int64_t start, int64_t from, int64_t to, workspace *own,
                        int is_f32, int pairs) {
    if (from > start || to < start + KEYS) {
        memset(own->keys, 0, sizeof(word) * (size_t)(own->depth * KEYS));
        memset(own->values, 0, sizeof(word) * (size_t)(own->key_words * own->width));
    }
    for (int64_t position = from; position < to; position++) {
        int64_t block = t->table[position / a->block_size], slot = position % a->block_size, column = position - start;
        int64_t key = block * a->k_stride_b + slot * a->k_stride_s + t->kv_head * a->k_stride_h;
        int64_t value = block * a->v_stride_b + slot * a->v_stride_s + t->kv_head * a->v_stride_h;
        for (int64_t k = 0; k < own->depth; k++)
            own->keys[k * KEYS + column] = take(a->k_cache, key, k, is_f32, pairs);
        if (!pairs) {
            word *to_row = own->values + column * own->width;
            for (int64_t d = 0; d < a->value_dim; d++) to_row[d] = take(a->v_cache, value, d, is_f32, 0);
        } else { /* two elements per word, the first in the low half */
            word *to_row = own->values + column / 2 * own->width;
            const bf16 *row = (const bf16 *)a->v_cache + value;
            if (column % 2 == 0)
                for (int64_t d = 0; d < a->value_dim; d++) to_row[d] = row[d];
            else
                for (int64_t d = 0; d < a->value_dim; d++) to_row[d] |= (word)row[d] << 16;
        }
    }
}

INLINE void soften(float softcap, float *scores) {
    for (int t = 0; t < KEYS; t++) {
        float e = exponential(-2.0f * fabsf(scores[t]) / softcap);
        scores[t] = copysignf(softcap * (1.0f - e) / (1.0f + e), scores[t]);
    }
}

/* Convert a row's scores to weights (online softmax), 0 outside [low, high): `top` and `total` are updated, and `sums`
 * are rescaled to a new top. */
INLINE void to_weights(const prefill *a, float *scores, int64_t low, int64_t high, float *top, float *total,
                       float *sums, int64_t width, word *weights, int pairs) {
    for (int t = 0; t < KEYS; t++) scores[t] *= a->scale;
    if (a->softcap > 0.0f) soften(a->softcap, scores);
    if (low > 0 || high < KEYS)
        for (int t = 0; t < KEYS; t++) scores[t] = t >= low && t < high ? scores[t] : -INFINITY;
    float most = *top, sum = 0.0f;
#pragma omp simd reduction(max : most)
    for (int t = 0; t < KEYS; t++) most = scores[t] > most ? scores[t] : most;
    if (most > *top) {
        float factor = *top == -INFINITY ? 0.0f : exponential(*top - most);
        *total *= factor;
        for (int64_t d = 0; d < width; d++) sums[d] *= factor;
        *top = most;
    }
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < KEYS; t++) {
        scores[t] = exponential(scores[t] - most);
        sum += scores[t];
    }
    *total += sum;
    if (!pairs) memcpy(weights, scores, sizeof(float) * KEYS);
#if PAIRS
    else
        for (int t = 0; t < KEYS; t += 32)
            _mm512_storeu_si512(weights + t / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(scores + t + 16),
                                                                             _mm512_loadu_ps(scores + t)));
#endif
}

/* Compute the weights of ROWS rows from `row` on; 0 for padding and for rows that see nothing of the tile. */
INLINE void rows_to_weights(const prefill *a, const tile *t, int64_t start, int64_t row, int64_t rows, workspace *own,
                            int pairs) {
    int64_t group = a->heads / a->kv_heads;
    for (int64_t r = 0; r < ROWS; r++) {
        int64_t position = t->before + t->first + (row + r) / group;
        int64_t low = first_seen(position, a->window, a->is_chunked) - start;
        int64_t high = position + 1 - start < KEYS ? position + 1 - start : KEYS;
        word *weights = own->weights + r * own->key_words;
        if (row + r >= rows || high <= 0 || low >= KEYS)
            memset(weights, 0, sizeof(word) * (size_t)own->key_words);
        else
            to_weights(a, own->scores + r * KEYS, low, high, own->top + row + r, own->total + row + r,
                       own->sums + (row + r) * own->width, own->width, weights, pairs);
    }
}

INLINE void attend(const prefill *a, const tile *t, int64_t start, int64_t rows, workspace *own, int pairs) {
    int64_t group = a->heads / a->kv_heads;
    for (int64_t row = 0; row < rows; row += ROWS) {
        int64_t last = row + ROWS < rows ? row + ROWS - 1 : rows - 1;
        if (t->before + t->first + last / group < start) continue; /* the tile is after all queries */
        for (int j = 0; j < KEYS; j += COLUMNS)
            multiply(own->queries + row * own->depth, own->depth, own->keys + j, KEYS, own->depth, own->scores + j,
                     KEYS, 0, pairs);
        rows_to_weights(a, t, start, row, rows, own, pairs);
        for (int64_t j = 0; j < own->width; j += COLUMNS)
            multiply(own->weights, own->key_words, own->values + j, own->width, own->key_words,
                     own->sums + row * own->width + j, own->width, 1, pairs);
    }
}

INLINE void write_out(const prefill *a, const tile *t, int64_t rows, const workspace *own) {
    int64_t group = a->heads / a->kv_heads;
    for (int64_t row = 0; row < rows; row++) {
        int64_t token = a->query_start[t->request] + t->first + row / group, head = t->kv_head * group + row % group;
        int64_t at = token * a->out_stride_t + head * a->out_stride_h;
        float factor = 1.0f / own->total[row];
        for (int64_t d = 0; d < a->value_dim; d++)
            store_number(a->out, at + d, a->is_f32, own->sums[row * own->width + d] * factor);
    }
}

INLINE void one_tile(const prefill *a, const tile *t, workspace *own, int is_f32, int pairs) {
    int64_t rows = t->count * (a->heads / a->kv_heads), end = t->before + t->first + t->count;
    int64_t begin = first_seen(t->before + t->first, a->window, a->is_chunked);
    load_queries(a, t, rows, own, pairs);
    for (int64_t start = begin / KEYS * KEYS; start < end; start += KEYS) {
        int64_t from = begin > start ? begin : start, to = end < start + KEYS ? end : start + KEYS;
        load_tokens(a, t, start, from, to, own, is_f32, pairs);
        attend(a, t, start, rows, own, pairs);
    }
    write_out(a, t, rows, own);
}

static void tile_of_floats(const prefill *a, const tile *t, workspace *own) { one_tile(a, t, own, 1, 0); }
static void tile_of_bf16(const prefill *a, const tile *t, workspace *own) { one_tile(a, t, own, 0, PAIRS); }

/* Lay out the buffers of `own` from `start` on, each aligned to 64 bytes. Returns the total number of bytes. */
static int64_t lay_out(const prefill *a, int64_t rows, workspace *own, char *start) {
    int64_t halves = PAIRS && !a->is_f32 ? 2 : 1;
    own->depth = a->head_dim / halves;
    own->key_words = KEYS / halves;
    own->width = (a->value_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    int64_t sizes[] = {rows * own->depth, own->depth * KEYS,  own->key_words * own->width, ROWS * own->key_words,
                       ROWS * KEYS,       rows * own->width, rows,                        rows};
    void *parts[8];
    int64_t at = 0;
    for (int i = 0; i < 8; i++) {
        parts[i] = start + at;
        at += (4 * sizes[i] + 63) / 64 * 64;
    }
    own->queries = parts[0], own->keys = parts[1], own->values = parts[2], own->weights = parts[3];
    own->scores = parts[4], own->sums = parts[5], own->top = parts[6], own->total = parts[7];
    return at;
}

INLINE int64_t queries_of(const prefill *a, int64_t request) {
    return a->query_start[request + 1] - a->query_start[request];
}

/* The tile of work item `item`. Items are ordered by request, tile and KV head. */
static tile tile_at(const prefill *a, int64_t item, int64_t most) {
    tile t = {0, 0, 0, 0, 0, a->tables};
    for (;; t.request++) {
        int64_t items = (queries_of(a, t.request) + most - 1) / most * a->kv_heads;
        if (item < items) break;
        item -= items;
    }
    int64_t queries = queries_of(a, t.request);
    t.kv_head = item % a->kv_heads;
    t.first = item / a->kv_heads * most;
    t.count = queries - t.first < most ? queries - t.first : most;
    t.before = a->seq_lens[t.request] - queries;
    t.table += t.request * a->table_stride;
    return t;
}

static int64_t items_of(const prefill *a, int64_t most) {
    int64_t items = 0;
    for (int64_t r = 0; r < a->batch; r++) items += (queries_of(a, r) + most - 1) / most * a->kv_heads;
    return items;
}

/* Returns non-zero if memory is exhausted. */
API int kvscope_prefill(const prefill *a) {
    int64_t group = a->heads / a->kv_heads, most = TILE_ROWS / group > 0 ? TILE_ROWS / group : 1, next = 0;
    int threads = a->threads < 1 ? 1 : a->threads;
    while (threads > 1 && most * group > LEAST_ROWS && most > 1 && items_of(a, most) < 4 * threads) most /= 2;
    int64_t items = items_of(a, most);
    workspace sizes;
    int64_t rows = (most * group + ROWS - 1) / ROWS * ROWS, each = lay_out(a, rows, &sizes, NULL);
    char *memory = aligned_alloc(64, (size_t)(each * threads));
    if (!memory) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t mine = 0;
        if (threads > 1) {
#pragma omp atomic capture
            mine = next++;
        }
        workspace own;
        lay_out(a, rows, &own, memory + mine * each);
#pragma omp for schedule(dynamic)
        for (int64_t item = items - 1; item >= 0; item--) { /* tiles that see the most tokens first */
            tile t = tile_at(a, item, most);
            (a->is_f32 ? tile_of_floats : tile_of_bf16)(a, &t, &own);
        }
    }
    free(memory);
    return 0;
}
