/* message.h: protobuf messages that refer to large data instead of copying them, and their hash. */
#ifndef POLYDYN_ORT_MESSAGE_H
#define POLYDYN_ORT_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Data that belong before byte `offset` of a message. They are not copied. */
typedef struct {
    size_t offset, size;
    const void *data;
} reference;

typedef struct {
    uint8_t *bytes;
    size_t size, room;
    reference *references;
    size_t reference_count, reference_room, referenced;
    bool failed; /* out of memory */
} message;

#define MESSAGE __attribute__((cleanup(message_free))) message
#define OWNED __attribute__((cleanup(free_owned)))

void message_free(message *m);
void free_owned(void *pointer);

void put_number(message *m, int field, int64_t value);
void put_float(message *m, int field, float value);
void put_bytes(message *m, int field, const void *data, size_t size);
void put_text(message *m, int field, const char *text);
/* `data` must outlive the message. */
void put_reference(message *m, int field, const void *data, size_t size);
/* Appends and empties a message. */
void put_message(message *m, int field, message *inner);

size_t message_bytes(const message *m); /* with the referenced data */
/* Writes the message, the referenced data included. Returns 0, or errno. */
int message_write(const message *m, int file);

/* A hash of 256 bits, not cryptographic: names of files in the user's own cache. */
typedef struct {
    uint64_t lanes[4], length;
    uint8_t rest[32];
    size_t rest_size;
} hasher;

void hash_begin(hasher *h);
void hash_add(hasher *h, const void *data, size_t size);
void hash_text(hasher *h, const char *text); /* with its end, so that two texts differ from their concatenation */
void hash_message(hasher *h, const message *m);
void hash_end(hasher *h, char hex[65]);

#endif
