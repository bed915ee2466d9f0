/* One way of computing the gradients; included by ncf.c once for each width of vectors. */

#define V NAMED(vector, WAY)
#define I NAMED(mask, WAY)

typedef float V __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));

static inline __attribute__((always_inline)) TARGET V NAMED(all, WAY)(float value) { return value - (V){0}; }

/* The values where a condition holds, zero elsewhere. */
static inline __attribute__((always_inline)) TARGET V NAMED(where, WAY)(I condition, V value) {
    return (V)(condition & (I)value);
}

/* The sums of four vectors' values. */
static inline __attribute__((always_inline)) TARGET void NAMED(totals, WAY)(const V *sums, float to[4]) {
#ifdef FOLD
    const __m128 first = _mm_hadd_ps(FOLD(sums[0]), FOLD(sums[1])), second = _mm_hadd_ps(FOLD(sums[2]), FOLD(sums[3]));
    _mm_storeu_ps(to, _mm_hadd_ps(first, second));
#else
    for (int j = 0; j < 4; j++) {
        to[j] = 0;
        for (int i = 0; i < LANES; i++)
            to[j] += sums[j][i];
    }
#endif
}

static inline __attribute__((always_inline)) TARGET float NAMED(total, WAY)(V value) {
    const V sums[4] = {value, {0}, {0}, {0}};
    float found[4];
    NAMED(totals, WAY)(sums, found);
    return found[0];
}

/* e^x for x <= 0, to two units in the last place: x = n ln 2 + r, and a polynomial for e^r. */
static inline __attribute__((always_inline)) TARGET V NAMED(exponential, WAY)(V x) {
    const V magic = NAMED(all, WAY)(12582912.0f); /* 1.5 * 2^23: its sum with a number below 2^22 has no fraction */
    const V shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    /* ln 2 in two parts, the first with few bits, so that its product with n is exact. */
    const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    V sum = NAMED(all, WAY)(1.0f / 5040);
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const I exponent = ((I)shifted - (I)magic + 127) << 23;
    /* Below 2^-126 the result is zero; a number that is none stays none. */
    return NAMED(where, WAY)(~(x < -87.0f), sum * (V)exponent);
}

/* log(1 + c) for c in [0, 1], to two units in the last place: twice the inverse hyperbolic tangent of c / (2 + c). */
static inline __attribute__((always_inline)) TARGET V NAMED(log_one_plus, WAY)(V c) {
    const V s = c / (c + 2.0f), square = s * s;
    V sum = NAMED(all, WAY)(1.0f / 15);
    sum = sum * square + 1.0f / 13;
    sum = sum * square + 1.0f / 11;
    sum = sum * square + 1.0f / 9;
    sum = sum * square + 1.0f / 7;
    sum = sum * square + 1.0f / 5;
    sum = sum * square + 1.0f / 3;
    sum = sum * square + 1.0f;
    return 2.0f * s * sum;
}

/* Some rows of a product for the instances of one tile: out[i] = start[i] + sum over j of weights[i, j] in[j], then
   rectified, or zero where the gate is not positive. */
static inline __attribute__((always_inline)) TARGET void NAMED(tile, WAY)(
    const int count, int inner, row *out, const float *weights, ptrdiff_t down, ptrdiff_t across, const row *in,
    const float *start, ptrdiff_t start_step, int rectified, const row *gate, int first) {
    V sums[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < count; i++)
        for (int c = 0; c < TILE_VECTORS; c++)
            sums[i][c] = NAMED(all, WAY)(start == NULL ? 0.0f : start[i * start_step]);
    for (int j = 0; j < inner; j++) {
        const V *values = (const V *)in[j] + first;
        for (int i = 0; i < count; i++) {
            const V w = NAMED(all, WAY)(weights[i * down + j * across]);
            for (int c = 0; c < TILE_VECTORS; c++)
                sums[i][c] += w * values[c];
        }
    }
    for (int i = 0; i < count; i++)
        for (int c = 0; c < TILE_VECTORS; c++) {
            V value = sums[i][c];
            if (rectified)
                value = NAMED(where, WAY)(~(value < 0.0f), value);
            if (gate != NULL)
                value = NAMED(where, WAY)(((const V *)gate[i])[first + c] > 0.0f, value);
            ((V *)out[i])[first + c] = value;
        }
}

static TARGET void NAMED(product, WAY)(int rows, int inner, row *out, const float *weights, ptrdiff_t down,
                                       ptrdiff_t across, const row *in, const float *start, ptrdiff_t start_step,
                                       int rectified, const row *gate, int first) {
    int i = 0;
    for (; i + TILE_ROWS <= rows; i += TILE_ROWS)
        NAMED(tile, WAY)(TILE_ROWS, inner, out + i, weights + i * down, down, across, in,
                         start == NULL ? NULL : start + i * start_step, start_step, rectified,
                         gate == NULL ? NULL : gate + i, first);
    for (; i < rows; i++)
        NAMED(tile, WAY)(1, inner, out + i, weights + i * down, down, across, in,
                         start == NULL ? NULL : start + i * start_step, start_step, rectified,
                         gate == NULL ? NULL : gate + i, first);
}

/* Sums over instances: to[i, j] += sum of back[i] in[j], for a tile of four columns or of one. */
static inline __attribute__((always_inline)) TARGET void NAMED(outer_tile, WAY)(const int rows, const int columns,
                                                                                float *to, ptrdiff_t stride,
                                                                                const row *back, const row *in,
                                                                                int vectors) {
    V sums[TILE_ROWS][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 4; j++)
            sums[i][j] = NAMED(all, WAY)(0.0f);
    for (int c = 0; c < vectors; c++)
        for (int i = 0; i < rows; i++) {
            const V g = ((const V *)back[i])[c];
            for (int j = 0; j < columns; j++)
                sums[i][j] += g * ((const V *)in[j])[c];
        }
    for (int i = 0; i < rows; i++) {
        float found[4];
        NAMED(totals, WAY)(sums[i], found);
        for (int j = 0; j < columns; j++)
            to[i * stride + j] += found[j];
    }
}

static TARGET void NAMED(outer, WAY)(int rows, int columns, float *to, ptrdiff_t stride, const row *back,
                                     const row *in, int vectors) {
    int i = 0;
    for (; i + TILE_ROWS <= rows; i += TILE_ROWS) {
        int j = 0;
        for (; j + 4 <= columns; j += 4)
            NAMED(outer_tile, WAY)(TILE_ROWS, 4, to + i * stride + j, stride, back + i, in + j, vectors);
        for (; j < columns; j++)
            NAMED(outer_tile, WAY)(TILE_ROWS, 1, to + i * stride + j, stride, back + i, in + j, vectors);
    }
    for (; i < rows; i++) {
        int j = 0;
        for (; j + 4 <= columns; j += 4)
            NAMED(outer_tile, WAY)(1, 4, to + i * stride + j, stride, back + i, in + j, vectors);
        for (; j < columns; j++)
            NAMED(outer_tile, WAY)(1, 1, to + i * stride + j, stride, back + i, in + j, vectors);
    }
}

static inline __attribute__((always_inline)) TARGET float NAMED(dot, WAY)(const float *one, const float *other,
                                                                          int vectors) {
    V sum = NAMED(all, WAY)(0.0f);
    for (int c = 0; c < vectors; c++)
        sum += ((const V *)one)[c] * ((const V *)other)[c];
    return NAMED(total, WAY)(sum);
}

static inline __attribute__((always_inline)) TARGET float NAMED(row_total, WAY)(const float *values, int vectors) {
    V sum = NAMED(all, WAY)(0.0f);
    for (int c = 0; c < vectors; c++)
        sum += ((const V *)values)[c];
    return NAMED(total, WAY)(sum);
}

/* Loss of some instances, and in g the derivative by their logits. */
static inline __attribute__((always_inline)) TARGET V NAMED(entropy, WAY)(const struct network *net,
                                                                          const float *output, const float *shares,
                                                                          const row *above, int top, int c) {
    V z = NAMED(all, WAY)(output[net->gmf + top]);
    for (int k = 0; k < net->gmf; k++)
        z += shares[k] * ((const V *)net->factors[k])[c];
    for (int k = 0; k < top; k++)
        z += output[net->gmf + k] * ((const V *)above[k])[c];
    const I negative = z < 0.0f;
    const V size = (V)((I)z & 0x7fffffff), chance = NAMED(exponential, WAY)(-size);
    const V yes = ((const V *)net->label)[c], much = ((const V *)net->weight)[c];
    const V positive = NAMED(where, WAY)(~negative, z), large = 1.0f / (chance + 1.0f);
    const V odds = NAMED(where, WAY)(~negative, large) + NAMED(where, WAY)(negative, chance * large);
    ((V *)net->g)[c] = (odds - yes) * much;
    return much * (NAMED(log_one_plus, WAY)(chance) + positive - yes * z);
}

static TARGET float NAMED(one_user, WAY)(const struct network *net, size_t instances, const float *user,
                                         const float *rows, const float *weights, const float *label,
                                         const float *weight, float *d_user, float *d_rows, float *d_weights) {
    enum { TILE = TILE_VECTORS * LANES };
    const int G = net->gmf, M = net->mlp, L = net->layers, top = L ? net->outputs[L - 1] : 0;
    const float *output = weights + net->output;
    float *d_output = d_weights + net->output;
    float *shares = net->user;    /* of each factor: user times weight */
    float *begun = net->user + G; /* what the user's part and the bias give to each unit of the first layer */
    const row *above = L ? net->activations[L - 1] : NULL;
    memset(d_weights, 0, sizeof(float) * net->size);
    memset(d_user, 0, sizeof(float) * (size_t)(G + M));
    for (int k = 0; k < G; k++)
        shares[k] = user[k] * output[k];
    for (int i = 0; L && i < net->outputs[0]; i++) {
        const float *into = weights + (size_t)i * (size_t)(2 * M + 1);
        float sum = into[2 * M];
        for (int k = 0; k < M; k++)
            sum += into[k] * user[G + k];
        begun[i] = sum;
    }

    double loss = 0;
    for (size_t first = 0; first < instances; first += ROW) {
        const size_t here = instances - first < ROW ? instances - first : ROW;
        const int tiles = (int)((here + TILE - 1) / TILE), vectors = tiles * TILE_VECTORS;
        const size_t bytes = sizeof(float) * here, rest = sizeof(float) * ((size_t)tiles * TILE - here);
        memcpy(net->label, label + first, bytes);
        memset(net->label + here, 0, rest);
        memcpy(net->weight, weight + first, bytes);
        memset(net->weight + here, 0, rest);
        for (int k = 0; k < G + M; k++) {
            memcpy(net->factors[k], rows + (size_t)k * instances + first, bytes);
            memset(net->factors[k] + here, 0, rest);
        }

        /* Forward and back, a tile of instances at a time: it stays in the first cache. */
        V part = NAMED(all, WAY)(0.0f);
        for (int at = 0; at < vectors; at += TILE_VECTORS) {
            for (int layer = 0; layer < L; layer++) {
                const int inputs = net->inputs[layer], units = net->outputs[layer];
                const ptrdiff_t stride = (ptrdiff_t)inputs + 1;
                const float *matrix = weights + net->starts[layer];
                if (layer == 0)
                    NAMED(product, WAY)(units, M, net->activations[0], matrix + M, stride, 1, net->items, begun, 1, 1,
                                        NULL, at);
                else
                    NAMED(product, WAY)(units, inputs, net->activations[layer], matrix, stride, 1,
                                        net->activations[layer - 1], matrix + inputs, stride, 1, NULL, at);
            }
            for (int c = at; c < at + TILE_VECTORS; c++)
                part += NAMED(entropy, WAY)(net, output, shares, above, top, c);
            for (int k = 0; k < G; k++)
                for (int c = at; c < at + TILE_VECTORS; c++)
                    ((V *)net->changes[k])[c] = shares[k] * ((const V *)net->g)[c];
            for (int k = 0; k < top; k++)
                for (int c = at; c < at + TILE_VECTORS; c++)
                    ((V *)net->back[L - 1][k])[c] = NAMED(where, WAY)(((const V *)above[k])[c] > 0.0f,
                                                                    output[G + k] * ((const V *)net->g)[c]);
            for (int layer = L - 1; layer >= 0; layer--) {
                const int inputs = net->inputs[layer], units = net->outputs[layer];
                const ptrdiff_t stride = (ptrdiff_t)inputs + 1;
                const float *matrix = weights + net->starts[layer];
                if (layer == 0)
                    NAMED(product, WAY)(M, units, net->changes + G, matrix + M, 1, stride, net->back[0], NULL, 0, 0,
                                        NULL, at);
                else
                    NAMED(product, WAY)(inputs, units, net->back[layer - 1], matrix, 1, stride, net->back[layer], NULL,
                                        0, 0, net->activations[layer - 1], at);
            }
        }
        loss += NAMED(total, WAY)(part);
        for (int k = 0; k < G + M; k++)
            memcpy(d_rows + (size_t)k * instances + first, net->changes[k], bytes);

        /* Sums over all these instances. */
        for (int k = 0; k < G; k++)
            d_user[k] += NAMED(dot, WAY)(net->g, net->factors[k], vectors);
        for (int k = 0; k < top; k++)
            d_output[G + k] += NAMED(dot, WAY)(net->g, above[k], vectors);
        d_output[G + top] += NAMED(row_total, WAY)(net->g, vectors);
        for (int layer = 0; layer < L; layer++) {
            const int inputs = net->inputs[layer], units = net->outputs[layer];
            const ptrdiff_t stride = (ptrdiff_t)inputs + 1;
            float *d_matrix = d_weights + net->starts[layer];
            for (int i = 0; i < units; i++)
                d_matrix[i * stride + inputs] += NAMED(row_total, WAY)(net->back[layer][i], vectors);
            if (layer == 0)
                NAMED(outer, WAY)(units, M, d_matrix + M, stride, net->back[0], net->items, vectors);
            else
                NAMED(outer, WAY)(units, inputs, d_matrix, stride, net->back[layer], net->activations[layer - 1],
                                  vectors);
        }
    }

    for (int k = 0; k < G; k++) {
        d_output[k] = d_user[k] * user[k];
        d_user[k] *= output[k];
    }
    /* All instances of a user share its part, so its derivatives follow from those of the first layer's biases. */
    for (int i = 0; L && i < net->outputs[0]; i++) {
        const float *into = weights + (size_t)i * (size_t)(2 * M + 1);
        float *d_into = d_weights + (size_t)i * (size_t)(2 * M + 1);
        for (int k = 0; k < M; k++) {
            d_into[k] = d_into[2 * M] * user[G + k];
            d_user[G + k] += into[k] * d_into[2 * M];
        }
    }
    return (float)loss;
}

#undef V
#undef I
#undef TARGET
#undef WAY
#undef LANES
#undef TILE_ROWS
#undef TILE_VECTORS
#undef FOLD
