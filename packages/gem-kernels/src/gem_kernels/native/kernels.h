/* What the C files share. The structs are mirrored field by field in calls.py and program.py. */
#include <stdint.h>

struct attention {
    const float *q, *k, *v;
    float *out, *lse; /* [rows, heads, dv], [heads, rows] or null */
    const int64_t *q_offsets, *k_offsets, *targets; /* each may be null */
    const int32_t *activation; /* of each head, or null: softmax */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head; /* strides in floats */
    int64_t heads, shared, d, dv, rows; /* shared: heads of q to one of k; rows: of the result */
    int64_t q_count, k_count; /* rows of every sample where there are no offsets */
    int64_t q_shared, candidates; /* one q [q_count] for all samples; candidates of every sample where there are no targets */
    int64_t causal, left, right; /* -1: unbounded */
    float scale, out_scale;
};

enum { RMS, LAYER, NONE };

/* Rows to be normed, multiplied by a matrix, or both. */
struct rows {
    const float *x, *residual, *norm_weight, *norm_bias; /* all but x may be null */
    float *y, *total, *mean, *rstd; /* total: x + residual, null without one; mean and rstd may be null */
    const float *w, *b, *add; /* w: [k][n rounded up to W], turned; null for a norm alone; b: [n rounded up to W]; add: to y, or null */
    int64_t x_row, residual_row, add_row, k, n; /* strides in floats */
    int64_t kind; /* of the norm */
    float eps;
};

void gem_attention(const struct attention *a, int64_t begin, int64_t end);
void gem_linear(const struct rows *a, int64_t begin, int64_t end);
