/* What the compiled kernels of Coterie offer to Python (build_kernels.py reads the part between the marks). */
#ifndef COTERIE_KERNELS_H
#define COTERIE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* begin */
/* Ways of computing the keystream of masks; a processor has some of them. */
enum { WAY_AVX512 = 0, WAY_AVX2 = 1, WAY_AESNI = 2, WAY_ARMV8 = 3, WAYS = 4 };

/* Returns 1 if this processor and its operating system bear a way, 0 otherwise. */
int coterie_has_way(int way);

/* Adds masks to a vector, modulo 2^32 and in place.

   The mask of a key is the keystream of AES-256 in counter mode whose first block is 12 zero bytes and the number 2,
   big-endian, read as little-endian words.  keys has 32 bytes for each of count masks; minus says for each whether it
   is subtracted; mirrors has for each a vector that gets it with the opposite sign, or NULL.  The vectors have words
   elements and may not overlap.  Returns 0, or -1 and changes nothing where the way is not there, or words is 2^33 or
   more. */
int coterie_add_masks(int way, uint32_t *vector, size_t words, const uint8_t *keys, const uint8_t *minus,
                      uint32_t *const *mirrors, size_t count);

/* Instruction sets of the gradients of neural collaborative filtering, and of rounding. */
enum { WAY_PLAIN = 16 };

/* Returns 1 if this processor bears gradients and rounding by WAY_AVX512, WAY_AVX2 or WAY_PLAIN, 0 otherwise. */
int coterie_has_ncf_way(int way);

/* Loss of each user, and its derivatives: coterie.systems.fedncf.networks.gradients with one embedding a user.

   sizes are the widths of an embedding's parts, GMF and MLP, and the outputs of the hidden layers; width is the sum of
   the first two, and size the length of a network.  user_vectors has users x width values, rows users x (width + 1) x
   instances, of which the last coordinate is not read, network size values for all users or, with own_networks, for
   each, label and weight users x instances.  Written are loss (users), d_user (users x width), d_rows (users x width x
   instances), d_network (users x size).  Returns 0; -1 where the way is not there or the sizes are no network's; -2
   without memory. */
int coterie_ncf_gradients(int way, const int32_t *sizes, size_t sizes_count, size_t users, size_t instances,
                          const float *user_vectors, const float *rows, const float *network, int own_networks,
                          const float *label, const float *weight, float *loss, float *d_user, float *d_rows,
                          float *d_network);

/* Lays a user's instances out in steps, in each of them every item at most once: coterie.systems.fedncf.local_step._draw
   after its draws, to the bit.

   positives has history items below items, ascending; negatives epochs x each numbers of items outside the history;
   order epochs x (history + each) places of instances in their epoch, or NULL where batch holds an epoch.  Written are
   row, step, place, label and weight of each instance, touched, counts of each step, and in found the numbers of
   instances, of touched items, and of instances in the widest step; arrays have room for epochs x (history + each)
   values (touched for no more than all items), counts for every step.  Returns 0; -1 where there is nothing to lay out, or items are more than 2^31 or
   instances more than 2^30; -2 without memory; -3 where a number is beyond its range, or places of an epoch repeat so
   that a step has not as many instances as a batch. */
int coterie_lay_out(const int64_t *positives, size_t history, const int64_t *negatives, size_t each, size_t epochs,
                    const int64_t *order, size_t batch, int64_t items, int64_t *touched, int64_t *row, int64_t *step,
                    int64_t *place, float *label, float *weight, int64_t *counts, size_t *found);

/* The local steps of some users of FedNCF: coterie.systems.fedncf.local_step.

   histories and epochs have a number for each user, each at least 1; a user has ratio negatives for each interaction, and
   batch instances in a step, all of an epoch where it is 0.  Draws are those of coterie_lay_out, one user's after the
   other's; order has only those of users with more instances than a batch.  items has items_count x width values,
   network and common the length of a network, control users x that, balance items_count values; control with common,
   and balance, may be NULL.  embedding (users x width), with Adam its moments first and second, else NULL, and steps,
   of which so many were taken before, move in place.  Written are touched, row_deltas (touched x width), one user's
   after the other's without a gap; network_delta (users x size), loss (users), the sum over steps, and found (users x 2),
   the numbers of touched items and of steps; touched and row_deltas have room for the instances of all users, of each
   for no more than all items.  Returns as coterie_lay_out, and -1 where the way is not there or the sizes are no
   network's; users before one that is refused have moved. */
int coterie_ncf_local_steps(int way, const int32_t *sizes, size_t sizes_count, size_t users, const int64_t *histories,
                            const int64_t *epochs, size_t ratio, size_t batch, const int64_t *positives,
                            const int64_t *negatives, const int64_t *order, int64_t items_count, const float *items,
                            const float *network, const float *control, const float *common, const float *balance,
                            double rate, int adam, double proximal, double private_rate, float *embedding, float *first,
                            float *second, int32_t *steps, int32_t *touched, float *row_deltas, float *network_delta,
                            double *loss, int64_t *found);

/* Rounds values to whole steps: coterie.secure_sum.contribution.rounded, to the bit.

   values and uniform are count floats, or doubles where wide; factor is the number of steps in 1.  Written are steps,
   and beyond, the number of values of more than levels steps, which become that many.  Where sums is not NULL, steps are
   added to it: to its count values, or to the rows of width values that rows names, of rows_count.  Returns 0; 1 where a
   value is not finite, or beyond the bound and clips is 0; -1 where the way is not there, levels are below 1, or rows of
   width are not count; -3 where a row is beyond rows_count.  Nothing but beyond is written then. */
int coterie_round(int way, const void *values, const void *uniform, int wide, double factor, int32_t levels, int clips,
                  size_t count, int32_t *steps, int64_t *sums, const int64_t *rows, size_t rows_count, size_t width,
                  int64_t *beyond);
/* end */

#endif
