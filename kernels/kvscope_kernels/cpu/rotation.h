/* Operations on queries and keys before attention; `RotationStruct` in library.py. */
#ifndef KVSCOPE_ROTATION_H
#define KVSCOPE_ROTATION_H

#include <stdint.h>

typedef struct {
    const void *heads;         /* (tokens, num_heads + 2 * kv_heads, dim) contiguous */
    const float *norm;         /* (num_heads + kv_heads, dim) of an RMSNorm of each head, or NULL */
    const void *cos, *sin;     /* (tokens, dim) with the same stride; sin is signed */
    void *k_cache, *v_cache;
    const int64_t *slots;      /* -1: not stored */
    void *query;               /* output, (tokens, num_heads, dim) contiguous */
    int64_t tokens, num_heads, kv_heads, dim, turn_stride, block_size;
    int64_t k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h;
    float eps;
    int32_t is_f32;
} rotation;

#endif
