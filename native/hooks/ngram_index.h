#pragma once

// What followed the last time that the same tokens stood here: drafts that cost nothing.
//
// Kept per sequence, as a text that only grows. Every place is filed under its
// last three tokens; places with the same three form a chain, newest first.

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace mesh {

class ngram_index {
  public:
    static constexpr size_t SHORTEST = 3;    // tokens that have to agree before a place counts
    static constexpr size_t LONGEST = 64;    // and beyond which more of them say nothing
    static constexpr size_t LOOKED_AT = 32;  // places, newest first; what is common has many

    struct match {
        size_t next = 0;    // of the token that followed
        size_t length = 0;  // tokens that agree; 0 where there is no such place
    };

    // Brings the text up to `tokens` and then `last`. Appends where it begins with what is here already, else
    // starts afresh: the sequence belongs to another request.
    void follow(const std::vector<int32_t> & tokens, int32_t last);

    // The place whose tokens agree with the end of the text for longest; of several the newest.
    match longest() const;

    // Up to `count` tokens from a match on. A text that repeats itself runs on into its own continuation.
    void continuation(const match & from, size_t count, std::vector<int32_t> & into) const;

    size_t size() const {
        return text.size();
    }

  private:
    std::vector<int32_t> text;
    std::vector<int32_t> earlier;  // for each place, the one before it with the same three tokens; or -1
    std::unordered_map<uint64_t, int32_t> newest;

    void append(int32_t token);
    bool begins(const std::vector<int32_t> & tokens, int32_t last) const;
    size_t agreement(size_t one, size_t other) const;
};

}  // namespace mesh
