#pragma once

// What a worker says to the host, checked before it is used: a worker may be anybody's.
//
// ggml ends the process over numbers that make no sense, and its kernels read
// where row numbers point to. What is wrong here ends the link instead.

#include "wire/link.h"

#include "ggml.h"

#include <chrono>
#include <string>

namespace mesh {

// What a worker sent ends the link: it was an error, or broke the protocol. What follows it means nothing.
struct bad_answer : link_error {
    using link_error::link_error;
};

// How long the host waits for a worker. Tests wait less.
struct patience {
    // For HELLO, which costs a worker no more than to open its device.
    std::chrono::milliseconds greeting = std::chrono::minutes(1);
    // For any sign of life while a command is carried out, or for room to send the next one. Slow machines take
    // minutes for a part of a prompt; clients of the gateway wait for no answer longer than this.
    std::chrono::milliseconds answer = std::chrono::minutes(10);
    // For the rest of a frame that has begun.
    std::chrono::milliseconds rest = std::chrono::minutes(1);
};

patience & host_patience();

// One line of printable ASCII, and not much of it: it goes to logs and terminals.
std::string printable(const char * text, size_t size);

constexpr size_t MAX_ERROR_BYTES = 400;  // the longest sentences of workers have some 200

// These throw bad_answer.
void check_facts(wire::hello_answer & facts);  // its texts are made printable
void check_cost(const wire::telemetry & cost);
void check_size(uint64_t said, uint64_t needed, const wire::hello_answer & facts);

// Bytes at `offset` of a graph's result. Integers among them are row numbers for the kernels of this machine.
void check_result(const ggml_tensor & tensor, size_t offset, const void * data, size_t size);

// What does no harm in place of a result that could not be read: zeros, or numbers that are all different in a row.
void fill_harmless(const ggml_tensor & tensor, size_t offset, void * data, size_t size);

}  // namespace mesh
