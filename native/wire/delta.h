#pragma once

// What differs between two blocks of the same size: how inputs and graphs travel
// when the other side has nearly the same already.

#include "wire/protocol.h"

#include <cstdint>
#include <vector>

namespace mesh {

void append(std::vector<uint8_t> & out, const void * data, size_t size);

// Appends (offset, size, bytes) for each difference of `size` bytes. False as soon as that is no shorter than `now`.
bool encode_delta(const uint8_t * before, const uint8_t * now, size_t size, std::vector<uint8_t> & out);

// Applies them to `data`. Throws std::invalid_argument where they do not fit it.
void decode_delta(const uint8_t * changes, size_t changes_size, uint8_t * data, size_t size);

}  // namespace mesh
