/* One decoder layer over a batch of decodes in one call: the operations of linear.c, attention.c and layers.c in the
 * order in which they are otherwise called separately, so that the result is bitwise the same. */
#include "decode.h"
#include "numbers.h"
#include "rotation.h"

typedef int product_function(const void *parts, const void *x, int64_t m, void *out, const void *add, int flags,
                             int threads);

typedef struct {
    const void *parts;
    product_function *call;
} product;

typedef struct {
    const float *weight; /* (hidden,), or NULL for no norm */
    float eps;
    int32_t unused;
} norm;

/* A layer; valid for the lifetime of its weights. */
typedef struct {
    product qkv, o, gate_up, down;
    norm before_attention, before_mlp, of_next, of_heads; /* of_heads: (heads + kv_heads, head_dim) */
    int64_t hidden, size, activation, is_f32, sum_is_f32; /* is_f32: intermediate results; sum_is_f32: x and out */
    attention attention;                                  /* all but query, out and the inputs of a step */
} layer;

/* Inputs and outputs of one step. */
typedef struct {
    const void *x, *normed; /* (tokens, hidden); normed: NULL if `before_attention` is not computed yet */
    void *out, *out_normed; /* same shape; out_normed: with the norm `of_next` */
    const void *cos, *sin;  /* (tokens, head_dim) with one stride */
    const int64_t *slots;
    const int32_t *tables, *seq_lens;
    int64_t tokens, turn_stride, table_stride, threads;
    float *shares; /* as in `attention`, or NULL */
    int64_t shares_stride;
} step;

enum { X_F32 = 1, OUT_F32 = 2, ADD_F32 = 4 };

int kvscope_decode(const attention *a);
int kvscope_rms_norm(const void *x, const float *weight, float eps, void *out, int64_t rows, int64_t size, int x_f32,
                     int out_f32);
int kvscope_gate(const void *both, void *out, int64_t rows, int64_t size, int kind, int is_f32);
int kvscope_rotate_write(const rotation *r);

INLINE void take_norm(const layer *l, const norm *n, const step *s, const void *x, void *out) {
    kvscope_rms_norm(x, n->weight, n->eps, out, s->tokens, l->hidden, (int)l->sum_is_f32, (int)l->is_f32);
}

INLINE int multiply(const layer *l, const product *p, const step *s, const void *x, void *out) {
    return p->call(p->parts, x, s->tokens, out, NULL, l->is_f32 ? X_F32 + OUT_F32 : 0, (int)s->threads);
}

/* out = add + x @ weight.T; add may be out. */
INLINE int add_product(const layer *l, const product *p, const step *s, const void *x, const void *add, void *out) {
    int flags = (l->is_f32 ? X_F32 : 0) + (l->sum_is_f32 ? OUT_F32 + ADD_F32 : 0);
    return p->call(p->parts, x, s->tokens, out, add, flags, (int)s->threads);
}

INLINE int attend(const layer *l, const step *s, const void *heads, void *query, void *attended) {
    attention a = l->attention;
    rotation r = {
        .heads = heads, .norm = l->of_heads.weight, .eps = l->of_heads.eps, .cos = s->cos, .sin = s->sin,
        .k_cache = (void *)a.k_cache, .v_cache = (void *)a.v_cache, .slots = s->slots, .query = query,
        .tokens = s->tokens, .num_heads = a.heads, .kv_heads = a.kv_heads, .dim = a.head_dim,
        .turn_stride = s->turn_stride, .block_size = a.block_size,
        .k_stride_b = a.k_stride_b, .k_stride_s = a.k_stride_s, .k_stride_h = a.k_stride_h,
        .v_stride_b = a.v_stride_b, .v_stride_s = a.v_stride_s, .v_stride_h = a.v_stride_h,
        .is_f32 = (int32_t)l->is_f32,
    };
    kvscope_rotate_write(&r);
    a.query = query;
    a.out = attended;
    a.tables = s->tables;
    a.seq_lens = s->seq_lens;
    a.table_stride = s->table_stride;
    a.batch = s->tokens;
    a.threads = (int32_t)s->threads;
    a.shares = s->shares;
    a.shares_stride = s->shares_stride;
    return kvscope_decode(&a);
}

/* workspace: allocated by `kvscope_layer` below. */
INLINE int run(const layer *l, const step *s, char *normed, char *wide, char *query, char *attended) {
    const void *first = s->normed;
    if (!first) {
        take_norm(l, &l->before_attention, s, s->x, normed);
        first = normed;
    }
    if (multiply(l, &l->qkv, s, first, wide) || attend(l, s, wide, query, attended)) return 1;
    if (add_product(l, &l->o, s, attended, s->x, s->out)) return 1;
    take_norm(l, &l->before_mlp, s, s->out, normed);
    if (multiply(l, &l->gate_up, s, normed, wide)) return 1;
    kvscope_gate(wide, query, s->tokens, l->size, (int)l->activation, (int)l->is_f32);
    if (add_product(l, &l->down, s, query, s->out, s->out)) return 1;
    if (l->of_next.weight) take_norm(l, &l->of_next, s, s->out, s->out_normed);
    return 0;
}

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns non-zero if memory is exhausted. */
API int kvscope_layer(const layer *l, const step *s) {
    int64_t each = s->tokens * (l->is_f32 ? 4 : 2), attended = l->attention.heads * l->attention.head_dim;
    int64_t qkv_outputs = attended + 2 * l->attention.kv_heads * l->attention.head_dim;
    int64_t wide = larger(qkv_outputs, 2 * l->size), narrow = larger(attended, l->size);
    char *workspace = malloc((size_t)(each * (l->hidden + wide + narrow + attended)) + 1);
    if (!workspace) return 1;
    char *after_normed = workspace + each * l->hidden, *after_wide = after_normed + each * wide;
    int failed = run(l, s, workspace, after_normed, after_wide, after_wide + each * narrow);
    free(workspace);
    return failed;
}
