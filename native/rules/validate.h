#pragma once

// What a worker demands of a graph before any kernel sees it.
//
// ggml's kernels trust their graph: what they assert ends the process, and what
// they do not assert reads or writes somewhere else. So every tensor, and every
// op with its sources, has to satisfy rules under which the kernels stay inside
// the memory that they were given. What cannot be shown to is refused.
//
// All functions throw std::invalid_argument with a sentence that names the
// tensor by its place in the table, its op, and the rule.

#include "ggml.h"
#include "wire/protocol.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mesh {

// Limits on one graph. Kernels count rows and columns in 32 bits, and add the number of threads before they divide.
constexpr uint64_t MAX_THREADS_ASSUMED = 512;    // as many as ggml starts; scratch grows with threads
constexpr int64_t MAX_LENGTH = INT32_MAX - 512;  // of a dimension, and of all rows together
constexpr int64_t MAX_COMPUTED = MAX_LENGTH;     // elements that one node computes or reads in full
constexpr int64_t MAX_ELEMENTS = 1LL << 40;      // of weights and caches, which are read in parts
constexpr uint64_t MAX_WORK_BYTES = 2ULL << 30;  // the device's scratch memory: a batch of 4,096 rows of 65,536
constexpr uint64_t ROOT_ALIGNMENT = 16;          // of what is not a view: every device aligns to more than that

// Whether workers compute this op at all, whatever their device.
bool op_is_allowed(uint32_t op);

// What these are, in 16 bits, without `lacking`: sides with the same key know the same ops.
uint32_t ops_key(uint32_t lacking = GGML_OP_COUNT);

// Whether an op would pass the rules, wherever its tensors lie. Does not throw: a client asks before it builds.
bool node_is_allowed(const ggml_tensor * node) noexcept;

// Whether it only gives memory another shape.
bool op_only_renames(ggml_op op);

// Bytes from a tensor's first element to its last. Only after `check_entry`.
uint64_t extent(const wire::tensor & entry);

// The numbers of one tensor by themselves, and against those before it in the table.
void check_entry(const std::vector<wire::tensor> & table, size_t index);

// A node with its sources, all of them placed: the rules of its op.
void check_node(size_t index, const ggml_tensor * node);

[[noreturn]] void refuse(size_t index, uint32_t op, const std::string & rule);

}  // namespace mesh
