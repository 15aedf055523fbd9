/* Rows of several packed tensors one after another, sample by sample. */
#include <stdint.h>
#include <string.h>

/* parts[p] and offsets[p] [samples + 1] of each part; bytes of a row. Returns the rows written. */
int64_t gem_concat(const char *const *parts, const int64_t *const *offsets, int64_t count, int64_t samples, int64_t bytes, char *out) {
    char *at = out;
    for (int64_t b = 0; b < samples; b++)
        for (int64_t p = 0; p < count; p++) {
            int64_t rows = offsets[p][b + 1] - offsets[p][b];
            memcpy(at, parts[p] + offsets[p][b] * bytes, (size_t)(rows * bytes));
            at += rows * bytes;
        }
    return (at - out) / bytes;
}

/* Row b of ``values`` for every row of sample b. */
void gem_expand(const char *values, const int64_t *offsets, int64_t samples, int64_t bytes, char *out) {
    for (int64_t b = 0; b < samples; b++)
        for (int64_t i = offsets[b]; i < offsets[b + 1]; i++) memcpy(out + i * bytes, values + b * bytes, (size_t)bytes);
}
