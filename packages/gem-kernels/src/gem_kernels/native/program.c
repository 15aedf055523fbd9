/* Several steps on packed rows, a few samples at a time: what lies between the steps stays in the second cache.

   samples  |-- tile 0 --|- tile 1 -|--- tile 2 ---|
   each tile: step 0, step 1, ... on its rows; temporary buffers hold the rows of one tile and are used again by the next. */
#include "kernels.h"
#include <stdlib.h>
#include <string.h>

#define TILE_ROWS 384
#define MAX_BUFFERS 64

struct buffer {
    float *data; /* null: temporary */
    const int64_t *offsets; /* rows of each sample, or null: ``each`` rows a sample */
    int64_t each, row; /* row: stride in floats */
    int64_t same; /* the buffer that this one is a view of, or -1 */
};

/* One of the two structs is used; its pointers to rows are set for each tile from these buffers (-1: as they are) and columns. */
struct step {
    int64_t attends;
    struct rows rows;
    struct attention attention;
    int64_t x, y, add, q, k, v, out, k_column, v_column;
    int64_t q_column;
};

struct program {
    const struct step *steps;
    const struct buffer *buffers;
    int64_t step_count, buffer_count, main; /* main: the buffer whose rows make up tiles */
};

static int64_t row_of(const struct buffer *b, int64_t sample) { return b->offsets ? b->offsets[sample] : sample * b->each; }

static int64_t tile_end(const struct program *p, int64_t begin, int64_t end) {
    const struct buffer *main = p->buffers + p->main;
    int64_t b = begin + 1, first = row_of(main, begin);
    while (b < end && row_of(main, b + 1) - first <= TILE_ROWS && b - begin < TILE_ROWS) b++;
    return b;
}

static void run_step(const struct step *s, const struct program *p, float *const *at, int64_t begin, int64_t end) {
    if (s->attends) {
        struct attention a = s->attention;
        if (s->q >= 0) a.q = at[s->q] + s->q_column;
        a.k = at[s->k] + s->k_column, a.v = at[s->v] + s->v_column, a.out = at[s->out];
        gem_attention(&a, begin, end);
    } else {
        struct rows r = s->rows;
        const struct buffer *x = p->buffers + s->x;
        r.x = at[s->x], r.y = at[s->y], r.add = s->add < 0 ? 0 : at[s->add];
        gem_linear(&r, row_of(x, begin), row_of(x, end));
    }
}

/* Samples begin .. end; 0 where memory is short. */
int gem_program(const struct program *p, int64_t begin, int64_t end) {
    float *scratch[MAX_BUFFERS] = {0}, *at[MAX_BUFFERS];
    int done = 1;
    for (int64_t i = 0; i < p->buffer_count; i++) {
        const struct buffer *buffer = p->buffers + i;
        int64_t most = 0;
        if (buffer->data || buffer->same >= 0) continue;
        for (int64_t b = begin, e; b < end; b = e) {
            e = tile_end(p, b, end);
            int64_t rows = row_of(buffer, e) - row_of(buffer, b);
            most = rows > most ? rows : most;
        }
        scratch[i] = malloc((size_t)(most * buffer->row + 1) * sizeof(float));
        done = done && scratch[i];
    }
    for (int64_t b = begin, e; done && b < end; b = e) {
        e = tile_end(p, b, end);
        for (int64_t i = 0; i < p->buffer_count; i++) {
            const struct buffer *buffer = p->buffers + i;
            at[i] = buffer->data;
            if (buffer->same >= 0)
                at[i] = at[buffer->same];
            else if (!buffer->data)
                at[i] = scratch[i] - row_of(buffer, b) * buffer->row; /* so that a row's number finds it */
        }
        for (int64_t i = 0; i < p->step_count; i++) run_step(p->steps + i, p, at, b, e);
    }
    for (int64_t i = 0; i < p->buffer_count; i++) free(scratch[i]);
    return done;
}
