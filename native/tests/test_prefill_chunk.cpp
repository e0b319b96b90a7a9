// How much of a prompt is read in a step.

#include "hooks/prefill_chunk.h"
#include "tests/check.h"

#include <vector>

namespace {

using mesh::prefill_chunk;

constexpr size_t MOST = 2048;

// Steps of a long prompt beside one that writes, on an engine that reads it so fast; how long each took.
std::vector<double> steps_beside(prefill_chunk & kept, double tokens_per_s, double overhead_s, size_t count) {
    std::vector<double> took;
    for (size_t i = 0; i < count; ++i) {
        const size_t tokens = kept.limit(0, MOST);
        took.push_back(overhead_s + static_cast<double>(tokens) / tokens_per_s);
        kept.stepped(tokens, 1, took.back());
    }
    return took;
}

}  // namespace

TEST("prefill_chunk: beside others a step takes its time, however fast the engine is") {
    for (const double tokens_per_s : {300.0, 900.0, 5000.0}) {
        prefill_chunk kept(64, 16, 0.25);
        const std::vector<double> took = steps_beside(kept, tokens_per_s, 0.0, 10);
        CHECK(took.back() <= 0.25);
        CHECK(took.back() > 0.25 - 64 / tokens_per_s);
    }
}

TEST("prefill_chunk: as many as a kernel needs, also where they take somewhat longer") {
    prefill_chunk kept(64, 16, 0.25);
    CHECK_EQUAL(kept.limit(0, MOST), 64U);
    steps_beside(kept, 130.0, 0.0, 3);
    CHECK_EQUAL(kept.limit(0, MOST), 64U);
}

TEST("prefill_chunk: on a machine for which even those are too many, fewer") {
    prefill_chunk kept(64, 16, 0.25);
    const std::vector<double> took = steps_beside(kept, 80.0, 0.0, 10);
    CHECK(took.front() > 0.5);
    CHECK(took.back() <= 0.5);
    CHECK_EQUAL(kept.limit(0, MOST), 40U);
    CHECK_EQUAL(kept.limit(100, MOST), 100 + 40U);
}

TEST("prefill_chunk: where few tokens take nearly as long as many, it neither stops nor starves") {
    prefill_chunk kept(64, 16, 0.25);
    const std::vector<double> took = steps_beside(kept, 100.0, 0.3, 20);
    CHECK(took.back() <= 0.5);
    CHECK(kept.limit(0, MOST) > 16U);
    CHECK(kept.limit(0, MOST) <= 20U);
}

TEST("prefill_chunk: not less than the fewest, not more than the engine holds") {
    prefill_chunk slow(64, 16, 0.25);
    steps_beside(slow, 10.0, 0.0, 3);
    CHECK_EQUAL(slow.limit(0, MOST), 16U);

    prefill_chunk fast(64, 16, 0.25);
    steps_beside(fast, 1e9, 0.0, 3);
    CHECK_EQUAL(fast.limit(0, MOST), MOST);
    CHECK_EQUAL(slow.limit(0, 8), 8U);
    CHECK_EQUAL(fast.limit(0, 48), 48U);
    CHECK_EQUAL(prefill_chunk(0, 0, 0.25).limit(0, MOST), 1U);
}

TEST("prefill_chunk: a machine that has become fast again is noticed") {
    prefill_chunk kept(64, 16, 0.25);
    steps_beside(kept, 10.0, 0.0, 3);
    steps_beside(kept, 1000.0, 0.0, 5);
    CHECK_EQUAL(kept.limit(0, MOST), 192U);
}

TEST("prefill_chunk: drafts never leave a prompt without room, however many they are") {
    prefill_chunk kept(64, 16, 0.25);
    kept.stepped(600, 0, 1.0);
    CHECK_EQUAL(kept.limit(10, MOST), 10 + 128U);
    CHECK_EQUAL(kept.limit(100, MOST), 100 + 64U);
    CHECK_EQUAL(kept.limit(1000, MOST), 1000 + 64U);
    CHECK_EQUAL(kept.limit(2040, MOST), MOST);
    CHECK_EQUAL(kept.limit(3000, MOST), MOST);
}

TEST("prefill_chunk: a device that is slow with few tokens gets more of them") {
    prefill_chunk kept(64, 16, 0.25);
    const std::vector<double> took = steps_beside(kept, 20000.0, 0.1, 10);
    CHECK_EQUAL(kept.limit(0, MOST), MOST);
    CHECK(took.back() < 0.25);
}

TEST("prefill_chunk: it slows down as the prompt becomes long, and what is left of it says nothing") {
    prefill_chunk kept(64, 16, 0.25);
    steps_beside(kept, 2000.0, 0.0, 5);
    const size_t before = kept.limit(0, MOST);
    CHECK_EQUAL(before, 448U);
    kept.stepped(3, 1, 0.2);
    CHECK_EQUAL(kept.limit(0, MOST), before);
    steps_beside(kept, 1000.0, 0.0, 2);
    CHECK_EQUAL(kept.limit(0, MOST), 192U);
}
