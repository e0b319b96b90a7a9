#include "hooks/ngram_index.h"

namespace mesh {

namespace {

constexpr int32_t NOWHERE = -1;

// Equal keys of unequal tokens do no harm: places are compared token by token.
uint64_t key(const int32_t * three) {
    uint64_t mixed = 0;
    for (size_t i = 0; i < ngram_index::SHORTEST; ++i) {
        mixed = (mixed ^ static_cast<uint32_t>(three[i])) * 0x9E3779B97F4A7C15U;
        mixed ^= mixed >> 29;
    }
    return mixed;
}

}  // namespace

void ngram_index::follow(const std::vector<int32_t> & tokens, int32_t last) {
    if (!begins(tokens, last)) {
        text.clear();
        earlier.clear();
        newest.clear();
    }
    for (size_t i = text.size(); i < tokens.size(); ++i) {
        append(tokens[i]);
    }
    if (text.size() == tokens.size()) {
        append(last);
    }
}

// Its end stands for the whole: within a request texts only grow, and another one's agrees by chance alone.
bool ngram_index::begins(const std::vector<int32_t> & tokens, int32_t last) const {
    if (text.size() > tokens.size() + 1) {
        return false;
    }
    for (size_t i = text.size(); i > 0 && text.size() - i < LONGEST; --i) {
        const int32_t there = i - 1 < tokens.size() ? tokens[i - 1] : last;
        if (text[i - 1] != there) {
            return false;
        }
    }
    return true;
}

void ngram_index::append(int32_t token) {
    text.push_back(token);
    int32_t before = NOWHERE;
    if (text.size() >= SHORTEST) {
        const int32_t place = static_cast<int32_t>(text.size() - 1);
        const auto [entry, is_new] = newest.try_emplace(key(&text[text.size() - SHORTEST]), place);
        if (!is_new) {
            before = entry->second;
            entry->second = place;
        }
    }
    earlier.push_back(before);
}

ngram_index::match ngram_index::longest() const {
    match best;
    if (text.size() <= SHORTEST) {
        return best;
    }
    const size_t end = text.size() - 1;
    int32_t place = earlier[end];
    for (size_t looked = 0; place != NOWHERE && looked < LOOKED_AT; ++looked) {
        const size_t length = agreement(static_cast<size_t>(place), end);
        if (length >= SHORTEST && length > best.length) {
            best = {static_cast<size_t>(place) + 1, length};
        }
        place = earlier[static_cast<size_t>(place)];
    }
    return best;
}

size_t ngram_index::agreement(size_t one, size_t other) const {
    size_t length = 0;
    while (length <= one && length < LONGEST && text[one - length] == text[other - length]) {
        ++length;
    }
    return length;
}

void ngram_index::continuation(const match & from, size_t count, std::vector<int32_t> & into) const {
    into.clear();
    for (size_t i = 0; i < count; ++i) {
        const size_t at = from.next + i;
        into.push_back(at < text.size() ? text[at] : into[at - text.size()]);
    }
}

}  // namespace mesh
