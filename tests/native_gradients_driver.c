/* Runs the gradients of neural collaborative filtering of another processor under an emulator.

   Request on standard input: four numbers of 32 bits, the count of sizes, users, instances and a network's length; the
   sizes; then user vectors, rows, a network for each user, labels and weights, as coterie_ncf_gradients has them.
   Answer: loss, and derivatives of user vectors, rows and networks.  Exits 3 where it is refused. */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

static void *read_all(size_t count, size_t bytes) {
    void *found = malloc(count * bytes + 1);
    if (found == NULL || fread(found, bytes, count, stdin) != count)
        exit(4);
    return found;
}

int main(void) {
    const int32_t *head = read_all(4, 4);
    const size_t count = (size_t)head[0], users = (size_t)head[1], instances = (size_t)head[2], size = (size_t)head[3];
    const int32_t *sizes = read_all(count, 4);
    const size_t width = (size_t)(sizes[0] + sizes[1]);
    const float *user = read_all(users * width, 4), *rows = read_all(users * (width + 1) * instances, 4);
    const float *network = read_all(users * size, 4);
    const float *label = read_all(users * instances, 4), *weight = read_all(users * instances, 4);
    const size_t all = users * (1 + width + width * instances + size);
    float *loss = malloc(4 * all), *d_user = loss + users, *d_rows = d_user + users * width;
    if (loss == NULL || coterie_ncf_gradients(WAY_PLAIN, sizes, count, users, instances, user, rows, network, 1, label,
                                              weight, loss, d_user, d_rows, d_rows + users * width * instances))
        return 3;
    fwrite(loss, 4, all, stdout);
    return 0;
}
