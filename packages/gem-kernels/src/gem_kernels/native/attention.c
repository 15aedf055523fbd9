/* Attention over packed samples: softmax or pointwise, W queries of one sample and head at a time.

   Queries lie across the lanes of a vector, so that maxima, exponentials and sums over keys need no exchange between lanes:

       turned q [D][W]     scores [KEYS][W]            sums [Dv][W]
       q[d] (a vector)  *  k[j][d] (one number)        p[j] (a vector)  *  v[j][d] (one number)

   Keys and values are read where they are. Blocks of KEYS keys keep the scores in the first cache. */
#include "kernels.h"
#include "vectors.h"

#define KEYS 64
#define MAX_D 256

/* Scores of n keys, unscaled. */
INLINE void scores(const vf *q, const float *k, int64_t k_row, int64_t d, int n, vf *s) {
    vf sum[n];
    UNROLL for (int j = 0; j < n; j++) sum[j] = all(0.0f);
    for (int64_t c = 0; c < d; c++)
        UNROLL for (int j = 0; j < n; j++) sum[j] += q[c] * k[j * k_row + c];
    UNROLL for (int j = 0; j < n; j++) s[j] = sum[j];
}

/* sums[0 .. n) = sums * by + sum over keys of p * v. */
INLINE void weigh(vf *sums, vf by, const vf *p, const float *v, int64_t v_row, int64_t keys, int n) {
    vf sum[n];
    UNROLL for (int c = 0; c < n; c++) sum[c] = sums[c] * by;
    for (int64_t j = 0; j < keys; j++)
        UNROLL for (int c = 0; c < n; c++) sum[c] += p[j] * v[j * v_row + c];
    UNROLL for (int c = 0; c < n; c++) sums[c] = sum[c];
}

/* The keys that each lane's query sees: lo <= j < hi, and own. All of first <= j < end is computed, all_from <= j < all_to unmasked. */
struct seen {
    vi lo, hi, own;
    int64_t first, end, all_from, all_to;
};

INLINE int64_t low(const struct attention *a, int64_t p) { return a->left >= 0 && p > a->left ? p - a->left : 0; }

/* One past the last key that a row of the history at position p sees. */
INLINE int64_t high(const struct attention *a, int64_t p, int64_t history) {
    int64_t hi = history;
    if (a->causal && p + 1 < hi) hi = p + 1;
    if (a->right >= 0 && p + a->right + 1 < hi) hi = p + a->right + 1;
    return hi > 0 ? hi : 0;
}

/* Queries i0 .. i0 + n of a sample of lq queries and lk keys, whose last t rows are candidates: at position ``history``, before which they
   see the keys of the history, and their own one. */
INLINE void who_sees(const struct attention *a, int64_t i0, int64_t n, int64_t lq, int64_t lk, int64_t t, struct seen *s) {
    int64_t history = lk - t, shift = lk - lq, asked = lq - t - i0, reach = a->right;
    vi none = all_i(-1), p = lanes() + (int32_t)(i0 + shift), hi = all_i((int32_t)history);
    if (a->causal) reach = 0;
    if (reach >= 0) hi = larger_i(smaller_i(p + (int32_t)(reach < lk + lq ? reach : lk + lq) + 1, hi), all_i(0));
    vi lo = a->left >= 0 ? larger_i(p - (int32_t)(a->left < lk ? a->left : lk), all_i(0)) : all_i(0);
    s->first = lk, s->end = 0, s->all_from = 0, s->all_to = lk;
    if (asked > 0) {
        int64_t from = i0 + shift, last = from + (asked < n ? asked : n) - 1;
        s->first = low(a, from), s->end = high(a, last, history);
        s->all_from = low(a, last), s->all_to = high(a, from, history);
    }
    if (asked < n) {
        vi candidate = lanes() >= (int32_t)(asked > 0 ? asked : 0);
        int64_t from = low(a, history), own = i0 + shift + n - 1;
        hi = pick_i(candidate, all_i((int32_t)history), hi), lo = pick_i(candidate, all_i((int32_t)from), lo);
        none = pick_i(candidate, p, none);
        s->first = from < s->first ? from : s->first, s->all_from = from > s->all_from ? from : s->all_from;
        s->end = own + 1, s->all_to = history < s->all_to ? history : s->all_to;
    }
    s->lo = lo, s->hi = hi, s->own = none;
}

INLINE vi sees(const struct seen *s, int64_t key) {
    vi j = all_i((int32_t)key);
    return ((j >= s->lo) & (j < s->hi)) | (j == s->own);
}

/* q [n rows, d] to [d][W], times scale; absent rows are 0. */
static void turn_in(const float *q, int64_t row, int64_t n, int64_t d, float scale, vf *out) {
    int64_t c = 0;
    if (n > W / 4)
        for (; c + W <= d; c += W) {
            vf x[W];
            for (int r = 0; r < W; r++) x[r] = r < n ? load(q + r * row + c) * scale : all(0.0f);
            turn(x);
            memcpy(out + c, x, sizeof x);
        }
    for (; c < d; c++) {
        vf x = all(0.0f);
        for (int64_t r = 0; r < n; r++) x[r] = q[r * row + c] * scale;
        out[c] = x;
    }
}

static void turn_out(const vf *sums, vf by, int64_t n, int64_t dv, float *out, int64_t row) {
    int64_t c = 0;
    if (n > W / 4)
        for (; c + W <= dv; c += W) {
            vf x[W];
            for (int r = 0; r < W; r++) x[r] = sums[c + r] * by;
            turn(x);
            for (int64_t r = 0; r < n; r++) store(out + r * row + c, x[r]);
        }
    for (; c < dv; c++) {
        vf x = sums[c] * by;
        for (int64_t r = 0; r < n; r++) out[r * row + c] = x[r];
    }
}

static void some_queries(const struct attention *a, int64_t h, const float *q, const float *k, const float *v, int64_t n,
                         const struct seen *see, int64_t out_row) {
    vf turned[MAX_D], sums[MAX_D], s[KEYS], lowest = all(-INFINITY), most = lowest, weight = all(0.0f);
    int softmax = a->activation == 0;
    turn_in(q, a->q_row, n, a->d, a->scale, turned);
    for (int64_t c = 0; c < a->dv; c++) sums[c] = all(0.0f);
    for (int64_t j0 = see->first; j0 < see->end; j0 += KEYS) {
        int64_t keys = see->end - j0 < KEYS ? see->end - j0 : KEYS, j = 0;
        const float *kj = k + j0 * a->k_row, *vj = v + j0 * a->v_row;
        vf by = all(1.0f);
        for (; j + 8 <= keys; j += 8) scores(turned, kj + j * a->k_row, a->k_row, a->d, 8, s + j);
        if (j + 4 <= keys) scores(turned, kj + j * a->k_row, a->k_row, a->d, 4, s + j), j += 4;
        for (; j < keys; j++) scores(turned, kj + j * a->k_row, a->k_row, a->d, 1, s + j);
        if (softmax) {
            vf top = most;
            for (j = 0; j < keys; j++) {
                if (j0 + j < see->all_from || j0 + j >= see->all_to) s[j] = pick(sees(see, j0 + j), s[j], lowest);
                top = larger(s[j], top);
            }
            vf from = pick(top == lowest, all(0.0f), top);
            by = exp_v(most - from), most = top;
            weight *= by;
            for (j = 0; j < keys; j++) weight += s[j] = exp_v(s[j] - from);
        } else {
            int name = a->activation[h];
            if (name == GELU)
                for (j = 0; j < keys; j++) s[j] = act_v(GELU, s[j]);
            else
                for (j = 0; j < keys; j++) s[j] = act_v(name, s[j]);
            if (j0 < see->all_from || j0 + keys > see->all_to)
                for (j = 0; j < keys; j++) s[j] = pick(sees(see, j0 + j), s[j], all(0.0f));
        }
        int64_t c = 0;
        for (; c + 16 <= a->dv; c += 16) weigh(sums + c, by, s, vj + c, a->v_row, keys, 16);
        if (c + 8 <= a->dv) weigh(sums + c, by, s, vj + c, a->v_row, keys, 8), c += 8;
        for (; c < a->dv; c++) weigh(sums + c, by, s, vj + c, a->v_row, keys, 1);
    }
    vf by = all(a->out_scale);
    if (softmax) by = pick(weight == 0.0f, all(0.0f), by / weight);
    turn_out(sums, by, n, a->dv, a->out + (out_row * a->heads + h) * a->dv, a->heads * a->dv);
    if (a->lse) {
        vf lse = pick(weight == 0.0f, lowest, most + log_v(weight));
        float *to = a->lse + h * a->rows + out_row;
        if (n == W)
            store(to, lse);
        else
            for (int64_t r = 0; r < n; r++) to[r] = lse[r];
    }
}

/* Samples begin .. end. */
void gem_attention(const struct attention *a, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
        int64_t out0 = a->q_offsets ? a->q_offsets[b] : b * a->q_count, q0 = a->q_shared ? 0 : out0;
        int64_t lq = a->q_offsets ? a->q_offsets[b + 1] - q0 : a->q_count;
        int64_t k0 = a->k_offsets ? a->k_offsets[b] : b * a->k_count, lk = a->k_offsets ? a->k_offsets[b + 1] - k0 : a->k_count;
        int64_t t = a->targets ? a->targets[b] : a->candidates;
        for (int64_t i = 0; i < lq; i += W) {
            int64_t n = lq - i < W ? lq - i : W;
            struct seen see;
            who_sees(a, i, n, lq, lk, t, &see);
            for (int64_t h = 0; h < a->heads; h++) {
                int64_t kh = h / a->shared;
                some_queries(a, h, a->q + (q0 + i) * a->q_row + h * a->q_head, a->k + k0 * a->k_row + kh * a->k_head,
                             a->v + k0 * a->v_row + kh * a->v_head, n, &see, out0 + i);
            }
        }
    }
}
