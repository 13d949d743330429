/* seal.c: whether weights belong to this library, and whether they are whole. The last 64 bytes of weights are their
 * seal: 16 bytes of text, 16 bytes of a digest of all bytes before the seal, and zeros (polydyn/runtime/seal.py). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define PART (INT64_C(1) << 22) /* bytes that are hashed at a time */
#define SHA 32

/* The seal of the program's weights. It is written into the built library, so the compiler must not assume its value.
 * Libraries of several parts leave the digest zero: they read the whole program from its weights. */
static const volatile unsigned char own_seal[32] = "polydyn weights";

static const unsigned char *seal_of(const pd_program *p, int64_t bytes) {
    return (const unsigned char *)p->weights + bytes - PD_SEAL;
}

int32_t pd_check_seal(const pd_program *p, const char *path, int64_t bytes) {
    const unsigned char *seal = seal_of(p, bytes);
    int foreign = 0, other = 0, any = 0;
    for (int k = 0; k < 16; k++) {
        foreign |= seal[k] ^ own_seal[k];
        other |= seal[16 + k] ^ own_seal[16 + k];
        any |= own_seal[16 + k];
    }
    if (!foreign && (!any || !other)) return PD_OK;
    return pd_fail(PD_WEIGHTS, "%s %s; use the library and the artifact of one `polydyn extract`", path ? path : "the memory",
                   foreign ? "does not contain the weights of this library, or is damaged"
                           : "contains the weights of another program than this library");
}

/* ---- SHA-256 (FIPS 180-4) ---- */

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#define TURNED(x, by) ((x) >> (by) | (x) << (32 - (by)))
/* One round; the next one has the variables in turned order, so that nothing moves. */
#define ROUND(a, b, c, d, e, f, g, h, k)                                                                                \
    h += (TURNED(e, 6) ^ TURNED(e, 11) ^ TURNED(e, 25)) + (g ^ (e & (f ^ g))) + K[k] + w[k], d += h,                    \
        h += (TURNED(a, 2) ^ TURNED(a, 13) ^ TURNED(a, 22)) + ((a & b) | (c & (a | b)))

static void hash_block(uint32_t state[8], const unsigned char *data) {
    uint32_t w[64];
    for (int k = 0; k < 16; k++) {
        uint32_t word;
        memcpy(&word, data + 4 * k, 4); /* all processors here are little-endian */
        w[k] = __builtin_bswap32(word);
    }
    for (int k = 16; k < 64; k++) {
        const uint32_t a = w[k - 15], b = w[k - 2];
        w[k] = w[k - 16] + w[k - 7] + (TURNED(a, 7) ^ TURNED(a, 18) ^ a >> 3) + (TURNED(b, 17) ^ TURNED(b, 19) ^ b >> 10);
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
    for (int k = 0; k < 64; k += 8) {
        ROUND(a, b, c, d, e, f, g, h, k);
        ROUND(h, a, b, c, d, e, f, g, k + 1);
        ROUND(g, h, a, b, c, d, e, f, k + 2);
        ROUND(f, g, h, a, b, c, d, e, k + 3);
        ROUND(e, f, g, h, a, b, c, d, k + 4);
        ROUND(d, e, f, g, h, a, b, c, k + 5);
        ROUND(c, d, e, f, g, h, a, b, k + 6);
        ROUND(b, c, d, e, f, g, h, a, k + 7);
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

static void sha256(const unsigned char *data, int64_t bytes, unsigned char out[SHA]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char tail[128] = {0};
    const int64_t rest = bytes % 64, end = rest < 56 ? 64 : 128;
    for (int64_t k = 0; k + 64 <= bytes; k += 64) hash_block(state, data + k);
    memcpy(tail, data + bytes - rest, (size_t)rest);
    tail[rest] = 0x80;
    for (int k = 0; k < 8; k++) tail[end - 1 - k] = (unsigned char)((uint64_t)bytes * 8 >> 8 * k);
    for (int64_t k = 0; k < end; k += 64) hash_block(state, tail + k);
    for (int k = 0; k < SHA; k++) out[k] = (unsigned char)(state[k / 4] >> (24 - k % 4 * 8));
}

PD_EXPORT int32_t pd_verify_weights(const pd_program *p) {
    const int64_t bytes = pd_weight_bytes(p), hashed = bytes - PD_SEAL;
    unsigned char *parts = malloc((size_t)((hashed + PART - 1) / PART * SHA) + 1), digest[SHA];
    if (!parts) return pd_fail(PD_MEMORY, "out of memory");
    int64_t count = 0;
    for (int64_t k = 0; k < hashed; k += PART, count++)
        sha256((const unsigned char *)p->weights + k, hashed - k < PART ? hashed - k : PART, parts + count * SHA);
    sha256(parts, count * SHA, digest);
    free(parts);
    if (!memcmp(digest, seal_of(p, bytes) + 16, 16)) return PD_OK;
    return pd_fail(PD_WEIGHTS, "the weights are damaged: they do not match their digest; copy the artifact again");
}
