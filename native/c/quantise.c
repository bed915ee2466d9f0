/* Stochastic rounding of contributions to whole steps: coterie.secure_sum.contribution.rounded, to the bit.

   Values are multiplied in a function of its own and go through memory, so that no compiler fuses the product with the
   difference that follows: that would be another rounding than NumPy's. */
#include "kernels.h"

#include <float.h>
#include <math.h>

enum { BLOCK = 1024 };

#if defined(__GNUC__) && !defined(__clang__)
#define APART __attribute__((noinline, noipa))
#else
#define APART __attribute__((noinline))
#endif

#define BOTH(a, b) a##b
#define NAMED(name, way) BOTH(name, way)

#define TARGET
#define WAY _plain
#include "quantise_way.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2")))
#define WAY _avx2
#include "quantise_way.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#define WAY _avx512
#include "quantise_way.h"
#endif

int coterie_round(int way, const void *values, const void *uniform, int wide, double factor, int32_t levels, int clips,
                  size_t count, int32_t *steps, int64_t *sums, const int64_t *rows, size_t rows_count, size_t width, int64_t *beyond) {
    if (!coterie_has_ncf_way(way) || levels < 1 || (rows != NULL && (!width || count % width)))
        return -1;
    for (size_t r = 0; rows != NULL && r < count / width; r++)
        if (rows[r] < 0 || (size_t)rows[r] >= rows_count)
            return -3;
    switch (way) {
#if defined(__x86_64__)
    case WAY_AVX512:
        if (!(wide ? checked_double_avx512(values, factor, levels, clips, count, beyond)
                   : checked_float_avx512(values, (float)factor, levels, clips, count, beyond)))
            return 1;
        if (wide)
            rounded_double_avx512(values, uniform, factor, levels, count, steps);
        else
            rounded_float_avx512(values, uniform, (float)factor, levels, count, steps);
        break;
    case WAY_AVX2:
        if (!(wide ? checked_double_avx2(values, factor, levels, clips, count, beyond)
                   : checked_float_avx2(values, (float)factor, levels, clips, count, beyond)))
            return 1;
        if (wide)
            rounded_double_avx2(values, uniform, factor, levels, count, steps);
        else
            rounded_float_avx2(values, uniform, (float)factor, levels, count, steps);
        break;
#endif
    default:
        if (!(wide ? checked_double_plain(values, factor, levels, clips, count, beyond)
                   : checked_float_plain(values, (float)factor, levels, clips, count, beyond)))
            return 1;
        if (wide)
            rounded_double_plain(values, uniform, factor, levels, count, steps);
        else
            rounded_float_plain(values, uniform, (float)factor, levels, count, steps);
    }
    if (sums == NULL)
        return 0;
    if (rows == NULL) {
        for (size_t i = 0; i < count; i++)
            sums[i] += steps[i];
        return 0;
    }
    for (size_t r = 0; r < count / width; r++) {
        int64_t *to = sums + (size_t)rows[r] * width;
        for (size_t k = 0; k < width; k++)
            to[k] += steps[r * width + k];
    }
    return 0;
}
