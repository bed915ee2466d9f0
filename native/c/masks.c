/* Masks of secure aggregation: AES-256 in counter mode, fused with the sum.

   A chunk of the vector stays in the first cache while the keystreams of several keys are added to it, and a keystream
   never leaves the registers.  AES instructions take the same time for every key and every block; no branch and no
   index depends on a key or on a value of the vector.  The expanded keys are overwritten at the end. */
#include "kernels.h"

#include <string.h>

enum { ROUND_KEYS = 15, BLOCK_WORDS = 4, KEYS_AT_ONCE = 32, CHUNK_WORDS = 8192, FIRST_BLOCK = 2 };

/* Overwrites memory; the compiler may not leave it out. */
static void wipe(void *at, size_t bytes) {
    memset(at, 0, bytes);
    __asm__ volatile("" : : "r"(at) : "memory");
}

#define BOTH(a, b) a##b
#define NAMED(name, way) BOTH(name, way)

#if defined(__x86_64__)
#include <immintrin.h>

#define EXPANDS __attribute__((target("aes,sse4.1")))

/* One step of the key schedule of FIPS 197 for the words that come after `previous`: each is the exclusive or of all
   words up to its place in `before` and of `mixed`. */
static inline EXPANDS __m128i next_words(__m128i before, __m128i mixed) {
    before = _mm_xor_si128(before, _mm_slli_si128(before, 4));
    before = _mm_xor_si128(before, _mm_slli_si128(before, 8));
    return _mm_xor_si128(before, mixed);
}

/* Rotated, substituted and with the round constant, in all four words. */
#define FIRST_HALF(i, constant)                                                                                        \
    keys[i] = next_words(keys[i - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[i - 1], constant), 0xff))
/* Substituted only. */
#define SECOND_HALF(i)                                                                                                 \
    keys[i] = next_words(keys[i - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[i - 1], 0), 0xaa))

static EXPANDS void expand(const uint8_t *key, __m128i keys[ROUND_KEYS]) {
    keys[0] = _mm_loadu_si128((const __m128i *)key);
    keys[1] = _mm_loadu_si128((const __m128i *)(key + 16));
    FIRST_HALF(2, 0x01);
    SECOND_HALF(3);
    FIRST_HALF(4, 0x02);
    SECOND_HALF(5);
    FIRST_HALF(6, 0x04);
    SECOND_HALF(7);
    FIRST_HALF(8, 0x08);
    SECOND_HALF(9);
    FIRST_HALF(10, 0x10);
    SECOND_HALF(11);
    FIRST_HALF(12, 0x20);
    SECOND_HALF(13);
    FIRST_HALF(14, 0x40);
}

typedef __m128i round_key;

#define WAY _avx512
#define TARGET __attribute__((target("avx512f,avx512bw,vaes,aes")))
#define VECTOR __m512i
#define LANES 4
#define BATCH 8
#define LOAD(at) _mm512_loadu_si512((const void *)(at))
#define STORE(at, value) _mm512_storeu_si512((void *)(at), value)
#define BROADCAST(value) _mm512_broadcast_i32x4(value)
#define XOR(a, b) _mm512_xor_si512(a, b)
#define ADD(a, b) _mm512_add_epi32(a, b)
#define SUB(a, b) _mm512_sub_epi32(a, b)
#define SHUFFLE(a, order) _mm512_shuffle_epi8(a, order)
#define ROUND(a, key) _mm512_aesenc_epi128(a, key)
#define LAST_ROUND(a, key) _mm512_aesenclast_epi128(a, key)
#include "masks_way.h"

#define WAY _avx2
#define TARGET __attribute__((target("avx2,vaes,aes")))
#define VECTOR __m256i
#define LANES 2
#define BATCH 8
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE(at, value) _mm256_storeu_si256((__m256i *)(at), value)
#define BROADCAST(value) _mm256_broadcastsi128_si256(value)
#define XOR(a, b) _mm256_xor_si256(a, b)
#define ADD(a, b) _mm256_add_epi32(a, b)
#define SUB(a, b) _mm256_sub_epi32(a, b)
#define SHUFFLE(a, order) _mm256_shuffle_epi8(a, order)
#define ROUND(a, key) _mm256_aesenc_epi128(a, key)
#define LAST_ROUND(a, key) _mm256_aesenclast_epi128(a, key)
#include "masks_way.h"

#define WAY _aesni
#define TARGET __attribute__((target("aes,ssse3,sse4.1")))
#define VECTOR __m128i
#define LANES 1
#define BATCH 8
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))
#define STORE(at, value) _mm_storeu_si128((__m128i *)(at), value)
#define BROADCAST(value) (value)
#define XOR(a, b) _mm_xor_si128(a, b)
#define ADD(a, b) _mm_add_epi32(a, b)
#define SUB(a, b) _mm_sub_epi32(a, b)
#define SHUFFLE(a, order) _mm_shuffle_epi8(a, order)
#define ROUND(a, key) _mm_aesenc_si128(a, key)
#define LAST_ROUND(a, key) _mm_aesenclast_si128(a, key)
#include "masks_way.h"

int coterie_has_way(int way) {
    __builtin_cpu_init();
    int aes = __builtin_cpu_supports("aes") && __builtin_cpu_supports("sse4.1");
    int wide = aes && __builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx2");
    switch (way) {
    case WAY_AVX512:
        return wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? 1 : 0;
    case WAY_AVX2:
        return wide ? 1 : 0;
    case WAY_AESNI:
        return aes ? 1 : 0;
    default:
        return 0;
    }
}

#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>

#define TARGET __attribute__((target("+crypto")))
#define EXPANDS TARGET

typedef uint8x16_t round_key;

/* Substitutes the bytes of a word: in a block of four equal columns the shifting of rows changes nothing. */
static inline EXPANDS uint32_t substituted(uint32_t word) {
    return vgetq_lane_u32(vreinterpretq_u32_u8(vaeseq_u8(vreinterpretq_u8_u32(vdupq_n_u32(word)), vdupq_n_u8(0))), 0);
}

static EXPANDS void expand(const uint8_t *key, round_key keys[ROUND_KEYS]) {
    uint32_t words[4 * ROUND_KEYS];
    memcpy(words, key, 32);
    uint32_t constant = 1;
    for (int i = 8; i < 4 * ROUND_KEYS; i++) {
        uint32_t word = words[i - 1];
        if (i % 8 == 0) {
            word = substituted(word >> 8 | word << 24) ^ constant;
            constant <<= 1;
        } else if (i % 8 == 4) {
            word = substituted(word);
        }
        words[i] = words[i - 8] ^ word;
    }
    memcpy(keys, words, sizeof words);
    wipe(words, sizeof words);
}

/* The instruction adds the key first and leaves the columns unmixed. */
static inline TARGET uint8x16_t mixed(uint8x16_t block, uint8x16_t key) { return vaesmcq_u8(vaeseq_u8(block, key)); }

static inline TARGET uint8x16_t reversed(uint8x16_t block) { return vrev32q_u8(block); }

#define WAY _armv8
#define VECTOR uint8x16_t
#define LANES 1
#define BATCH 8
#define LOAD(at) vreinterpretq_u8_u32(vld1q_u32(at))
#define STORE(at, value) vst1q_u32(at, vreinterpretq_u32_u8(value))
#define BROADCAST(value) (value)
#define XOR(a, b) veorq_u8(a, b)
#define ADD(a, b) vreinterpretq_u8_u32(vaddq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)))
#define SUB(a, b) vreinterpretq_u8_u32(vsubq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)))
#define SHUFFLE(a, order) reversed(a)
#define KEY_FIRST
#define ROUND(a, key) mixed(a, key)
#define LAST_ROUND(a, key) vaeseq_u8(a, key)
#include "masks_way.h"

int coterie_has_way(int way) { return way == WAY_ARMV8 && (getauxval(AT_HWCAP) & HWCAP_AES) ? 1 : 0; }

#else

int coterie_has_way(int way) {
    (void)way;
    return 0;
}

#endif

int coterie_add_masks(int way, uint32_t *vector, size_t words, const uint8_t *keys, const uint8_t *minus,
                      uint32_t *const *mirrors, size_t count) {
    if (words >= (size_t)1 << 33 || !coterie_has_way(way))
        return -1;
    switch (way) {
#if defined(__x86_64__)
    case WAY_AVX512:
        add_masks_avx512(vector, words, keys, minus, mirrors, count);
        return 0;
    case WAY_AVX2:
        add_masks_avx2(vector, words, keys, minus, mirrors, count);
        return 0;
    case WAY_AESNI:
        add_masks_aesni(vector, words, keys, minus, mirrors, count);
        return 0;
#elif defined(__aarch64__)
    case WAY_ARMV8:
        add_masks_armv8(vector, words, keys, minus, mirrors, count);
        return 0;
#endif
    default:
        return -1;
    }
}
