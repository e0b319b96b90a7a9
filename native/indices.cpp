#include "indices.h"

#include "validate.h"

#include "ggml-backend.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

namespace mesh {

namespace {

// Nodes that take row numbers, per graph: each is compared with all nodes before it. Known graphs have hundreds.
constexpr size_t MAX_INDEX_USERS = 8192;

struct index_use {
    size_t source;
    int64_t bound;
    bool distinct;
};

// Which source of an op holds row numbers, if one does.
bool find_use(const ggml_tensor & node, index_use & use) {
    switch (node.op) {
    case GGML_OP_GET_ROWS:
        use = {1, node.src[0]->ne[1], false};
        return true;
    case GGML_OP_SET_ROWS:
        use = {1, node.ne[1], false};
        return true;
    case GGML_OP_ADD_ID:
        use = {2, node.src[1]->ne[1], false};
        return true;
    case GGML_OP_MUL_MAT_ID:
        // The repacking kernel has room for one row per token and expert.
        use = {2, node.src[0]->ne[2], true};
        return true;
    case GGML_OP_SSM_SCAN:
        use = {6, node.src[0]->ne[3], false};
        return true;
    default:
        return false;
    }
}

const uint8_t * begin_of(const ggml_tensor & t) {
    return static_cast<const uint8_t *>(t.data);
}

bool overlap(const ggml_tensor & a, const ggml_tensor & b) {
    return begin_of(a) < begin_of(b) + ggml_nbytes(&b) && begin_of(b) < begin_of(a) + ggml_nbytes(&a);
}

// Whether each row of `ids` lies within one row of `sorted`, side by side, so that no number comes twice.
bool is_part_of_rows(const ggml_tensor & ids, const ggml_tensor & sorted) {
    const auto offset = static_cast<size_t>(begin_of(ids) - begin_of(sorted));
    const size_t row = sorted.nb[1];
    if (ids.nb[0] != sizeof(int32_t) || row == 0 || (ids.ne[1] > 1 && ids.nb[1] % row != 0)) {
        return false;
    }
    return offset % row + static_cast<size_t>(ids.ne[0]) * sizeof(int32_t) <=
           static_cast<size_t>(sorted.ne[0]) * sizeof(int32_t);
}

bool is_bounded_by(const ggml_tensor & ids, const ggml_tensor & writer, const index_use & use) {
    const bool sorts = writer.op == GGML_OP_ARGSORT || writer.op == GGML_OP_TOP_K;
    const bool computed = (writer.flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
    if (!sorts || !computed || ids.type != GGML_TYPE_I32 || writer.src[0]->ne[0] > use.bound) {
        return false;
    }
    // Rows with gaps between them would leave old numbers in the gaps.
    const bool inside = begin_of(ids) >= begin_of(writer) &&
                        begin_of(ids) + ggml_nbytes(&ids) <= begin_of(writer) + ggml_nbytes(&writer) &&
                        ggml_is_contiguous(&writer);
    return inside && (!use.distinct || is_part_of_rows(ids, writer));
}

bool same_numbers(const ggml_tensor & a, const ggml_tensor & b) {
    return a.data == b.data && a.type == b.type && std::equal(a.ne, a.ne + GGML_MAX_DIMS, b.ne) &&
           std::equal(a.nb, a.nb + GGML_MAX_DIMS, b.nb);
}

// Layers share their row numbers: one look is enough.
void add_check(std::vector<index_check> & checks, const ggml_tensor * ids, const index_use & use) {
    for (index_check & known : checks) {
        if (same_numbers(*known.tensor, *ids)) {
            known.bound = std::min(known.bound, use.bound);
            known.distinct = known.distinct || use.distinct;
            return;
        }
    }
    checks.push_back({ids, use.bound, use.distinct});
}

// --- before a run ---

// The bytes of a tensor, copied where they are not in main memory.
class bytes_of {
  public:
    explicit bytes_of(const ggml_tensor * tensor) : data_(begin_of(*tensor)) {
        if (!ggml_backend_buffer_is_host(tensor->buffer)) {
            copy_.resize(ggml_nbytes(tensor));
            ggml_backend_tensor_get(tensor, copy_.data(), 0, copy_.size());
            data_ = copy_.data();
        }
    }

    const uint8_t * data() const {
        return data_;
    }

  private:
    std::vector<uint8_t> copy_;
    const uint8_t * data_;
};

[[noreturn]] void out_of_bounds(int64_t number, int64_t bound) {
    throw std::invalid_argument(
        "row " + std::to_string(number) + " is asked for where there are " + std::to_string(bound)
    );
}

template <typename Number>
void check_row(const uint8_t * row, const index_check & check, std::vector<Number> & seen) {
    const ggml_tensor & t = *check.tensor;
    seen.clear();
    for (int64_t i = 0; i < t.ne[0]; ++i) {
        Number number = 0;
        std::memcpy(&number, row + static_cast<size_t>(i) * t.nb[0], sizeof number);
        if (number < 0 || number >= check.bound) {
            out_of_bounds(number, check.bound);
        }
        if (check.distinct) {
            seen.push_back(number);
        }
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) {
        throw std::invalid_argument("one expert is asked for twice by one token");
    }
}

template <typename Number> void check_numbers(const index_check & check) {
    const ggml_tensor & t = *check.tensor;
    const bytes_of bytes(&t);
    std::vector<Number> seen;
    for (int64_t i3 = 0; i3 < t.ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < t.ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < t.ne[1]; ++i1) {
                const size_t offset = static_cast<size_t>(i1) * t.nb[1] + static_cast<size_t>(i2) * t.nb[2] +
                                      static_cast<size_t>(i3) * t.nb[3];
                check_row<Number>(bytes.data() + offset, check, seen);
            }
        }
    }
}

}  // namespace

std::vector<index_check> index_checks(const std::vector<placed_node> & nodes) {
    std::vector<index_check> checks;
    std::vector<const ggml_tensor *> writers;
    size_t users = 0;
    for (const auto & [index, node] : nodes) {
        index_use use{};
        if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 && !ggml_is_empty(node) && find_use(*node, use)) {
            const ggml_tensor * ids = node->src[use.source];
            const auto last = std::find_if(writers.rbegin(), writers.rend(), [&](const ggml_tensor * writer) {
                return overlap(*writer, *ids);
            });
            if (++users > MAX_INDEX_USERS) {
                refuse(index, node->op, "too many nodes take row numbers");
            }
            if (last == writers.rend()) {
                add_check(checks, ids, use);
            } else if (!is_bounded_by(*ids, **last, use)) {
                refuse(index, node->op, "its row numbers are computed, and may be out of bounds");
            }
        }
        if (!op_only_renames(node->op)) {
            writers.push_back(node);
        }
    }
    return checks;
}

void run_checks(const std::vector<index_check> & checks) {
    for (const index_check & check : checks) {
        if (check.tensor->type == GGML_TYPE_I64) {
            check_numbers<int64_t>(check);
        } else {
            check_numbers<int32_t>(check);
        }
    }
}

}  // namespace mesh
