/* One way of computing masks; included by masks.c once for each width of vectors, with the operations as macros. */

/* Adds a keystream to words of a vector, or subtracts it, from its block `block` on; a mirror gets the opposite. */
static TARGET void NAMED(add_one, WAY)(const round_key *narrow, uint32_t block, uint32_t *vector, uint32_t *mirror,
                                       size_t words, int minus) {
    enum { STEP = BATCH * LANES * BLOCK_WORDS };
    VECTOR keys[ROUND_KEYS];
    for (int i = 0; i < ROUND_KEYS; i++)
        keys[i] = BROADCAST(narrow[i]);

    uint32_t first[LANES * BLOCK_WORDS], ahead[LANES * BLOCK_WORDS];
    memset(first, 0, sizeof first);
    memset(ahead, 0, sizeof ahead);
    for (int lane = 0; lane < LANES; lane++) {
        first[lane * BLOCK_WORDS + 3] = block + (uint32_t)lane;
        ahead[lane * BLOCK_WORDS + 3] = LANES;
    }
    VECTOR counter = LOAD(first);
    const VECTOR next = LOAD(ahead);
#ifndef KEY_FIRST
    uint8_t turned[LANES * BLOCK_WORDS * 4];
    for (int i = 0; i < (int)sizeof turned; i++)
        turned[i] = (uint8_t)((i & 15) ^ 3);
    uint32_t turned_words[LANES * BLOCK_WORDS];
    memcpy(turned_words, turned, sizeof turned);
    const VECTOR order = LOAD(turned_words);
#endif

    for (size_t at = 0; at < words; at += STEP) {
        VECTOR stream[BATCH];
        for (int j = 0; j < BATCH; j++) {
            stream[j] = SHUFFLE(counter, order);
            counter = ADD(counter, next);
        }
#ifdef KEY_FIRST
        for (int i = 0; i < ROUND_KEYS - 2; i++)
            for (int j = 0; j < BATCH; j++)
                stream[j] = ROUND(stream[j], keys[i]);
        for (int j = 0; j < BATCH; j++)
            stream[j] = XOR(LAST_ROUND(stream[j], keys[ROUND_KEYS - 2]), keys[ROUND_KEYS - 1]);
#else
        for (int j = 0; j < BATCH; j++)
            stream[j] = XOR(stream[j], keys[0]);
        for (int i = 1; i < ROUND_KEYS - 1; i++)
            for (int j = 0; j < BATCH; j++)
                stream[j] = ROUND(stream[j], keys[i]);
        for (int j = 0; j < BATCH; j++)
            stream[j] = LAST_ROUND(stream[j], keys[ROUND_KEYS - 1]);
#endif
        if (words - at >= STEP) {
            for (int j = 0; j < BATCH; j++) {
                uint32_t *place = vector + at + (size_t)j * LANES * BLOCK_WORDS;
                STORE(place, minus ? SUB(LOAD(place), stream[j]) : ADD(LOAD(place), stream[j]));
            }
            if (mirror != NULL)
                for (int j = 0; j < BATCH; j++) {
                    uint32_t *place = mirror + at + (size_t)j * LANES * BLOCK_WORDS;
                    STORE(place, minus ? ADD(LOAD(place), stream[j]) : SUB(LOAD(place), stream[j]));
                }
        } else {
            uint32_t left[STEP];
            for (int j = 0; j < BATCH; j++)
                STORE(left + j * LANES * BLOCK_WORDS, stream[j]);
            for (size_t k = 0; k < words - at; k++) {
                vector[at + k] += minus ? 0u - left[k] : left[k];
                if (mirror != NULL)
                    mirror[at + k] += minus ? left[k] : 0u - left[k];
            }
            wipe(left, sizeof left);
        }
    }
    wipe(keys, sizeof keys);
}

static TARGET void NAMED(add_masks, WAY)(uint32_t *vector, size_t words, const uint8_t *keys, const uint8_t *minus,
                                         uint32_t *const *mirrors, size_t count) {
    round_key expanded[KEYS_AT_ONCE][ROUND_KEYS];
    for (size_t group = 0; group < count; group += KEYS_AT_ONCE) {
        const size_t size = count - group < KEYS_AT_ONCE ? count - group : KEYS_AT_ONCE;
        for (size_t k = 0; k < size; k++)
            expand(keys + 32 * (group + k), expanded[k]);
        for (size_t start = 0; start < words; start += CHUNK_WORDS) {
            const size_t length = words - start < CHUNK_WORDS ? words - start : CHUNK_WORDS;
            const uint32_t block = FIRST_BLOCK + (uint32_t)(start / BLOCK_WORDS);
            for (size_t k = 0; k < size; k++) {
                uint32_t *mirror = mirrors[group + k];
                NAMED(add_one, WAY)(expanded[k], block, vector + start, mirror == NULL ? NULL : mirror + start,
                                    length, minus[group + k]);
            }
        }
    }
    wipe(expanded, sizeof expanded);
}

#undef WAY
#ifndef KEY_FIRST
#undef TARGET
#endif
#undef VECTOR
#undef LANES
#undef BATCH
#undef LOAD
#undef STORE
#undef BROADCAST
#undef XOR
#undef ADD
#undef SUB
#undef SHUFFLE
#undef ROUND
#undef LAST_ROUND
