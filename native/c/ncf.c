/* Gradients of neural collaborative filtering for many users: GMF, MLP and NeuMF, forward and backward.

   A vector of the processor holds one coordinate of several instances.  Forward and back a few vectors go through the
   whole network, in the first cache; sums over instances are then taken over several hundred at once.  The order of
   sums, and so their last bits, depends on the instruction set, never on the other users.

   A whole local step of one user goes through the same code: its instances are laid out (steps.c), and rows, network and
   embedding move after each step of optimisation. */
#include "kernels.h"

#include "steps.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ROW = 512, MOST_LAYERS = 16 };

/* A coordinate of so many instances.  Without the end all rows would lie in the same few sets of the first cache. */
typedef float row[ROW + 16];

/* Sizes and places of a network, and the memory in which instances go through it. */
struct network {
    int gmf, mlp, layers;
    int inputs[MOST_LAYERS], outputs[MOST_LAYERS]; /* of hidden layers, without the constant input */
    size_t starts[MOST_LAYERS], output, size;
    row *factors, *items, *activations[MOST_LAYERS], *back[MOST_LAYERS], *changes;
    float *label, *weight, *g, *user;
};

/* The rows that instances meet, and where their derivatives go (ncf_way.h, fetch). */
struct rows {
    const float *values, *table;
    const int64_t *at;
    float *derivatives;
};

/* What a local step asks for; control, common and balance may be NULL. */
struct local {
    const float *items, *network, *control, *common, *balance;
    float *row_deltas, *network_delta;
    double rate, proximal, private_rate;
    int adam;
};

/* What a user keeps: an embedding and, with Adam, its moments; else NULL. */
struct kept {
    float *embedding, *first, *second;
    int64_t steps;
};

struct memory {
    float *push, *pull, *d_user, *start, *every, *moments;
};

struct adam {
    float size, root;
};

static struct adam adam_step(double rate, int64_t steps) {
    const double count = (double)steps;
    return (struct adam){(float)(rate / (1 - pow(0.9, count))), (float)(1 / sqrt(1 - pow(0.999, count)))};
}

#define BOTH(a, b) a##b
#define NAMED(name, way) BOTH(name, way)

#define TARGET
#define WAY _plain
#define LANES 4
#define TILE_ROWS 3
#define TILE_VECTORS 4
#include "ncf_way.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define WAY _avx2
#define FOLD(v) _mm_add_ps(_mm256_castps256_ps128((__m256)(v)), _mm256_extractf128_ps((__m256)(v), 1))
#define LANES 8
#define TILE_ROWS 3
#define TILE_VECTORS 4
#include "ncf_way.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define WAY _avx512
#define HALVES(v) _mm256_add_ps(_mm512_castps512_ps256((__m512)(v)), _mm512_extractf32x8_ps((__m512)(v), 1))
#define FOLD(v) _mm_add_ps(_mm256_castps256_ps128(HALVES(v)), _mm256_extractf128_ps(HALVES(v), 1))
#define LANES 16
#define TILE_ROWS 6
#define TILE_VECTORS 4
#include "ncf_way.h"
#endif

static int fits(const int32_t *sizes, size_t count, struct network *found) {
    if (count < 2 || count > 2 + MOST_LAYERS)
        return 0;
    for (size_t i = 0; i < count; i++)
        if (sizes[i] < (i < 2 ? 0 : 1) || sizes[i] > 1 << 16)
            return 0;
    found->gmf = sizes[0];
    found->mlp = sizes[1];
    found->layers = (int)count - 2;
    if (found->gmf + found->mlp == 0 || (found->mlp == 0) != (found->layers == 0))
        return 0;
    size_t at = 0;
    int inputs = 2 * found->mlp;
    for (int layer = 0; layer < found->layers; layer++) {
        found->starts[layer] = at;
        found->inputs[layer] = inputs;
        found->outputs[layer] = sizes[2 + layer];
        at += (size_t)found->outputs[layer] * (size_t)(inputs + 1);
        inputs = found->outputs[layer];
    }
    found->output = at;
    found->size = at + (size_t)found->gmf + (size_t)(found->layers ? inputs : 0) + 1;
    return 1;
}

/* Lays the rows out in one piece of memory, which the caller frees; NULL where there is none. */
static void *laid_out(struct network *net) {
    const size_t width = (size_t)(net->gmf + net->mlp);
    size_t units = 0;
    for (int layer = 0; layer < net->layers; layer++)
        units += (size_t)net->outputs[layer];
    /* At the end a float for each factor and each unit: less than a row for each. */
    row *at = aligned_alloc(64, sizeof(row) * (3 * width + 3 * units + 3));
    void *all = at;
    if (all == NULL)
        return NULL;
    net->factors = at;
    net->items = at + net->gmf;
    at += width;
    net->changes = at;
    at += width;
    for (int layer = 0; layer < net->layers; layer++) {
        net->activations[layer] = at;
        at += net->outputs[layer];
        net->back[layer] = at;
        at += net->outputs[layer];
    }
    net->label = *at++;
    net->weight = *at++;
    net->g = *at++;
    net->user = *at;
    return all;
}

int coterie_has_ncf_way(int way) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (way == WAY_AVX512)
        return narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                   ? 1
                   : 0;
    if (way == WAY_AVX2)
        return narrow ? 1 : 0;
#endif
    return way == WAY_PLAIN;
}

int coterie_ncf_gradients(int way, const int32_t *sizes, size_t sizes_count, size_t users, size_t instances,
                          const float *user_vectors, const float *rows, const float *network, int own_networks,
                          const float *label, const float *weight, float *loss, float *d_user, float *d_rows,
                          float *d_network) {
    struct network net;
    if (!coterie_has_ncf_way(way) || !fits(sizes, sizes_count, &net))
        return -1;
    void *memory = laid_out(&net);
    if (memory == NULL)
        return -2;
    const size_t width = (size_t)(net.gmf + net.mlp);
    for (size_t user = 0; user < users; user++) {
        const float *own = network + (own_networks ? user * net.size : 0);
        const float *vectors = user_vectors + user * width, *met = rows + user * (width + 1) * instances;
        const float *y = label + user * instances, *w = weight + user * instances;
        float *to_user = d_user + user * width, *to_network = d_network + user * net.size;
        const struct rows all = {met, NULL, NULL, d_rows + user * width * instances};
        switch (way) {
#if defined(__x86_64__)
        case WAY_AVX512:
            loss[user] = one_user_avx512(&net, instances, vectors, &all, own, y, w, to_user, to_network);
            break;
        case WAY_AVX2:
            loss[user] = one_user_avx2(&net, instances, vectors, &all, own, y, w, to_user, to_network);
            break;
#endif
        default:
            loss[user] = one_user_plain(&net, instances, vectors, &all, own, y, w, to_user, to_network);
        }
    }
    free(memory);
    return 0;
}

static double one_local(int way, const struct network *net, const struct steps *laid, const struct local *ask,
                        struct kept *kept, struct memory *memory) {
    switch (way) {
#if defined(__x86_64__)
    case WAY_AVX512:
        return local_avx512(net, laid, ask, kept, memory);
    case WAY_AVX2:
        return local_avx2(net, laid, ask, kept, memory);
#endif
    default:
        return local_plain(net, laid, ask, kept, memory);
    }
}

/* Room for so many values, at a multiple of 64 bytes from the start. */
static size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* The memory of one user's local step, in one piece that grows with the users. */
struct piece {
    char *start;
    size_t bytes;
};

static void *taken(char **at, size_t bytes) {
    void *found = *at;
    *at += room(bytes);
    return found;
}

static int with_memory(struct piece *piece, const struct draws *draws, const struct network *net, int adam, int dense,
                       struct steps *laid, struct memory *memory) {
    const size_t all = all_instances(draws), count = all_steps(draws), width = (size_t)(net->gmf + net->mlp);
    const size_t size = draws->history + draws->each, widest = draws->batch < size ? draws->batch : size;
    /* Rows are no more than instances and items, and those of a step no more than a batch. */
    const size_t met = all < (size_t)draws->items ? all : (size_t)draws->items;
    const size_t of_rows = dense ? sizeof(float) * met * width : 0, of_network = sizeof(float) * net->size;
    const size_t of_moments = adam ? 2 * (of_rows + of_network) : 0;
    const size_t bytes = 2 * room(sizeof(int64_t) * all) + room(sizeof(int64_t) * count) +
                         room(sizeof(size_t) * (count + 1)) + 2 * room(sizeof(float) * all) + room(of_network) +
                         room(sizeof(float) * widest * width) + room(sizeof(float) * width) + 2 * room(of_rows) +
                         room(of_moments);
    if (bytes > piece->bytes) {
        free(piece->start);
        piece->start = aligned_alloc(64, bytes);
        piece->bytes = piece->start == NULL ? 0 : bytes;
        if (piece->start == NULL)
            return -2;
    }
    char *at = piece->start;
    laid->touched = taken(&at, sizeof(int64_t) * all);
    laid->row = taken(&at, sizeof(int64_t) * all);
    laid->counts = taken(&at, sizeof(int64_t) * count);
    laid->first = taken(&at, sizeof(size_t) * (count + 1));
    laid->label = taken(&at, sizeof(float) * all);
    laid->weight = taken(&at, sizeof(float) * all);
    memory->push = taken(&at, of_network);
    memory->pull = taken(&at, sizeof(float) * widest * width);
    memory->d_user = taken(&at, sizeof(float) * width);
    memory->start = taken(&at, of_rows);
    memory->every = taken(&at, of_rows);
    memory->moments = taken(&at, of_moments);
    return 0;
}

int coterie_ncf_local_steps(int way, const int32_t *sizes, size_t sizes_count, size_t users, const int64_t *histories,
                            const int64_t *epochs, size_t ratio, size_t batch, const int64_t *positives,
                            const int64_t *negatives, const int64_t *order, int64_t items_count, const float *items,
                            const float *network, const float *control, const float *common, const float *balance,
                            double rate, int adam, double proximal, double private_rate, float *embedding, float *first,
                            float *second, int32_t *steps, int32_t *touched, float *row_deltas, float *network_delta,
                            double *loss, int64_t *found) {
    struct network net;
    if (!coterie_has_ncf_way(way) || !fits(sizes, sizes_count, &net) || !ratio)
        return -1;
    const size_t width = (size_t)(net.gmf + net.mlp);
    struct piece piece = {NULL, 0};
    void *rows = laid_out(&net);
    int done = rows == NULL ? -2 : 0;
    for (size_t user = 0; user < users && !done; user++) {
        const size_t history = (size_t)histories[user], size = history * (1 + ratio);
        struct draws draws = {positives, negatives, NULL, history, (size_t)epochs[user], history * ratio,
                              batch ? batch : size, items_count};
        const size_t all = all_instances(&draws);
        if (!all) {
            done = -1;
            break;
        }
        if (draws.batch < size) {
            draws.order = order;
            order += all;
        }
        positives += history;
        negatives += draws.epochs * draws.each;
        struct steps laid = {0};
        struct memory memory = {0};
        done = with_memory(&piece, &draws, &net, adam, adam || proximal > 0, &laid, &memory);
        if (!done)
            done = lay_out(&draws, &laid);
        if (done)
            break;
        const struct local ask = {items,
                                  network,
                                  control == NULL ? NULL : control + user * net.size,
                                  common,
                                  balance,
                                  row_deltas,
                                  network_delta + user * net.size,
                                  rate,
                                  proximal,
                                  private_rate,
                                  adam};
        struct kept kept = {embedding + user * width, NULL, NULL, steps[user]};
        if (first != NULL) {
            kept.first = first + user * width;
            kept.second = second + user * width;
        }
        loss[user] = one_local(way, &net, &laid, &ask, &kept, &memory);
        steps[user] = (int32_t)kept.steps;
        for (size_t i = 0; i < laid.touched_count; i++)
            touched[i] = (int32_t)laid.touched[i];
        found[2 * user] = (int64_t)laid.touched_count;
        found[2 * user + 1] = (int64_t)laid.count;
        /* The next user's changes follow without a gap. */
        touched += laid.touched_count;
        row_deltas += laid.touched_count * width;
    }
    free(rows);
    free(piece.start);
    return done;
}
