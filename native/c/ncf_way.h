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

/* Rows lie in a table, each in one piece, of which at names those of the instances, and so do their derivatives, in the
   order of the instances; or, where table is NULL, each coordinate of all instances lies in one piece. */
static inline __attribute__((always_inline)) TARGET void NAMED(fetch, WAY)(const struct network *net,
                                                                           const struct rows *rows, size_t instances,
                                                                           size_t first, size_t here, size_t rest) {
    const int width = net->gmf + net->mlp;
    if (rows->table == NULL) {
        for (int k = 0; k < width; k++)
            memcpy(net->factors[k], rows->values + (size_t)k * instances + first, sizeof(float) * here);
    } else {
        for (size_t i = 0; i < here; i++) {
            const float *from = rows->table + (size_t)rows->at[first + i] * (size_t)width;
            for (int k = 0; k < width; k++)
                net->factors[k][i] = from[k];
        }
    }
    for (int k = 0; k < width; k++)
        memset(net->factors[k] + here, 0, sizeof(float) * rest);
}

static inline __attribute__((always_inline)) TARGET void NAMED(store, WAY)(const struct network *net,
                                                                           const struct rows *rows, size_t instances,
                                                                           size_t first, size_t here) {
    const int width = net->gmf + net->mlp;
    if (rows->table == NULL) {
        for (int k = 0; k < width; k++)
            memcpy(rows->derivatives + (size_t)k * instances + first, net->changes[k], sizeof(float) * here);
    } else {
        for (size_t i = 0; i < here; i++) {
            float *to = rows->derivatives + (first + i) * (size_t)width;
            for (int k = 0; k < width; k++)
                to[k] = net->changes[k][i];
        }
    }
}

static TARGET float NAMED(one_user, WAY)(const struct network *net, size_t instances, const float *user,
                                         const struct rows *rows, const float *weights, const float *label,
                                         const float *weight, float *d_user, float *d_weights) {
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
        NAMED(fetch, WAY)(net, rows, instances, first, here, (size_t)tiles * TILE - here);

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
        NAMED(store, WAY)(net, rows, instances, first, here);

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

/* One step of Adam (Kingma and Ba, 2015) in place; size and root come from the count of steps. */
static TARGET void NAMED(adam, WAY)(float *restrict value, const float *restrict gradient, float *restrict mean,
                                    float *restrict square, size_t count, struct adam step) {
    for (size_t i = 0; i < count; i++) {
        const float g = gradient[i];
        mean[i] = mean[i] * 0.9f + 0.1f * g;
        square[i] = square[i] * 0.999f + 0.001f * (g * g);
        value[i] -= mean[i] / (sqrtf(square[i]) * step.root + 1e-8f) * step.size;
    }
}

/* value -= rate * gradient. */
static TARGET void NAMED(descend, WAY)(float *restrict value, const float *restrict gradient, size_t count,
                                       float rate) {
    for (size_t i = 0; i < count; i++)
        value[i] -= rate * gradient[i];
}

/* gradient += mu * (value - start), FedProx. */
static TARGET void NAMED(draw_back, WAY)(float *restrict gradient, const float *restrict value,
                                         const float *restrict start, size_t count, float mu) {
    for (size_t i = 0; i < count; i++)
        gradient[i] += mu * (value[i] - start[i]);
}

/* The local step of a user on laid out instances: coterie.systems.fedncf.local_step._one_step and _many_steps. */
static TARGET double NAMED(local, WAY)(const struct network *net, const struct steps *laid, const struct local *ask,
                                       struct kept *kept, struct memory *memory) {
    const size_t width = (size_t)(net->gmf + net->mlp), values = laid->touched_count * width, size = net->size;
    const int dense = ask->adam || ask->proximal > 0, direct = laid->count == 1 && !dense;
    const float rate = (float)ask->rate, mu = (float)ask->proximal;
    float *now = ask->row_deltas, *own = ask->network_delta, *push = memory->push, *pull = memory->pull;
    for (size_t i = 0; i < laid->touched_count; i++)
        memcpy(now + i * width, ask->items + (size_t)laid->touched[i] * width, sizeof(float) * width);
    memcpy(own, ask->network, sizeof(float) * size);
    if (dense)
        memcpy(memory->start, now, sizeof(float) * values);
    if (ask->adam) {
        memset(memory->moments, 0, sizeof(float) * 2 * (values + size));
    }
    double loss = 0;
    for (size_t s = 0; s < laid->count; s++) {
        const size_t begin = laid->first[s], n = laid->first[s + 1] - begin;
        const int64_t *row = laid->row + begin;
        const float counted = (float)laid->counts[s];
        const struct rows rows = {NULL, now, row, pull};
        loss += NAMED(one_user, WAY)(net, n, kept->embedding, &rows, own, laid->label + begin, laid->weight + begin,
                                     memory->d_user, push);
        if (ask->balance != NULL)
            for (size_t i = 0; i < n; i++)
                if (!(laid->label[begin + i] > 0))
                    for (size_t k = 0; k < width; k++)
                        pull[i * width + k] *= ask->balance[laid->touched[row[i]]];
        if (ask->control != NULL)
            for (size_t k = 0; k < size; k++)
                push[k] = push[k] - ask->control[k] + ask->common[k];
        if (direct) {
            /* Every row is in the step, in order. */
            for (size_t i = 0; i < values; i++)
                now[i] = pull[i] * (-rate * counted);
            for (size_t k = 0; k < size; k++)
                own[k] = push[k] * -rate;
        } else if (dense) {
            float *every = memory->every;
            memset(every, 0, sizeof(float) * values);
            for (size_t i = 0; i < n; i++)
                for (size_t k = 0; k < width; k++)
                    every[(size_t)row[i] * width + k] = ask->adam ? pull[i * width + k] : pull[i * width + k] * counted;
            if (mu > 0) {
                NAMED(draw_back, WAY)(every, now, memory->start, values, mu);
                NAMED(draw_back, WAY)(push, own, ask->network, size, mu);
            }
            if (ask->adam) {
                const struct adam step = adam_step(ask->rate, (int64_t)s + 1);
                float *moments = memory->moments;
                NAMED(adam, WAY)(now, every, moments, moments + values, values, step);
                moments += 2 * values;
                NAMED(adam, WAY)(own, push, moments, moments + size, size, step);
            } else {
                NAMED(descend, WAY)(now, every, values, rate);
                NAMED(descend, WAY)(own, push, size, rate);
            }
        } else {
            for (size_t i = 0; i < n; i++)
                NAMED(descend, WAY)(now + (size_t)row[i] * width, pull + i * width, width, counted * rate);
            NAMED(descend, WAY)(own, push, size, rate);
        }
        kept->steps++;
        if (kept->first != NULL)
            NAMED(adam, WAY)(kept->embedding, memory->d_user, kept->first, kept->second, width,
                             adam_step(ask->private_rate, kept->steps));
        else
            NAMED(descend, WAY)(kept->embedding, memory->d_user, width, (float)ask->private_rate);
    }
    if (direct)
        return loss;
    for (size_t i = 0; i < laid->touched_count; i++) {
        const float *from = ask->items + (size_t)laid->touched[i] * width;
        for (size_t k = 0; k < width; k++)
            now[i * width + k] -= from[k];
    }
    for (size_t k = 0; k < size; k++)
        own[k] -= ask->network[k];
    return loss;
}

#undef V
#undef I
#undef TARGET
#undef WAY
#undef LANES
#undef TILE_ROWS
#undef TILE_VECTORS
#undef FOLD
