#include "hooks/draft_policy.h"

#include <algorithm>

namespace mesh {

namespace {

constexpr size_t LENGTHS[] = {3, 4, 7, 15};                    // of matches: the last of each kind but one
constexpr double MATCH_RATES[] = {0.35, 0.5, 0.65, 0.8, 0.9};  // before anything was seen
constexpr double MODEL_RATE = 0.7;
constexpr size_t PLAIN_AFTER = 64;    // steps with drafts, one without: what it is all compared with changes
constexpr double TRYING = 0.01;       // of the steps' time, to see whether a model that did not pay does now
constexpr double ANSWER_LENGTH = 32;  // tokens, before one has ended
constexpr size_t ANSWERS = 8;         // as many count, for the length of the next one
constexpr double FRESH = 0.15;

void average(double & mean, double value) {
    mean = mean == 0 ? value : mean + FRESH * (value - mean);
}

std::array<acceptance, 5> first_matches() {
    return {
        acceptance(MATCH_RATES[0]), acceptance(MATCH_RATES[1]), acceptance(MATCH_RATES[2]),
        acceptance(MATCH_RATES[3]), acceptance(MATCH_RATES[4]),
    };
}

}  // namespace

draft_policy::sequence::sequence(const draft_policy & all) : matches(all.matches), model(all.model) {}

draft_policy::draft_policy(speculation_limits allowed, size_t count)
    : limits(allowed), matches(first_matches()), model(MODEL_RATE), answer_length(ANSWER_LENGTH) {
    for (size_t i = 0; i < count; ++i) {
        sequences.emplace_back(*this);
    }
}

size_t draft_policy::kind_of(size_t length) {
    size_t kind = 0;
    while (kind < std::size(LENGTHS) && length > LENGTHS[kind]) {
        ++kind;
    }
    return kind;
}

void draft_policy::begin(size_t id) {
    sequence & one = sequences[id];
    if (one.unguessed > 0) {
        answers = std::min(answers + 1, ANSWERS);
        answer_length += (static_cast<double>(one.unguessed) - answer_length) / static_cast<double>(answers);
    }
    one.open = false;
    one.redoing = false;
    one.redone = false;
    one.last = {};
    one.since_plain = 0;
    one.unguessed = 0;
    // What others have seen is where a new request starts, and no more than that.
    for (size_t kind = 0; kind < KINDS; ++kind) {
        one.matches[kind] = acceptance(matches[kind].rate());
    }
    one.model = acceptance(model.rate());
}

std::vector<decision> draft_policy::decide(const std::vector<request> & requests) {
    for (sequence & one : sequences) {
        settle(one);
    }
    // The counters may go on from an earlier model's.
    model_used_at = model_used_at < 0 ? counters.seconds : model_used_at;
    std::vector<decision> all;
    size_t tokens = requests.size();
    double yield = static_cast<double>(requests.size());
    drafting_s = 0;
    for (const request & asked : requests) {
        sequence & one = sequences[asked.sequence];
        decision made = decide_one(asked, {tokens, yield, drafting_s});
        one.last = made;
        one.open = true;
        one.redoing = false;
        one.redone = false;
        one.drafted = 0;
        one.accepted = 0;
        if (made.source == drafted_by::nobody) {
            one.since_plain = 0;
        } else {
            ++one.since_plain;
            tokens += made.depth;
            const bool by_text = made.source == drafted_by::text;
            const double rate = by_text ? one.matches[kind_of(made.match.length)].rate() : one.model.rate();
            yield += expected_tokens(rate, made.depth);
            counters.depth = made.depth;
        }
        all.push_back(made);
    }
    yielding = requests.size();
    ++counters.steps;
    return all;
}

decision draft_policy::decide_one(const request & asked, const shared_step & beside) {
    sequence & one = sequences[asked.sequence];
    decision made;
    if (limits.text > 0) {
        one.text.follow(*asked.text, asked.last);
    }
    if (!costs.known() || one.since_plain >= PLAIN_AFTER) {
        return made;
    }
    double best = 0;
    if (limits.text > 0) {
        const ngram_index::match match = one.text.longest();
        if (match.length > 0) {
            acceptance & rate = one.matches[kind_of(match.length)];
            const size_t limit = std::min({asked.room, limits.text, rate.trusted()});
            const draft_source source{rate.rate(), limit, 0, 0, redo_s};
            const draft_choice choice = best_depth(costs, source, beside);
            if (choice.depth > 0) {
                made = {drafted_by::text, choice.depth, match};
                best = choice.tokens_per_s;
            } else {
                rate.skipped(hope());
            }
        }
    }
    if (limits.model > 0 && asked.follows) {
        const draft_source source = model_source(one.model.rate(), one.model.trusted(), asked);
        const draft_choice choice = best_depth(costs, source, beside);
        if (choice.depth == 0) {
            one.model.skipped(hope());
        } else if (choice.tokens_per_s > best && may_use_model(one, asked, choice.depth, beside)) {
            made = {drafted_by::model, choice.depth, {}};
        }
    }
    return made;
}

draft_source draft_policy::model_source(double rate, size_t trusted, const request & asked) const {
    return {
        rate, std::min({asked.room, limits.model, trusted}), draft_s,
        reading_s(std::min(asked.missing, limits.at_hand)), redo_s};
}

// What is not to be expected by what was seen is tried now and then, for a small part of the time that steps take: what
// passes between answers is not to be spent in them. Otherwise a model that has not read along has to catch up first,
// which is an investment: it has to be less than what drafts are expected to save over the rest of the answer. That is
// taken to be as long as others were, and where it is more than half of that already, to go on for as long as it has.
bool draft_policy::may_use_model(
    const sequence & one, const request & asked, size_t depth, const shared_step & beside
) const {
    const double plain_s = costs.of(beside.tokens);
    const double reads_s = reading_s(asked.missing);
    // What is seen of one answer's drafts is soon as deep as others' were.
    const size_t trusted = std::max(one.model.trusted(), model.trusted());
    const draft_choice expected = best_depth(costs, model_source(one.model.seen_rate(), trusted, asked), beside);
    if (expected.depth == 0) {
        const double verified_s = costs.of(beside.tokens + depth) - plain_s;
        const double try_s = reads_s + draft_s * static_cast<double>(depth) + verified_s + redo_s;
        return try_s <= TRYING * (counters.seconds - model_used_at);
    }
    const double plain = beside.yield / (plain_s + beside.drafting_s);
    const double saved = plain_s * (1 - plain / expected.tokens_per_s);
    const double so_far = static_cast<double>(one.unguessed);
    return asked.missing <= limits.at_hand || reads_s <= saved * std::max(answer_length - so_far, so_far);
}

// What a wrong try costs is not to be more of the time than where nothing is made again.
double draft_policy::hope() const {
    return redo_s > 0 ? std::min(1.0, costs.of(1) / redo_s) : 1;
}

double draft_policy::reading_s(size_t tokens) const {
    return tokens > 0 && reads.known() ? reads.of(tokens) : 0;
}

void draft_policy::drafted(size_t id, size_t count) {
    sequence & one = sequences[id];
    one.drafted = count;
    counters.drafted += count;
    if (one.last.source == drafted_by::text) {
        counters.text_drafted += count;
    } else {
        // Not before: a long text is read in several steps, and the first would forbid the others.
        model_used_at = counters.seconds;
    }
}

void draft_policy::accepted(size_t id, size_t count) {
    sequence & one = sequences[id];
    // Read again, the token after those that were right counts as drafted, too.
    one.accepted = std::min(count - (one.redoing && count > 0 ? 1 : 0), one.drafted);
    one.redoing = false;
    counters.accepted += one.accepted;
    if (one.last.source == drafted_by::text) {
        counters.text_accepted += one.accepted;
    }
}

void draft_policy::taken_back(size_t id) {
    sequence & one = sequences[id];
    one.redoing = one.open && one.drafted > 0;
    one.redone = one.redoing;
}

void draft_policy::dropped(size_t id) {
    sequence & one = sequences[id];
    counters.drafted -= one.drafted;
    counters.text_drafted -= one.last.source == drafted_by::text ? one.drafted : 0;
    one.drafted = 0;
}

void draft_policy::settle(sequence & one) {
    if (one.redoing) {
        return;  // others go on in the meantime
    }
    if (one.open && one.last.source != drafted_by::text) {
        one.unguessed += 1 + one.accepted + (one.redone ? 1 : 0);
    }
    if (one.open && one.drafted > 0) {
        if (one.last.source == drafted_by::text) {
            const size_t kind = kind_of(one.last.match.length);
            one.matches[kind].seen(one.drafted, one.accepted);
            matches[kind].seen(one.drafted, one.accepted);
        } else if (one.last.source == drafted_by::model) {
            one.model.seen(one.drafted, one.accepted);
            model.seen(one.drafted, one.accepted);
        }
    }
    one.open = false;
}

void draft_policy::drafting_took(double seconds, size_t tokens) {
    drafting_s += seconds;
    if (tokens > 0) {
        average(draft_s, seconds / static_cast<double>(tokens));
    }
}

void draft_policy::reading_took(double seconds, size_t tokens) {
    drafting_s += seconds;
    if (tokens > 0) {
        reads.seen(tokens, seconds);
    }
}

void draft_policy::stepped(size_t tokens, double seconds, double again_s) {
    costs.seen(tokens, seconds);
    if (again_s > 0) {
        average(redo_s, again_s);
    }
    size_t gained = 0;
    for (const sequence & one : sequences) {
        gained += one.open && !one.redoing ? 1 + one.accepted + (one.redone ? 1 : 0) : 0;
    }
    counters.tokens += gained;
    counters.seconds += seconds + again_s + drafting_s;
    // Each step without drafts gives a token to every sequence.
    counters.plain_seconds +=
        costs.of(yielding) * static_cast<double>(gained) / static_cast<double>(std::max<size_t>(1, yielding));
}

}  // namespace mesh
