/* Runs the rounding of contributions of another processor under an emulator.

   Request on standard input: factor (a double), levels, whether values are doubles, and their count (8 bytes each); the
   values and the draws.  Answer: steps, and the number of values beyond the bound.  Exits 3 where it is refused. */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

int main(void) {
    double factor;
    int64_t head[3], beyond;
    if (fread(&factor, 8, 1, stdin) != 1 || fread(head, 8, 3, stdin) != 3)
        return 4;
    const size_t count = (size_t)head[2], bytes = head[1] ? 8 : 4;
    void *values = malloc(count * bytes + 1), *draws = malloc(count * bytes + 1);
    int32_t *steps = malloc(count * 4 + 1);
    if (values == NULL || draws == NULL || steps == NULL || fread(values, bytes, count, stdin) != count ||
        fread(draws, bytes, count, stdin) != count)
        return 4;
    if (coterie_round(WAY_PLAIN, values, draws, (int)head[1], factor, (int32_t)head[0], 1, count, steps, NULL, NULL, 0,
                      1, &beyond))
        return 3;
    fwrite(steps, 4, count, stdout);
    fwrite(&beyond, 8, 1, stdout);
    return 0;
}
