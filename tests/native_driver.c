/* Runs the kernels of another processor under an emulator: reads one request from standard input, writes the results.

   Request: words and count of masks (8 bytes each), a sign and a mark "has the mirror" for each mask (a byte each), the
   keys, the vector.  Answer: the vector and the mirror, which began with zeros.  Exits 3 where no way is there. */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

static void take(void *at, size_t bytes) {
    if (fread(at, 1, bytes, stdin) != bytes)
        exit(4);
}

int main(void) {
    uint64_t size[2];
    take(size, sizeof size);
    const size_t words = size[0], count = size[1];
    uint8_t *minus = malloc(count + 1), *marked = malloc(count + 1), *keys = malloc(32 * count + 1);
    uint32_t *vector = malloc(4 * words + 4), *mirror = calloc(words + 1, 4);
    uint32_t **mirrors = calloc(count + 1, sizeof *mirrors);
    take(minus, count);
    take(marked, count);
    take(keys, 32 * count);
    take(vector, 4 * words);
    for (size_t k = 0; k < count; k++)
        mirrors[k] = marked[k] ? mirror : NULL;
    int way = 0;
    while (way < WAYS && !coterie_has_way(way))
        way++;
    if (way == WAYS || coterie_add_masks(way, vector, words, keys, minus, mirrors, count))
        return 3;
    fwrite(vector, 4, words, stdout);
    fwrite(mirror, 4, words, stdout);
    return 0;
}
