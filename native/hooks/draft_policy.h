#pragma once

// Decides, for every step of the engine, what is drafted and how much of it.
//
// One for all sequences of an engine. It knows nothing of the engine: what drafts come from a model is for the
// caller to make, and what a step took for the caller to measure. Time in which no step was made is no time to it.

#include "hooks/draft_depth.h"
#include "hooks/ngram_index.h"

#include <array>
#include <cstdint>
#include <vector>

namespace mesh {

enum class drafted_by { nobody, text, model };

struct decision {
    drafted_by source = drafted_by::nobody;
    size_t depth = 0;
    ngram_index::match match;  // where the text itself drafts
};

// Sums since the engine started, but for the depth.
struct speculation_counters {
    uint64_t steps = 0;   // in which something was decided
    uint64_t tokens = 0;  // that these gave, drafted or not
    uint64_t drafted = 0;
    uint64_t accepted = 0;
    uint64_t text_drafted = 0;  // of these: what the text itself drafted
    uint64_t text_accepted = 0;
    double seconds = 0;        // that measured steps took
    double plain_seconds = 0;  // and would have taken without drafts
    size_t depth = 0;          // of the last draft
};

struct speculation_limits {
    size_t model = 0;    // tokens of one draft; 0 without a draft model
    size_t text = 0;     // 0: the text drafts nothing
    size_t at_hand = 2;  // tokens that the model reads anyway as it drafts, the last of a draft among them
};

class draft_policy {
  public:
    draft_policy(speculation_limits allowed, size_t count);

    // A request starts on a sequence: its text is new, and so may be its habits.
    void begin(size_t id);

    // What to draft for those sequences that are waiting for a token, in the order given. `missing` are the
    // tokens that the draft model has not read yet; with many of them it may be asked several times before it drafts.
    struct request {
        size_t sequence;
        size_t room;  // tokens that the engine would take
        const std::vector<int32_t> * text;
        int32_t last;
        size_t missing;
        bool follows = true;  // whether there is a draft model that can read this text
    };
    std::vector<decision> decide(const std::vector<request> & requests);

    const ngram_index & text_of(size_t id) const {
        return sequences[id].text;
    }

    // What became of the last decision for a sequence. A draft model may have drafted less than it was allowed; of one
    // that is still catching up nothing is told.
    void drafted(size_t id, size_t count);
    void accepted(size_t id, size_t count);

    // The draft was not all right, and the state cannot be cut back: the engine has put it back to before the draft, and
    // reads again what was right. `accepted` comes after that.
    void taken_back(size_t id);

    // The draft is not verified after all.
    void dropped(size_t id);

    void drafting_took(double seconds, size_t tokens);  // the draft model's own time
    void reading_took(double seconds, size_t tokens);   // and what it needed to catch up with the text

    // The step that followed the last decision: its tokens, and its time without what drafting took. `again_s`: what
    // the next one took, where a draft was taken back.
    void stepped(size_t tokens, double seconds, double again_s = 0);

    speculation_counters counters;

  private:
    static constexpr size_t KINDS = 5;  // matches by their length: the longer, the likelier it goes on like this

    struct sequence {
        ngram_index text;
        std::array<acceptance, KINDS> matches;
        acceptance model;
        decision last;
        size_t drafted = 0;
        size_t accepted = 0;
        bool open = false;       // whether the last decision waits for its outcome
        bool redoing = false;    // and the engine reads again what was right of it
        bool redone = false;     // or has
        size_t since_plain = 0;  // steps with drafts in a row
        size_t unguessed = 0;    // tokens of this answer from steps in which the text itself drafted nothing
        explicit sequence(const draft_policy & all);
    };

    speculation_limits limits;
    std::array<acceptance, KINDS> matches;  // over all requests: what a new one starts from
    acceptance model;
    step_costs costs;
    double answer_length;       // mean of what was `unguessed`: what a draft model can save
    size_t answers = 1;         // that it was taken over, the first one made up
    double draft_s = 0;         // per token
    double model_used_at = -1;  // `counters.seconds` when it drafted last, for any of them, or at the first step
    double redo_s = 0;          // of a step that is made again; 0 where none was
    step_costs reads;           // of the draft model: a whole prompt takes little longer than its last token
    double drafting_s = 0;      // in the step under way
    size_t yielding = 0;        // sequences in the step under way
    std::vector<sequence> sequences;

    static size_t kind_of(size_t length);
    decision decide_one(const request & asked, const shared_step & beside);
    void settle(sequence & one);
    double reading_s(size_t tokens) const;
    double hope() const;
    draft_source model_source(double rate, size_t trusted, const request & asked) const;
    bool
    may_use_model(const sequence & one, const request & asked, size_t depth, const shared_step & beside) const;
};

}  // namespace mesh
