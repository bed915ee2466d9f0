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

/* Instruction sets of the gradients of neural collaborative filtering. */
enum { WAY_PLAIN = 16 };

/* Returns 1 if this processor bears the gradients by WAY_AVX512, WAY_AVX2 or WAY_PLAIN, 0 otherwise. */
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
/* end */

#endif
