#include "wire/inputs.h"

#include "wire/delta.h"

#include <cstring>
#include <stdexcept>

namespace mesh {

namespace {

using wire::input_form;
using wire::input_head;

constexpr size_t SAMPLE_BYTES = 4096;

// Runs of equal 16-bit words: what masks are made of.
bool encode_runs(const std::vector<uint8_t> & now, size_t limit, std::vector<uint8_t> & out) {
    if (now.size() % 2 != 0) {
        return false;
    }
    size_t i = 0;
    while (i < now.size()) {
        uint16_t word = 0;
        std::memcpy(&word, now.data() + i, sizeof word);
        size_t end = i + 2;
        while (end < now.size() && std::memcmp(now.data() + end, &word, sizeof word) == 0) {
            end += 2;
        }
        const wire::run_of_words run = {static_cast<uint32_t>((end - i) / 2), word, 0};
        if (out.size() + sizeof run >= limit) {
            return false;
        }
        append(out, &run, sizeof run);
        i = end;
    }
    return true;
}

// What remembering an input costs besides its bytes: there may be many small ones.
constexpr uint64_t SHADOW_OVERHEAD = 256;

[[noreturn]] void refuse(const char * what) {
    throw std::invalid_argument(std::string("an input ") + what);
}

void decode_runs(const uint8_t * bytes, size_t size, std::vector<uint8_t> & data) {
    size_t filled = 0;
    for (size_t position = 0; position < size; position += sizeof(wire::run_of_words)) {
        wire::run_of_words run{};
        if (size - position < sizeof run) {
            refuse("ends in the middle of a run");
        }
        std::memcpy(&run, bytes + position, sizeof run);
        if (run.count > (data.size() - filled) / 2) {
            refuse("runs beyond its end");
        }
        for (uint32_t i = 0; i < run.count; ++i, filled += 2) {
            std::memcpy(data.data() + filled, &run.word, sizeof run.word);
        }
    }
    if (filled != data.size()) {
        refuse("is not filled by its runs");
    }
}

}  // namespace

bool shadows::is_better_raw(const std::vector<uint8_t> & data) {
    if (data.size() <= MAX_SHADOWED_BYTES) {
        return false;
    }
    // The beginning tells: masks are of few words, activations of ever new ones.
    const std::vector<uint8_t> beginning(data.begin(), data.begin() + SAMPLE_BYTES);
    std::vector<uint8_t> runs;
    return !encode_runs(beginning, beginning.size() / 2, runs);
}

void shadows::encode(const input & value, std::vector<uint8_t> & out) {
    input_head head{};
    head.buffer_id = value.buffer_id;
    head.offset = value.offset;
    head.size = value.data.size();
    head.form = static_cast<uint32_t>(input_form::raw);

    std::vector<uint8_t> body;
    const auto before = known_.find({value.buffer_id, value.offset, value.data.size()});
    if (before != known_.end() &&
        encode_delta(before->second.data(), value.data.data(), value.data.size(), body)) {
        head.form = static_cast<uint32_t>(input_form::changes);
    } else {
        body.clear();
        if (encode_runs(value.data, value.data.size() / 2, body)) {
            head.form = static_cast<uint32_t>(input_form::runs);
        } else {
            body = value.data;
        }
    }
    head.body = body.size();
    append(out, &head, sizeof head);
    append(out, body.data(), body.size());
    remember(value);
}

input shadows::decode(const std::vector<uint8_t> & in, size_t & position) {
    input_head head{};
    if (in.size() - position < sizeof head) {
        refuse("is cut short");
    }
    std::memcpy(&head, in.data() + position, sizeof head);
    position += sizeof head;
    if (head.body > in.size() - position || head.size > wire::MAX_FRAME_BYTES) {
        refuse("is larger than its frame");
    }
    const uint8_t * body = in.data() + position;
    position += head.body;

    input value;
    value.buffer_id = head.buffer_id;
    value.offset = head.offset;
    switch (static_cast<input_form>(head.form)) {
    case input_form::raw:
        if (head.body != head.size) {
            refuse("has another size than it says");
        }
        value.data.assign(body, body + head.body);
        break;
    case input_form::changes: {
        const auto before = known_.find({head.buffer_id, head.offset, head.size});
        if (before == known_.end()) {
            refuse("changes what was never sent");
        }
        value.data = before->second;
        decode_delta(body, head.body, value.data.data(), value.data.size());
        break;
    }
    case input_form::runs:
        value.data.resize(head.size);
        decode_runs(body, head.body, value.data);
        break;
    default:
        refuse("has an unknown form");
    }
    remember(value);
    return value;
}

void shadows::remember(const input & value) {
    if (value.data.size() > MAX_SHADOWED_BYTES) {
        return;
    }
    const auto [entry, is_new] = known_.try_emplace({value.buffer_id, value.offset, value.data.size()});
    bytes_ += is_new ? value.data.size() + SHADOW_OVERHEAD : 0;
    entry->second = value.data;
    if (bytes_ > wire::MAX_SHADOW_BYTES) {
        clear();
    }
}

void shadows::clear() {
    known_.clear();
    bytes_ = 0;
}

}  // namespace mesh
