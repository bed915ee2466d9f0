/* A user's instances of one local step, laid out in steps of optimisation; in each of them every item at most once. */
#ifndef COTERIE_STEPS_H
#define COTERIE_STEPS_H

#include <stddef.h>
#include <stdint.h>

/* The draws of a user: coterie.systems.fedncf.local_step._drawn. */
struct draws {
    const int64_t *positives, *negatives, *order; /* order NULL where an epoch is one step */
    size_t history, epochs, each, batch;          /* each: negatives of one epoch */
    int64_t items;
};

/* Written by lay_out; arrays have room for every instance, counts for every step, first for one more. */
struct steps {
    int64_t *touched, *row, *counts;
    size_t *first; /* of each step, and the end of the last */
    float *label, *weight;
    size_t count, instances, touched_count, widest;
};

/* Number of instances, repeated ones included, and of steps; 0 where the sizes are none or their product is too large. */
size_t all_instances(const struct draws *draws);
size_t all_steps(const struct draws *draws);

/* Returns 0; -2 without memory; -3 where a draw or an item is beyond its range, positives do not ascend, or
   order fills a step with more or fewer instances than a batch. */
int lay_out(const struct draws *draws, struct steps *to);

#endif
