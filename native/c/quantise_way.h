/* One way of rounding; included by quantise.c once for each instruction set. */

#define ROUNDING(REAL, LARGEST, KIND)                                                                                  \
    static APART TARGET void NAMED(BOTH(scaled_, KIND), WAY)(const REAL *restrict values, REAL factor, size_t count,   \
                                                             REAL *restrict to) {                                      \
        for (size_t i = 0; i < count; i++)                                                                             \
            to[i] = values[i] * factor;                                                                                \
    }                                                                                                                  \
                                                                                                                       \
    /* Whether all values are numbers, and within the bound where none may be clipped. */                              \
    static TARGET int NAMED(BOTH(checked_, KIND), WAY)(const REAL *values, REAL factor, int32_t levels, int clips,     \
                                                       size_t count, int64_t *beyond) {                                \
        const REAL most = (REAL)levels;                                                                                \
        REAL scaled[BLOCK];                                                                                            \
        *beyond = 0;                                                                                                   \
        for (size_t first = 0; first < count; first += BLOCK) {                                                        \
            const size_t here = count - first < BLOCK ? count - first : BLOCK;                                         \
            NAMED(BOTH(scaled_, KIND), WAY)(values + first, factor, here, scaled);                                     \
            int32_t wrong = 0, large = 0;                                                                              \
            for (size_t i = 0; i < here; i++) {                                                                        \
                const REAL size = scaled[i] < 0 ? -scaled[i] : scaled[i];                                              \
                wrong += !(size <= LARGEST);                                                                           \
                large += size > most;                                                                                  \
            }                                                                                                          \
            if (wrong)                                                                                                 \
                return 0;                                                                                              \
            *beyond += large;                                                                                          \
        }                                                                                                              \
        return clips || !*beyond;                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    /* All values are numbers.  Those beyond the bound become the bound, which is whole and stays so. */               \
    static TARGET void NAMED(BOTH(rounded_, KIND), WAY)(const REAL *values, const REAL *uniform, REAL factor,          \
                                                        int32_t levels, size_t count, int32_t *steps) {                \
        const REAL most = (REAL)levels;                                                                                \
        REAL scaled[BLOCK];                                                                                            \
        for (size_t first = 0; first < count; first += BLOCK) {                                                        \
            const size_t here = count - first < BLOCK ? count - first : BLOCK;                                         \
            NAMED(BOTH(scaled_, KIND), WAY)(values + first, factor, here, scaled);                                     \
            const REAL *restrict draws = uniform + first;                                                              \
            int32_t *restrict to = steps + first;                                                                      \
            for (size_t i = 0; i < here; i++) {                                                                        \
                REAL x = scaled[i];                                                                                    \
                x = x < most ? x : most;                                                                               \
                x = x > -most ? x : -most;                                                                             \
                int32_t whole = (int32_t)x;                                                                            \
                whole -= (REAL)whole > x;                                                                              \
                to[i] = whole + (x - (REAL)whole > draws[i]);                                                          \
            }                                                                                                          \
        }                                                                                                              \
    }

ROUNDING(float, FLT_MAX, float)
ROUNDING(double, DBL_MAX, double)

#undef ROUNDING
#undef TARGET
#undef WAY
