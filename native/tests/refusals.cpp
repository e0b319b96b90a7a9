#include "refusals.h"

#include "check.h"

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

void expect(const std::vector<refusal> & refusals) {
    for (const refusal & each : refusals) {
        const host::graph built(host::example_named(each.of), main_memory());
        table t = built.table();
        each.change(t);
        const std::string said = check::thrown([&] { built.decode(t); });
        if (said.find(each.says) == std::string::npos) {
            check::fail(
                __FILE__, __LINE__, std::string(each.of) + ": \"" + said + "\" is not \"" + each.says + "\""
            );
        }
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
