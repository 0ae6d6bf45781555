/* Products of bfloat16 activations with weights of 4 or 8 bits in groups, with AMX tiles (grouped_tiles.c). */
#ifndef KVSCOPE_GROUPED_TILES_H
#define KVSCOPE_GROUPED_TILES_H

#include "grouped.h"

/* From this number of rows on, tiles are faster than other products. Both have the same bits. */
enum { MIN_TILE_ROWS = 5 };

/* Whether this library has tiles and the system permits this process to use them. */
int may_use_tiles(void);

/* As `kvscope_grouped_float` with the same bits, for bfloat16 x. Only if `may_use_tiles`. */
int multiply_with_tiles(const grouped *l, const bf16 *x, int64_t m, void *out, const void *add, int flags,
                        int threads);

#endif
