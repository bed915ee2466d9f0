/* Lays a user's positives and drawn negatives out in steps: whole numbers, as the reference has them to the bit.

   The only divisions of floating-point numbers are the weights'; nothing here is sensitive to fused products. */
#include "steps.h"

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

size_t all_instances(const struct draws *draws) {
    const size_t most = (size_t)1 << 30; /* so that item, label and step fit into one number */
    if (draws->items < 1 || draws->items > (int64_t)1 << 31 || draws->batch < 1 || draws->history < 1)
        return 0;
    if (draws->history > most || draws->each > most || draws->epochs > 1 << 20 || !draws->epochs)
        return 0;
    const size_t all = draws->epochs * (draws->history + draws->each);
    return all <= most ? all : 0;
}

static size_t steps_of_an_epoch(const struct draws *draws) {
    return (draws->history + draws->each + draws->batch - 1) / draws->batch;
}

size_t all_steps(const struct draws *draws) { return draws->epochs * steps_of_an_epoch(draws); }

static int bits_of(uint64_t value) {
    int bits = 0;
    for (; value; value >>= 1)
        bits++;
    return bits;
}

/* Sorts numbers by some of their bits, stably; returns where they are then. */
static uint64_t *sorted(uint64_t *numbers, uint64_t *other, size_t count, int from, int to) {
    for (int shift = from; shift < to; shift += 8) {
        size_t places[256] = {0}, at = 0;
        for (size_t i = 0; i < count; i++)
            places[numbers[i] >> shift & 255]++;
        for (int digit = 0; digit < 256; digit++) {
            const size_t here = places[digit];
            places[digit] = at;
            at += here;
        }
        for (size_t i = 0; i < count; i++)
            other[places[numbers[i] >> shift & 255]++] = numbers[i];
        uint64_t *swapped = numbers;
        numbers = other;
        other = swapped;
    }
    return numbers;
}

/* The item that is the k-th of those outside the history: the number of gaps before it is found among gaps, which has
   positives[i] - i.  Every comparison takes the same way, as none can be foreseen. */
static int64_t outside(const int64_t *gaps, size_t history, int64_t k) {
    size_t begin = 0, left = history;
    while (left > 1) {
        const size_t half = left / 2;
        begin += gaps[begin + half - 1] <= k ? half : 0;
        left -= half;
    }
    return k + (int64_t)begin + (gaps[begin] <= k);
}

int lay_out(const struct draws *draws, struct steps *to) {
    const size_t history = draws->history, size = history + draws->each, epochs = draws->epochs;
    const size_t all = all_instances(draws), steps = all_steps(draws), of_epoch = steps_of_an_epoch(draws);
    const int64_t others = draws->items - (int64_t)history;
    for (size_t i = 0; i < history; i++)
        if (draws->positives[i] < 0 || draws->positives[i] >= draws->items ||
            (i && draws->positives[i] <= draws->positives[i - 1]))
            return -3;
    uint64_t *memory = malloc(sizeof *memory * (2 * all + history + steps + 1));
    if (memory == NULL)
        return -2;
    uint64_t *numbers = memory, *other = memory + all, *ends = other + all + history;
    int64_t *gaps = (int64_t *)(other + all);
    for (size_t i = 0; i < history; i++)
        gaps[i] = draws->positives[i] - (int64_t)i;

    /* A number holds item, label and, in its lowest bits, step. */
    const int step_bits = bits_of(steps - 1);
    size_t at = 0;
    int wrong = 0;
    for (size_t epoch = 0; epoch < epochs; epoch++) {
        const int64_t *drawn = draws->negatives + epoch * draws->each, *order = NULL;
        if (of_epoch > 1)
            order = draws->order + epoch * size;
        for (size_t i = 0; i < size; i++) {
            int64_t number;
            if (i < history) {
                number = 2 * draws->positives[i] + 1;
            } else {
                const int64_t k = drawn[i - history];
                if (k < 0 || k >= others) {
                    wrong = 1;
                    break;
                }
                number = 2 * outside(gaps, history, k);
            }
            size_t step = epoch * of_epoch;
            if (order != NULL) {
                if (order[i] < 0 || (size_t)order[i] >= size) {
                    wrong = 1;
                    break;
                }
                step += (size_t)order[i] / draws->batch;
            }
            numbers[at++] = (uint64_t)number << step_bits | step;
        }
    }
    if (wrong) {
        free(memory);
        return -3;
    }

    /* Ascending items get their places among those touched; then instances go to their steps, in the same order. */
    uint64_t *in_order = sorted(numbers, other, all, step_bits, step_bits + bits_of(2 * (uint64_t)draws->items - 1));
    uint64_t *spread = in_order == numbers ? other : numbers;
    const uint64_t step_mask = ((uint64_t)1 << step_bits) - 1;
    memset(ends, 0, sizeof *ends * (steps + 1));
    for (size_t i = 0; i < all; i++)
        ends[(in_order[i] & step_mask) + 1]++;
    for (size_t step = 0; step < steps; step++) {
        const size_t start = draws->batch * (step % of_epoch);
        /* Places that repeat would fill a step beyond a batch, for which callers have memory. */
        if (ends[step + 1] != (size - start < draws->batch ? size - start : draws->batch)) {
            free(memory);
            return -3;
        }
        ends[step + 1] += ends[step];
    }
    to->touched_count = 0;
    int64_t last = -1;
    for (size_t i = 0; i < all; i++) {
        const int64_t item = (int64_t)(in_order[i] >> step_bits >> 1);
        if (item != last) {
            to->touched[to->touched_count++] = item;
            last = item;
        }
        spread[ends[in_order[i] & step_mask]++] =
            (uint64_t)(to->touched_count - 1) << 1 | (in_order[i] >> step_bits & 1);
    }

    /* ends now has the end of each step. */
    size_t found = 0, begin = 0;
    to->count = steps;
    to->widest = 0;
    for (size_t step = 0; step < steps; step++) {
        const size_t start = draws->batch * (step % of_epoch), end = ends[step];
        const size_t counted = size - start < draws->batch ? size - start : draws->batch;
        to->counts[step] = (int64_t)counted;
        to->first[step] = found;
        for (size_t i = begin; i < end;) {
            size_t times = 1;
            while (i + times < end && spread[i + times] == spread[i])
                times++;
            to->row[found] = (int64_t)(spread[i] >> 1);
            to->label[found] = (float)(spread[i] & 1);
            to->weight[found] = (float)((double)times / (double)counted);
            found++;
            i += times;
        }
        begin = end;
        if (found - to->first[step] > to->widest)
            to->widest = found - to->first[step];
    }
    to->first[steps] = found;
    to->instances = found;
    free(memory);
    return 0;
}

int coterie_lay_out(const int64_t *positives, size_t history, const int64_t *negatives, size_t each, size_t epochs,
                    const int64_t *order, size_t batch, int64_t items, int64_t *touched, int64_t *row, int64_t *step,
                    int64_t *place, float *label, float *weight, int64_t *counts, size_t *found) {
    const struct draws draws = {positives, negatives, order, history, epochs, each, batch, items};
    if (!all_instances(&draws) || (order == NULL && steps_of_an_epoch(&draws) > 1))
        return -1;
    const size_t steps = all_steps(&draws);
    struct steps laid = {touched, row, counts, malloc(sizeof *laid.first * (steps + 1)), label, weight, 0, 0, 0, 0};
    if (laid.first == NULL)
        return -2;
    const int done = lay_out(&draws, &laid);
    if (!done) {
        for (size_t s = 0; s < steps; s++)
            for (size_t i = laid.first[s]; i < laid.first[s + 1]; i++) {
                step[i] = (int64_t)s;
                place[i] = (int64_t)(i - laid.first[s]);
            }
        found[0] = laid.instances;
        found[1] = laid.touched_count;
        found[2] = laid.widest;
    }
    free(laid.first);
    return done;
}
