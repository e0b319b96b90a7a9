// What is drafted, and when it is not.

#include "hooks/draft_policy.h"
#include "hooks/ngram_index.h"
#include "tests/check.h"
#include "tests/frames.h"

#include <cmath>
#include <functional>

namespace {

using mesh::draft_policy;
using mesh::drafted_by;
using mesh::ngram_index;

std::vector<int32_t> numbers(size_t count) {
    std::vector<int32_t> all;
    for (size_t i = 0; i < count; ++i) {
        all.push_back(static_cast<int32_t>(i));
    }
    return all;
}

bool near(double found, double expected, double within) {
    return std::abs(found - expected) <= within;
}

// An engine with one sequence: what a step costs, and how often a drafted token is right.
struct plan {
    std::function<double(size_t)> step_s;
    double rate = 0;
    double draft_s = 0;  // of each token of a draft model
    double read_s = 0;
    size_t period = 0;  // of the text: it repeats itself after so many tokens; 0: it never does
    double redo_s = 0;  // of a step that is made again where a draft was not all right; 0: none is
    size_t prompt = 1;  // tokens
};

struct outcome {
    double seconds = 0;
    size_t tokens = 0;
    size_t drafted = 0;
    size_t deepest = 0;

    double per_s() const {
        return static_cast<double>(tokens) / seconds;
    }
};

outcome run(draft_policy & under_test, const plan & on, size_t tokens, session_bytes::dice & random) {
    outcome seen;
    std::vector<int32_t> text = numbers(on.prompt);
    size_t read = 0;
    under_test.begin(0);
    const auto next = [&] {
        const size_t at = text.size();
        return static_cast<int32_t>(on.period != 0 ? at % on.period : 1000 + at);
    };
    while (seen.tokens < tokens) {
        const int32_t last = next();
        const auto made = under_test.decide({{0, 100, &text, last, text.size() - read}}).at(0);
        double spent = 0;
        size_t right = 0;
        if (made.source == drafted_by::model) {
            const double reading = on.read_s * static_cast<double>(text.size() - read);
            under_test.reading_took(reading, text.size() - read);
            under_test.drafting_took(on.draft_s * static_cast<double>(made.depth), made.depth);
            spent = reading + on.draft_s * static_cast<double>(made.depth);
            read = text.size();
        }
        text.push_back(last);
        while (right < made.depth && static_cast<double>(random.below(1000)) < 1000 * on.rate) {
            ++right;
        }
        if (made.depth > 0) {
            under_test.drafted(0, made.depth);
        }
        const bool redone = on.redo_s > 0 && right < made.depth;
        if (redone) {
            under_test.taken_back(0);
        }
        if (made.depth > 0) {
            under_test.accepted(0, right + (redone ? 1 : 0));
        }
        for (size_t i = 0; i < right + (redone ? 1 : 0); ++i) {
            text.push_back(next());
        }
        read += made.source == drafted_by::model ? 1 + right : 0;
        read = std::min(read, text.size());
        const double step = on.step_s(1 + made.depth);
        under_test.stepped(1 + made.depth, step, redone ? on.redo_s : 0);
        const double took = step + spent + (redone ? on.redo_s : 0);
        seen.seconds += took;
        seen.tokens += 1 + right + (redone ? 1 : 0);
        seen.drafted += made.depth;
        seen.deepest = std::max(seen.deepest, made.depth);
    }
    return seen;
}

double far_away(size_t tokens) {
    return 0.080 + 0.004 * static_cast<double>(tokens);
}

double at_home(size_t tokens) {
    return 0.001 + 0.008 * static_cast<double>(tokens);
}

}  // namespace

TEST("ngram_index: nothing is found in what never repeats") {
    ngram_index text;
    text.follow(numbers(500), 9999);
    CHECK_EQUAL(text.longest().length, 0U);
    CHECK_EQUAL(text.size(), 501U);
}

TEST("ngram_index: the longest agreement wins, and of equal ones the newest") {
    ngram_index text;
    text.follow({7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3, 70, 8, 1, 2}, 3);
    const ngram_index::match match = text.longest();
    CHECK_EQUAL(match.length, 4U);  // 8 1 2 3, though 9 1 2 3 is newer
    std::vector<int32_t> drafted;
    text.continuation(match, 3, drafted);
    CHECK(drafted == std::vector<int32_t>({60, 9, 1}));
    ngram_index equal;
    equal.follow({1, 2, 3, 50, 1, 2, 3, 60, 1, 2}, 3);
    equal.continuation(equal.longest(), 1, drafted);
    CHECK_EQUAL(drafted.at(0), 60);
}

TEST("ngram_index: a text that repeats itself runs on into its own continuation") {
    ngram_index text;
    text.follow({5, 6, 7, 8, 5, 6, 7, 8, 5, 6}, 7);
    std::vector<int32_t> drafted;
    text.continuation(text.longest(), 9, drafted);
    CHECK(drafted == std::vector<int32_t>({8, 5, 6, 7, 8, 5, 6, 7, 8}));
}

TEST("ngram_index: a text that grows is appended to, another one starts afresh") {
    ngram_index text;
    text.follow({1, 2, 3}, 4);
    text.follow({1, 2, 3, 4, 5}, 6);
    CHECK_EQUAL(text.size(), 6U);
    text.follow({1, 2, 3, 4, 5}, 6);
    CHECK_EQUAL(text.size(), 6U);
    text.follow({9, 9}, 9);
    CHECK_EQUAL(text.size(), 3U);
    text.follow({1, 2, 3, 4, 5, 6, 7, 8}, 9);
    CHECK_EQUAL(text.size(), 9U);
    CHECK_EQUAL(text.longest().length, 0U);
}

TEST("ngram_index: any text, any time, agrees with a search by hand") {
    session_bytes::dice random(11);
    for (int round = 0; round < 300; ++round) {
        std::vector<int32_t> all(5 + random.below(60));
        for (int32_t & token : all) {
            token = static_cast<int32_t>(random.below(3));
        }
        const int32_t last = all.back();
        ngram_index text;
        text.follow({all.begin(), all.end() - 1}, last);
        size_t longest = 0;
        for (size_t place = 0; place + 1 < all.size(); ++place) {
            size_t length = 0;
            while (length <= place && all[place - length] == all[all.size() - 1 - length]) {
                ++length;
            }
            longest = std::max(longest, length);
        }
        const size_t found = text.longest().length;
        CHECK(found == 0 || found >= ngram_index::SHORTEST);
        // Only the newest places are looked at, so that it may be shorter; never longer, and not missed.
        CHECK(found <= longest && (found > 0) == (longest >= ngram_index::SHORTEST));
    }
}

TEST("depth: a line through what was seen, and a guess before that") {
    mesh::step_costs costs;
    CHECK(!costs.known());
    costs.seen(1, 0.1);
    CHECK(costs.known() && near(costs.of(1), 0.1, 1e-9) && costs.of(9) > costs.of(1));
    for (int i = 0; i < 40; ++i) {
        costs.seen(1, far_away(1));
        costs.seen(9, far_away(9));
    }
    CHECK(near(costs.of(1), far_away(1), 0.001));
    CHECK(near(costs.of(5), far_away(5), 0.002));
    CHECK(near(costs.of(9), far_away(9), 0.001));
}

TEST("depth: one step that something else held up is not believed") {
    mesh::step_costs costs;
    for (int i = 0; i < 20; ++i) {
        costs.seen(1, 0.1);
    }
    costs.seen(1, 60.0);
    CHECK(costs.of(1) < 0.15);
}

TEST("depth: expected tokens are a sum of chances") {
    CHECK(near(mesh::expected_tokens(1.0, 8), 8, 1e-9));
    CHECK(near(mesh::expected_tokens(0.5, 2), 0.75, 1e-9));
    CHECK(near(mesh::expected_tokens(0.9, 0), 0, 1e-9));
}

TEST("draft_policy: the first step of all is without a draft") {
    draft_policy one({8, 24}, 1);
    const std::vector<int32_t> text = {1, 2, 3, 1, 2};
    CHECK(one.decide({{0, 100, &text, 3, 0}}).at(0).source == drafted_by::nobody);
}

TEST("draft_policy: over far links a good draft model goes deep, and gains") {
    draft_policy one({8, 0}, 1);
    session_bytes::dice random(3);
    const outcome seen = run(one, {far_away, 0.95, 0.004, 0.001, 0}, 400, random);
    CHECK_EQUAL(seen.deepest, 8U);
    CHECK(seen.per_s() > 3 / far_away(1));
    CHECK(one.counters.plain_seconds > 2.5 * one.counters.seconds);
}

TEST("draft_policy: where steps cost by the token, drafts that are often wrong are given up") {
    draft_policy one({8, 24}, 1);
    session_bytes::dice random(5);
    const outcome seen = run(one, {at_home, 0.3, 0.004, 0.001, 0}, 2000, random);
    CHECK(seen.per_s() > 0.97 / at_home(1));
}

TEST("draft_policy: far away, too, what is never right costs next to nothing") {
    draft_policy one({8, 24}, 1);
    session_bytes::dice random(6);
    const outcome seen = run(one, {far_away, 0.0, 0.020, 0.010, 0}, 2000, random);
    CHECK(seen.per_s() > 0.97 / far_away(1));
    // And without a draft model, in a text that looks as if it repeated itself.
    draft_policy other({0, 24}, 1);
    const outcome looks = run(other, {far_away, 0.0, 0, 0, 7}, 2000, random);
    CHECK(looks.drafted > 0 && looks.per_s() > 0.97 / far_away(1));
}

TEST("draft_policy: what a draft costs that has to be taken back is weighed") {
    session_bytes::dice random(3);
    // Far away a step that is made again costs as much as any, and gives as much.
    draft_policy far({8, 0}, 1);
    const outcome gained = run(far, {far_away, 0.8, 0.001, 0, 0, 0.090}, 2000, random);
    CHECK(gained.per_s() > 1.5 / far_away(1));
    // Where it costs ten steps, drafts that are often wrong are given up.
    draft_policy dear({8, 0}, 1);
    const outcome given_up = run(dear, {far_away, 0.5, 0.001, 0, 0, 0.840}, 4000, random);
    CHECK(given_up.per_s() > 0.9 / far_away(1));
    CHECK(given_up.drafted < 400);
    CHECK_EQUAL(dear.counters.tokens, given_up.tokens);
}

TEST("draft_policy: a draft that is dropped was never made") {
    draft_policy under_test({4, 0}, 1);
    const std::vector<int32_t> text = {1, 2};
    under_test.decide({{0, 100, &text, 3, 0}});
    under_test.stepped(1, 0.1);
    const auto made = under_test.decide({{0, 100, &text, 3, 0}}).at(0);
    CHECK(made.depth > 0);
    under_test.drafted(0, made.depth);
    under_test.dropped(0);
    CHECK_EQUAL(under_test.counters.drafted, 0U);
}

TEST("draft_policy: text that repeats itself needs no model") {
    draft_policy one({0, 24}, 1);
    session_bytes::dice random(7);
    const outcome seen = run(one, {far_away, 0.97, 0, 0, 40}, 1000, random);
    CHECK(seen.deepest >= 12 && seen.per_s() > 4 / far_away(1));
    CHECK_EQUAL(one.counters.drafted, one.counters.text_drafted);
}

TEST("draft_policy: what failed is tried again, and found to have changed") {
    draft_policy one({0, 24}, 1);
    session_bytes::dice random(8);
    const outcome bad = run(one, {far_away, 0.0, 0, 0, 40}, 300, random);
    const outcome good = run(one, {far_away, 0.97, 0, 0, 40}, 1500, random);
    CHECK(bad.per_s() < 1.01 / far_away(1) && good.per_s() > 2.5 / far_away(1));
}

TEST("draft_policy: a step without a draft comes now and then, to compare with") {
    draft_policy one({8, 0}, 1);
    std::vector<int32_t> text = {1};
    size_t plain = 0;
    for (int i = 0; i < 300; ++i) {
        const auto made = one.decide({{0, 100, &text, 2, 0}}).at(0);
        plain += made.depth == 0 ? 1 : 0;
        if (made.depth > 0) {
            one.drafting_took(0.001, made.depth);
            one.drafted(0, made.depth);
            one.accepted(0, made.depth);
        }
        one.stepped(1 + made.depth, far_away(1 + made.depth));
    }
    CHECK(plain >= 4 && plain <= 12);
}

TEST("draft_policy: a draft model reads a long text in several steps, and then drafts") {
    draft_policy one({8, 0}, 1);
    const std::vector<int32_t> text(4000, 1);
    for (int i = 0; i < 4; ++i) {
        one.decide({{0, 100, &text, 2, 0}});
        one.stepped(1, far_away(1));
    }
    one.begin(0);
    const double before = one.counters.seconds;
    size_t missing = 4000;
    size_t steps = 0;
    while (missing > 0 && ++steps < 1000) {
        if (one.decide({{0, 100, &text, 2, missing}}).at(0).source == drafted_by::model) {
            one.reading_took(0.5, 500);
            missing -= 500;
        }
        one.stepped(1, far_away(1));
    }
    // As soon as the answer is known to be long, and not much later: it reads 500 in each step.
    const double took = one.counters.seconds - before;
    CHECK(took > 10 && took < 25);
    CHECK(one.decide({{0, 100, &text, 2, 0}}).at(0).source == drafted_by::model);
    // As long as it is right it may catch up again, and otherwise take no more than a small part of the time since.
    one.drafted(0, 8);
    one.accepted(0, 8);
    one.stepped(9, far_away(9));
    CHECK(one.decide({{0, 100, &text, 2, 500}}).at(0).source == drafted_by::model);
    for (int i = 0; i < 100; ++i) {
        one.decide({{0, 100, &text, 2, 0}});
        one.drafted(0, 1);
        one.accepted(0, 0);
    }
    const double failed = one.counters.seconds;
    while (one.decide({{0, 100, &text, 2, 500}}).at(0).source == drafted_by::nobody && ++steps < 10000) {
        one.stepped(1, far_away(1));
    }
    // It takes more than half a second.
    CHECK(one.counters.seconds > failed + 50);
    CHECK(one.counters.seconds < failed + 100);
}

TEST("draft_policy: the time of models before it allows no dearer try") {
    const auto dear = [](size_t tokens) { return 0.004 + 0.008 * static_cast<double>(tokens); };
    draft_policy one({8, 0}, 1);
    one.counters.seconds = 1e6;
    const std::vector<int32_t> text(4000, 1);
    const auto step = [&] {
        const mesh::decision made = one.decide({{0, 100, &text, 2, 4000}}).at(0);
        one.stepped(1, dear(1));
        one.stepped(4, dear(4));
        return made.source;
    };
    step();
    one.reading_took(0.5, 500);
    size_t tries = 0;
    for (int i = 0; i < 1000; ++i) {
        tries += step() == drafted_by::model ? 1 : 0;
    }
    CHECK_EQUAL(tries, 0U);  // each would take 4 s; 48 s of steps have passed
    for (int i = 0; i < 9000; ++i) {
        tries += step() == drafted_by::model ? 1 : 0;
    }
    CHECK(tries > 0);
}

TEST("draft_policy: a long prompt is read at once where answers have been long") {
    session_bytes::dice random(4);
    const plan good{far_away, 0.97, 0.004, 0.005, 0, 0, 600};
    draft_policy under_test({8, 0}, 1);
    run(under_test, good, 200, random);
    // Reading takes as long as 36 plain steps.
    CHECK(run(under_test, good, 200, random).per_s() > 1.5 / far_away(1));
    const outcome short_one = run(under_test, good, 10, random);
    CHECK(short_one.drafted > 0);  // nobody knew
    for (int i = 0; i < 20; ++i) {
        run(under_test, good, 10, random);
    }
    CHECK(run(under_test, good, 10, random).per_s() > 0.97 / far_away(1));
    // And an answer that turns out to be long.
    CHECK(run(under_test, good, 400, random).per_s() > 1.5 / far_away(1));
}

TEST("draft_policy: a long prompt is not read for a draft that is never right") {
    session_bytes::dice random(4);
    const plan bad{far_away, 0, 0.004, 0.005, 0, 0, 600};
    draft_policy under_test({8, 0}, 1);
    run(under_test, bad, 200, random);
    outcome all;
    for (int i = 0; i < 10; ++i) {
        const outcome one = run(under_test, bad, 200, random);
        all.seconds += one.seconds;
        all.tokens += one.tokens;
    }
    CHECK(all.per_s() > 0.97 / far_away(1));
}

TEST("draft_policy: a head that is never right costs next to nothing, alone, too") {
    session_bytes::dice random(4);
    const auto alone = [](size_t tokens) { return 0.011 + 0.005 * static_cast<double>(tokens); };
    const plan wrong{alone, 0, 0.004, 0.0005, 0, 0, 64};
    draft_policy under_test({3, 0, 4}, 1);
    run(under_test, wrong, 128, random);
    outcome all;
    for (int i = 0; i < 12; ++i) {
        const outcome one = run(under_test, wrong, 128, random);
        all.seconds += one.seconds;
        all.tokens += one.tokens;
    }
    CHECK(all.per_s() > 0.985 / alone(1));
}

TEST("draft_policy: a prompt is read at once where reading many tokens takes little longer than one") {
    draft_policy one({8, 0}, 1);
    const std::vector<int32_t> text(200, 1);
    one.decide({{0, 100, &text, 2, 0}});
    one.stepped(1, far_away(1));
    // An answer in which it reads a token or two at a time, as it does while it drafts.
    for (int i = 0; i < 60; ++i) {
        one.reading_took(0.012, 1 + static_cast<size_t>(i) % 2);
    }
    one.begin(0);
    one.decide({{0, 100, &text, 2, 0}});
    one.stepped(1, far_away(1));
    one.reading_took(0.150, 120);
    one.begin(0);
    CHECK(one.decide({{0, 100, &text, 2, 200}}).at(0).source == drafted_by::model);
}

TEST("draft_policy: a text that the draft model cannot read is left to the text itself") {
    draft_policy one({8, 24}, 1);
    std::vector<int32_t> text;
    for (int32_t i = 0; i < 200; ++i) {
        text.push_back(i % 10);
    }
    draft_policy::request asked{0, 100, &text, 0, 200};
    one.decide({asked});
    one.stepped(1, far_away(1));
    asked.follows = false;
    CHECK(one.decide({asked}).at(0).source == drafted_by::text);
    const std::vector<int32_t> other = numbers(200);
    asked = {0, 100, &other, 999, 200, false};
    CHECK(one.decide({asked}).at(0).source == drafted_by::nobody);
}

TEST("draft_policy: several sequences share a step, and no draft is deeper than there is room") {
    draft_policy all({8, 24}, 4);
    const std::vector<int32_t> text = {1, 2, 3, 4, 5, 1, 2, 3, 4};
    std::vector<draft_policy::request> requests;
    for (size_t id = 0; id < 4; ++id) {
        requests.push_back({id, id, &text, 5, 0});
    }
    for (int i = 0; i < 4; ++i) {
        all.decide(requests);
        all.stepped(4, far_away(4));
        all.stepped(8, far_away(8));
    }
    const auto made = all.decide(requests);
    CHECK_EQUAL(made.at(0).depth, 0U);
    for (size_t id = 1; id < 4; ++id) {
        CHECK(made.at(id).depth >= 1 && made.at(id).depth <= id);
    }
}
