/* Vectors of floats as wide as the machine has them (compiler extensions of GCC and Clang), and elementwise functions on them. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias)); /* at any address */

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf all(float x) { return x - (vf){}; } /* not +: adding +0 would turn -0 into +0 */
INLINE vi all_i(int32_t x) { return x - (vi){}; }
INLINE vf pick(vi where, vf a, vf b) { return (vf)(((vi)a & where) | ((vi)b & ~where)); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

INLINE vi pick_i(vi where, vi a, vi b) { return (a & where) | (b & ~where); }
INLINE vi smaller_i(vi a, vi b) { return pick_i(a < b, a, b); }
INLINE vi larger_i(vi a, vi b) { return pick_i(a > b, a, b); }

INLINE vi lanes(void) {
    vi n;
    UNROLL for (int i = 0; i < W; i++) n[i] = i;
    return n;
}

/* Lanes of a and then of b in the order of ``from``. */
#if defined(__clang__)
INLINE vf mixed(vf a, vf b, vi from) {
    vf x;
    UNROLL for (int i = 0; i < W; i++) x[i] = from[i] < W ? a[from[i]] : b[from[i] - W];
    return x;
}
#else
INLINE vf mixed(vf a, vf b, vi from) { return __builtin_shuffle(a, b, from); }
#endif

/* The sum of all lanes, by halves. */
INLINE float total(vf x) {
    UNROLL for (int half = W / 2; half; half /= 2) x += mixed(x, x, lanes() + half);
    return x[0];
}

/* exp by 2^n * p(r), |r| <= ln 2 / 2, p of degree 6 (relative error 3e-9 before rounding). Below -87: exactly 0. NaN stays NaN. */
INLINE vf exp_v(vf x) {
    vi small = x < -87.0f;
    vf y = pick(x > 88.0f, all(88.0f), pick(small, all(-87.0f), x));
    vf n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
    vf r = y - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = all(1.38131e-3f);
    p = p * r + 8.36942e-3f;
    p = p * r + 4.166846e-2f;
    p = p * r + 1.6666515e-1f;
    p = p * r + 4.9999993e-1f;
    p = p * r * r + r + 1.0f;
    vi two_n = (vi)(n + 12583039.0f) << 23; /* the low bits of n + 2^23 * 1.5 + 127 are n + 127 */
    return (vf)((vi)(p * (vf)two_n) & ~small);
}

/* log of x >= 1: exponent and mantissa m in [sqrt 1/2, sqrt 2), log m = 2 artanh((m - 1) / (m + 1)). */
INLINE vf log_v(vf x) {
    vi bits = (vi)x, e = ((bits - 0x3f3504f3) >> 23);
    vf m = (vf)(bits - (e << 23)), t = (m - 1.0f) / (m + 1.0f), s = t * t;
    vf p = all(0.2222222f) * s + 0.2857143f;
    return __builtin_convertvector(e, vf) * 0.69314718f + t * (2.0f + s * (0.6666667f + s * (0.4f + s * p)));
}

/* erfc of a >= 0: exp(-a^2) t q(t), t = 1 / (1 + 0.37 a); q fitted to 2e-8 relative on 0 <= a <= 9.5. */
INLINE vf erfc_v(vf a) {
    vf t = 1.0f / (1.0f + 0.37f * a);
    vf q = all(0.06192408f);
    q = q * t - 0.30327789f;
    q = q * t + 0.48685208f;
    q = q * t - 0.28532383f;
    q = q * t + 0.31081045f;
    q = q * t + 0.10651663f;
    q = q * t + 0.20625501f;
    q = q * t + 0.2074297f;
    q = q * t + 0.20881375f;
    return exp_v(-a * a) * (q * t);
}

INLINE vf sigmoid_times(vf x, vf u) { return x / (1.0f + exp_v(-u)); }

enum { RAW, GELU, GELU_TANH, GELU_TAYLOR, LEAKY_RELU, RELU, SILU, HARDSWISH, RELU_SQUARE };

INLINE vf act_v(int name, vf x) {
    vi above = x > 0.0f;
    switch (name) {
    case GELU: {
        vf half = 0.5f * x, tail = half * erfc_v(pick(above, x, -x) * 0.70710678f);
        return pick(above, x - tail, tail);
    }
    case GELU_TANH: return sigmoid_times(x, 1.59576912f * x * (1.0f + 0.044715f * x * x));
    case GELU_TAYLOR: {
        vf z = pick(x > 1.5f, all(1.5f), pick(x < -1.5f, all(-1.5f), x)), s = z * z, over = x - 1.5f;
        vf y = 0.5f * z + s * (0.3989422804f + s * (-0.0664903801f + s * 0.0099735570f));
        return y + pick(over > 0.0f, over, all(0.0f));
    }
    case LEAKY_RELU: return pick(above, x, 0.01f * x);
    case RELU: return pick(x < 0.0f, all(0.0f), x);
    case SILU: return sigmoid_times(x, x);
    case HARDSWISH: {
        vf y = x + 3.0f;
        return x * pick(y > 6.0f, all(6.0f), pick(y < 0.0f, all(0.0f), y)) / 6.0f;
    }
    case RELU_SQUARE: {
        vf y = pick(x < 0.0f, all(0.0f), x);
        return y * y;
    }
    default: return x;
    }
}

/* Transposes the W x W tile of rows x in place: log2 W times, row r and row r + W/2 interleave to rows 2r and 2r + 1. */
INLINE void turn(vf *x) {
    vi low, high;
    for (int i = 0; i < W; i++) {
        low[i] = i / 2 + (i % 2) * W;
        high[i] = low[i] + W / 2;
    }
    UNROLL for (int step = 1; step < W; step *= 2) {
        vf y[W];
        UNROLL for (int r = 0; r < W / 2; r++) {
            y[2 * r] = mixed(x[r], x[r + W / 2], low);
            y[2 * r + 1] = mixed(x[r], x[r + W / 2], high);
        }
        UNROLL for (int r = 0; r < W; r++) x[r] = y[r];
    }
}
