/* Norms of rows, and norm + linear on tiles of ROWS rows: a tile is normed into the first cache and multiplied there. */
#include "kernels.h"
#include "vectors.h"

#define ROWS 8
#define MAX_K 512

/* One normed row into ``out``. */
INLINE void norm_row(const struct rows *a, int64_t m, float *out) {
    const float *x = a->x + m * a->x_row, *more = a->residual ? a->residual + m * a->residual_row : 0;
    float *kept = a->total ? a->total + m * a->k : out;
    int64_t k = a->k, whole = k - k % W;
    vf sums = all(0.0f);
    float sum = 0, mean = 0;
    if (more) {
        for (int64_t c = 0; c < k; c++) kept[c] = x[c] + more[c];
        x = kept;
    }
    if (a->kind == LAYER) {
        for (int64_t c = 0; c < whole; c += W) sums += load(x + c);
        for (int64_t c = whole; c < k; c++) sum += x[c];
        mean = (total(sums) + sum) / (float)k;
        if (a->mean) a->mean[m] = mean;
        sums = all(0.0f), sum = 0;
    }
    for (int64_t c = 0; c < whole; c += W) {
        vf d = load(x + c) - mean;
        sums += d * d;
    }
    for (int64_t c = whole; c < k; c++) sum += (x[c] - mean) * (x[c] - mean);
    float rstd = 1.0f / sqrtf((total(sums) + sum) / (float)k + a->eps);
    if (a->rstd) a->rstd[m] = rstd;
    for (int64_t c = 0; c < k; c++) out[c] = (x[c] - mean) * rstd;
    if (a->norm_weight)
        for (int64_t c = 0; c < k; c++) out[c] *= a->norm_weight[c];
    if (a->norm_bias)
        for (int64_t c = 0; c < k; c++) out[c] += a->norm_bias[c];
}

/* ROWS rows by ``wide`` vectors of columns. */
INLINE void tile(const struct rows *a, const float *x, int64_t stride, int64_t column, int wide, int64_t m, int64_t rows) {
    vf sum[ROWS][2];
    int64_t padded = (a->n + W - 1) / W * W;
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < wide; c++) sum[r][c] = load(a->b + column + c * W);
    for (int64_t i = 0; i < a->k; i++) {
        const float *w = a->w + i * padded + column;
        UNROLL for (int c = 0; c < wide; c++) {
            vf wc = load(w + c * W);
            UNROLL for (int r = 0; r < ROWS; r++) sum[r][c] += x[r * stride + i] * wc;
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < wide; c++) {
            int64_t at = column + c * W;
            float *y = a->y + (m + r) * a->n + at;
            const float *add = a->add ? a->add + (m + r) * a->add_row + at : 0;
            if (at + W <= a->n)
                store(y, add ? sum[r][c] + load(add) : sum[r][c]);
            else
                for (int64_t i = 0; at + i < a->n; i++) y[i] = sum[r][c][i] + (add ? add[i] : 0.0f);
        }
}

/* Floats of a vector: what columns of w and b are padded to. */
int gem_vector(void) { return W; }

/* Rows begin .. end. */
void gem_norm(const struct rows *a, int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) norm_row(a, m, a->y + m * a->k);
}

void gem_linear(const struct rows *a, int64_t begin, int64_t end) {
    float kept[ROWS * MAX_K];
    int64_t padded = (a->n + W - 1) / W * W;
    memset(kept, 0, sizeof kept);
    for (int64_t m = begin; m < end; m += ROWS) {
        int64_t rows = end - m < ROWS ? end - m : ROWS, column = 0, stride = a->k;
        const float *x = kept;
        if (a->kind != NONE)
            for (int64_t r = 0; r < rows; r++) norm_row(a, m + r, kept + r * a->k);
        else if (rows < ROWS) /* a tile reads all its rows */
            for (int64_t r = 0; r < rows; r++) memcpy(kept + r * a->k, a->x + (m + r) * a->x_row, (size_t)a->k * sizeof(float));
        else
            x = a->x + m * a->x_row, stride = a->x_row;
        for (; column + 2 * W <= padded; column += 2 * W) tile(a, x, stride, column, 2, m, rows);
        if (column < padded) tile(a, x, stride, column, 1, m, rows);
    }
}
