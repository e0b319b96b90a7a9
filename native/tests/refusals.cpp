#include "tests/refusals.h"

#include "tests/check.h"

#include <algorithm>

namespace refusals {

ggml_backend_buffer_type_t main_memory() {
    return ggml_backend_get_default_buffer_type(host::cpu());
}

tensor & node_of(table & t, ggml_op op) {
    const auto found = std::find_if(t.rbegin(), t.rend(), [&](const tensor & each) {
        return each.is_node != 0 && each.op == static_cast<uint32_t>(op);
    });
    CHECK(found != t.rend());
    return *found;
}

tensor & source(table & t, ggml_op op, size_t i) {
    return t[node_of(t, op).sources[i] - 1];
}

namespace {

void expect_said(const refusal & what, const std::string & said) {
    if (said.find(what.says) == std::string::npos) {
        check::fail(__FILE__, __LINE__, std::string(what.of) + ": \"" + said + "\" is not \"" + what.says + "\"");
    }
}

}  // namespace

void expect(const std::vector<refusal> & refusals) {
    for (const refusal & each : refusals) {
        const host::graph built(host::example_named(each.of), main_memory());
        table t = built.table();
        each.change(t);
        expect_said(each, check::thrown([&] { built.decode(t); }));
    }
}

void expect_anywhere(const std::vector<refusal> & refusals) {
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_buffer(host::cpu(), 16));
    for (const refusal & each : refusals) {
        table t = host::graph(host::example_named(each.of), main_memory()).table();
        each.change(t);
        for (size_t i = 0; i < t.size(); ++i) {
            t[i].buffer_id = 1 + (t[i].view_of != 0 ? t[i].view_of - 1 : static_cast<uint32_t>(i));
            t[i].offset = t[i].view_offset;
        }
        // Only compared, never read: a graph that is refused is not computed.
        const auto address = [&](uint32_t id, uint64_t offset, uint64_t) {
            const uintptr_t place = (static_cast<uintptr_t>(id) << 40) + offset;
            return mesh::location{buffer.get(), reinterpret_cast<uint8_t *>(place), nullptr, false};
        };
        expect_said(each, check::thrown([&] { mesh::decode(t, address); }));
    }
}

refusal set_param(const char * of, const char * says, ggml_op op, size_t i, int32_t value) {
    return {of, says, [=](table & t) { node_of(t, op).op_params[i] = value; }};
}

refusal set_type(const char * of, const char * says, ggml_op op, size_t i, ggml_type type) {
    return {of, says, [=](table & t) { source(t, op, i).type = type; }};
}

refusal shorten(const char * of, const char * says, ggml_op op, size_t i, size_t dimension) {
    return {of, says, [=](table & t) { source(t, op, i).ne[dimension] /= 2; }};
}

refusal spread(const char * of, const char * says, ggml_op op, size_t i) {
    return {of, says, [=](table & t) {
                tensor & s = source(t, op, i);
                s.ne[0] = std::max<int64_t>(s.ne[0] / 2, 1);
                s.nb[0] *= 2;
            }};
}

}  // namespace refusals
