#include "tests/frames.h"

#include <algorithm>

namespace session_bytes {

using mesh::wire::tensor;

namespace {

constexpr size_t HEAD_BYTES = sizeof(mesh::wire::graph_head);

// Numbers around which things go wrong.
uint64_t odd_number(uint64_t before, dice & random) {
    constexpr uint64_t edges[] = {0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 255, 256, 1024, 4096, 65536};
    switch (random.below(10)) {
    case 0:
        return before + 1;
    case 1:
        return before - 1;
    case 2:
        return before * 2;
    case 3:
        return before / 2;
    case 4:
        return 1ULL << random.below(64);
    case 5:
        return ~0ULL << random.below(64);
    case 6:
        return before + random.below(64);
    case 7:
        return before - random.below(64);
    case 8:
        return random.next();
    default:
        return edges[random.below(std::size(edges))];
    }
}

template <typename Field> void change(Field & field, dice & random) {
    field = static_cast<Field>(odd_number(static_cast<uint64_t>(field), random));
}

}  // namespace

std::vector<frame> parse(const uint8_t * bytes, size_t size) {
    std::vector<frame> frames;
    size_t position = 0;
    while (size - position >= sizeof(mesh::wire::header)) {
        frame next;
        std::memcpy(&next.head, bytes + position, sizeof next.head);
        position += sizeof next.head;
        const size_t count = std::min<uint64_t>(next.head.size, size - position);
        next.payload.assign(bytes + position, bytes + position + count);
        next.head.size = count;
        position += count;
        frames.push_back(std::move(next));
    }
    return frames;
}

std::vector<uint8_t> join(const std::vector<frame> & frames) {
    std::vector<uint8_t> bytes;
    for (frame each : frames) {
        each.head.size = each.payload.size();
        const auto * head = reinterpret_cast<const uint8_t *>(&each.head);
        bytes.insert(bytes.end(), head, head + sizeof each.head);
        bytes.insert(bytes.end(), each.payload.begin(), each.payload.end());
    }
    return bytes;
}

size_t tensor_count(const frame & graph) {
    return graph.payload.size() < HEAD_BYTES ? 0 : (graph.payload.size() - HEAD_BYTES) / sizeof(tensor);
}

tensor get_tensor(const frame & graph, size_t index) {
    tensor value{};
    std::memcpy(&value, graph.payload.data() + HEAD_BYTES + index * sizeof value, sizeof value);
    return value;
}

void set_tensor(frame & graph, size_t index, const tensor & value) {
    std::memcpy(graph.payload.data() + HEAD_BYTES + index * sizeof value, &value, sizeof value);
}

std::string change_field(tensor & t, const std::vector<tensor> & others, dice & random) {
    const size_t i = random.below(4);
    const tensor other = others[random.below(others.size())];
    switch (random.below(16)) {
    case 0:
        t.type = static_cast<uint32_t>(random.below(45));
        return "type";
    case 1:
        t.op = static_cast<uint32_t>(random.below(110));
        return "op";
    case 2:
        change(t.flags, random);
        return "flags";
    case 3:
        change(t.use_count, random);
        return "use_count";
    case 4:
    case 5:
        change(t.ne[i], random);
        return "ne";
    case 6:
    case 7:
        change(t.nb[i], random);
        return "nb";
    case 8:
        change(t.op_params[random.below(std::size(t.op_params))], random);
        return "op_params";
    case 9:
        change(t.sources[random.below(std::size(t.sources))], random);
        return "sources";
    case 10:
        t.sources[i] = static_cast<uint32_t>(random.below(others.size() + 1));
        return "sources";
    case 11:
        change(t.view_of, random);
        return "view_of";
    case 12:
        change(t.view_offset, random);
        return "view_offset";
    case 13:
        change(t.offset, random);
        return "offset";
    case 14:
        t.buffer_id = other.buffer_id;
        t.offset = other.offset;
        return "place";
    default:
        std::copy(std::begin(other.ne), std::end(other.ne), std::begin(t.ne));
        std::copy(std::begin(other.nb), std::end(other.nb), std::begin(t.nb));
        return "shape";
    }
}

}  // namespace session_bytes
