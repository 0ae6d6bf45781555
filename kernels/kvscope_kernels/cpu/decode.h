/* Arguments of decode attention; `DecodeStruct` in library.py. */
#ifndef KVSCOPE_DECODE_H
#define KVSCOPE_DECODE_H

#include <stdint.h>

typedef struct {
    const void *query, *k_cache, *v_cache;
    const int32_t *tables, *seq_lens;
    const float *sinks; /* (heads,) or NULL */
    void *out;
    int64_t query_stride_t, query_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h;
    int64_t table_stride, out_stride_t, out_stride_h;
    int64_t batch, heads, kv_heads, head_dim, value_dim, block_size, window; /* window: 0 for all */
    float scale, softcap;                                                    /* softcap: 0 for none */
    int32_t is_f32, is_chunked, threads; /* is_chunked: the window is a chunk of the text */
    float *shares; /* (batch, blocks of the longest request), see block_attention.py; or NULL */
    int64_t shares_stride;
} attention;

#endif
