#pragma once

// A record of every frame that is sent or received, for people who want to see what the links do.

#include <cstdint>
#include <string>

namespace mesh {

// Lines are appended to `fd`, which stays open, from now on.
void start_trace(int fd);

// One line of JSON; nothing, at the cost of a load, where no trace was started.
void trace_frame(const std::string & link, bool sent, uint8_t kind, uint32_t ticket, uint64_t size) noexcept;

}  // namespace mesh
