/* message.c: protobuf messages that refer to large data instead of copying them, and their hash. */
#include "message.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VARINT = 0, LENGTH = 2, FIXED32 = 5 }; /* wire types */

void free_owned(void *pointer) { free(*(void **)pointer); }

void message_free(message *m) {
    free(m->bytes);
    free(m->references);
    *m = (message){0};
}

static bool grow(void **data, size_t *room, size_t count, size_t item) {
    if (count <= *room) return true;
    size_t more = *room ? *room : 64;
    while (more < count) more *= 2;
    void *larger = realloc(*data, more * item);
    if (!larger) return false;
    *data = larger;
    *room = more;
    return true;
}

static void put(message *m, const void *data, size_t size) {
    if (m->failed || !size) return;
    if (!grow((void **)&m->bytes, &m->room, m->size + size, 1)) {
        m->failed = true;
        return;
    }
    memcpy(m->bytes + m->size, data, size);
    m->size += size;
}

static void add_reference(message *m, reference s) {
    if (m->failed) return;
    if (!grow((void **)&m->references, &m->reference_room, m->reference_count + 1, sizeof s)) {
        m->failed = true;
        return;
    }
    m->references[m->reference_count++] = s;
    m->referenced += s.size;
}

static void put_varint(message *m, uint64_t value) {
    uint8_t text[10];
    size_t n = 0;
    for (; value > 127; value >>= 7) text[n++] = (uint8_t)(value | 128);
    text[n++] = (uint8_t)value;
    put(m, text, n);
}

static void put_tag(message *m, int field, int type) { put_varint(m, (uint64_t)field << 3 | (uint64_t)type); }

void put_number(message *m, int field, int64_t value) {
    put_tag(m, field, VARINT);
    put_varint(m, (uint64_t)value);
}

void put_float(message *m, int field, float value) {
    put_tag(m, field, FIXED32);
    put(m, &value, sizeof value);
}

void put_bytes(message *m, int field, const void *data, size_t size) {
    put_tag(m, field, LENGTH);
    put_varint(m, size);
    put(m, data, size);
}

void put_text(message *m, int field, const char *text) { put_bytes(m, field, text, strlen(text)); }

void put_reference(message *m, int field, const void *data, size_t size) {
    put_tag(m, field, LENGTH);
    put_varint(m, size);
    add_reference(m, (reference){m->size, size, data});
}

void put_message(message *m, int field, message *inner) {
    put_tag(m, field, LENGTH);
    put_varint(m, message_bytes(inner));
    for (size_t k = 0; k < inner->reference_count; k++) {
        reference s = inner->references[k];
        s.offset += m->size;
        add_reference(m, s);
    }
    put(m, inner->bytes, inner->size);
    m->failed |= inner->failed;
    message_free(inner);
}

size_t message_bytes(const message *m) { return m->size + m->referenced; }

static int write_all(int file, const void *data, size_t size) {
    const uint8_t *at = data;
    while (size) {
        ssize_t n = write(file, at, size < (1u << 30) ? size : (1u << 30));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        at += n;
        size -= (size_t)n;
    }
    return 0;
}

int message_write(const message *m, int file) {
    size_t at = 0;
    int problem = 0;
    for (size_t k = 0; k < m->reference_count && !problem; k++) {
        const reference *s = &m->references[k];
        problem = write_all(file, m->bytes + at, s->offset - at);
        if (!problem) problem = write_all(file, s->data, s->size);
        at = s->offset;
    }
    return problem ? problem : write_all(file, m->bytes + at, m->size - at);
}

/* ---- the hash: four lanes of 64 bits, each multiplied to 128 bits and folded per word ---- */

static const uint64_t KEYS[8] = {0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu, 0xd6e8feb86659fd93u,
                                 0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u, 0x589965cc75374cc3u};

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static void hash_block(hasher *h, const uint8_t *block) {
    for (int k = 0; k < 4; k++) {
        uint64_t word;
        memcpy(&word, block + 8 * k, 8);
        h->lanes[k] = fold(h->lanes[k] ^ word, KEYS[k]) + word;
    }
}

void hash_begin(hasher *h) {
    *h = (hasher){0};
    memcpy(h->lanes, KEYS + 4, sizeof h->lanes);
}

void hash_add(hasher *h, const void *data, size_t size) {
    const uint8_t *at = data;
    h->length += size;
    if (h->rest_size) {
        size_t n = sizeof h->rest - h->rest_size < size ? sizeof h->rest - h->rest_size : size;
        memcpy(h->rest + h->rest_size, at, n);
        h->rest_size += n;
        at += n;
        size -= n;
        if (h->rest_size < sizeof h->rest) return;
        hash_block(h, h->rest);
        h->rest_size = 0;
    }
    for (; size >= sizeof h->rest; at += sizeof h->rest, size -= sizeof h->rest) hash_block(h, at);
    if (size) memcpy(h->rest, at, size);
    h->rest_size = size;
}

void hash_text(hasher *h, const char *text) { hash_add(h, text, strlen(text) + 1); }

void hash_message(hasher *h, const message *m) {
    size_t at = 0;
    for (size_t k = 0; k < m->reference_count; k++) {
        const reference *s = &m->references[k];
        hash_add(h, m->bytes + at, s->offset - at);
        hash_add(h, s->data, s->size);
        at = s->offset;
    }
    hash_add(h, m->bytes + at, m->size - at);
}

void hash_end(hasher *h, char hex[65]) {
    uint8_t end[32] = {0};
    uint64_t length = h->length;
    memcpy(end, h->rest, h->rest_size);
    hash_block(h, end);
    memset(end, 0, sizeof end);
    memcpy(end, &length, sizeof length);
    for (int round = 0; round < 4; round++) { /* every lane enters every result */
        hash_block(h, end);
        for (int k = 0; k < 4; k++) h->lanes[k] += fold(h->lanes[(k + 1) % 4] ^ KEYS[k], KEYS[k + 4] | 1);
    }
    static const char digits[] = "0123456789abcdef";
    for (int k = 0; k < 64; k++) hex[k] = digits[h->lanes[k / 16] >> (60 - 4 * (k % 16)) & 15];
    hex[64] = 0;
}
