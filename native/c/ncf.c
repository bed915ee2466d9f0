/* Gradients of neural collaborative filtering for many users: GMF, MLP and NeuMF, forward and backward.

   A vector of the processor holds one coordinate of several instances.  Forward and back a few vectors go through the
   whole network, in the first cache; sums over instances are then taken over several hundred at once.  The order of
   sums, and so their last bits, depends on the instruction set, never on the other users. */
#include "kernels.h"

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
        float *to_user = d_user + user * width, *to_rows = d_rows + user * width * instances;
        float *to_network = d_network + user * net.size;
        switch (way) {
#if defined(__x86_64__)
        case WAY_AVX512:
            loss[user] = one_user_avx512(&net, instances, vectors, met, own, y, w, to_user, to_rows, to_network);
            break;
        case WAY_AVX2:
            loss[user] = one_user_avx2(&net, instances, vectors, met, own, y, w, to_user, to_rows, to_network);
            break;
#endif
        default:
            loss[user] = one_user_plain(&net, instances, vectors, met, own, y, w, to_user, to_rows, to_network);
        }
    }
    free(memory);
    return 0;
}
