// Stands between the engine and the number of tokens that it takes in one step.
//
// llama-server fills each step with everybody's next tokens and drafts, and then with prompts up to `llama_n_batch`,
// which is a number that nobody can change while it runs. Here that number is answered anew before each step
// (prefill_chunk.h), to the one who fills it and to nobody else: what the engine allocates is for the whole of it.
// While nobody writes, it is what it was: the same prompt is then always cut in the same places, and has the same
// answer.
//
// Works where this library has been loaded before the engine, and has been told to.

#include "ggml-mesh.h"
#include "hooks/engine_symbols.h"
#include "hooks/prefill_chunk.h"
#include "hooks/speculative_decoding.h"

#include "common.h"
#include "llama.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <dlfcn.h>
#include <optional>

#ifdef __linux__

namespace {

// The engine's own functions.
struct originals {
    uint32_t (*batch_size)(const llama_context *);
    void (*clear)(common_batch *);
    void * (*step)(void *);

    originals() {
        mesh::find_in_engine(batch_size, BATCH_SIZE);
        mesh::find_in_engine(clear, BATCH_CLEAR);
        mesh::find_in_engine(step, STEP);
    }
};

const originals & engine() {
    static const originals functions;
    return functions;
}

// The one pace of this process. The engine fills its steps in the thread that makes them.
class pacemaker {
  public:
    void keep(size_t usual, size_t fewest, double seconds) {
        pace_.emplace(usual, fewest, seconds);
    }

    void begin() {
        batch_ = nullptr;
        started_ = clock::now();
    }

    void fills(const common_batch * batch) {
        batch_ = batch;
    }

    size_t limit(size_t most) {
        const size_t drafted = mesh::take_drafted();
        return pace_ && somebody_writes_ ? pace_->limit(drafted, most) : most;
    }

    void end() {
        const std::chrono::duration<double> took = clock::now() - started_;
        const size_t tokens = batch_ != nullptr ? batch_->tokens.size() : 0;
        const size_t outputs = tokens > 0 ? count_outputs(*batch_) : 0;
        somebody_writes_ = outputs > 0;
        if (pace_) {
            pace_->stepped(tokens, outputs, took.count());
        }
        batch_ = nullptr;  // it may be gone before the next step, with its model
    }

  private:
    using clock = std::chrono::steady_clock;

    std::optional<mesh::prefill_chunk> pace_;
    const common_batch * batch_ = nullptr;
    bool somebody_writes_ = false;  // as far as the last step knew
    clock::time_point started_;

    static size_t count_outputs(const common_batch & batch) {
        const auto is_output = [](const common_batch::token & token) { return token.output; };
        return static_cast<size_t>(std::count_if(batch.tokens.begin(), batch.tokens.end(), is_output));
    }
};

pacemaker & the_pacemaker() {
    static pacemaker one;
    return one;
}

// The places in the engine from which a function of ours is called: which of them fill steps? Looking one up by
// name goes through a library's symbols, and each step calls from several places: what was found is remembered.
class places {
  public:
    bool fill_steps(const void * address) {
        const size_t known = std::min(count_.load(std::memory_order_acquire), known_.size());
        for (size_t i = 0; i < known; ++i) {
            if (known_[i].address.load(std::memory_order_acquire) == address) {
                return known_[i].fills;
            }
        }
        const bool fills = is_where_steps_are_filled(address);
        if (const size_t free = count_.fetch_add(known < known_.size() ? 1 : 0); free < known_.size()) {
            known_[free].fills = fills;
            known_[free].address.store(address, std::memory_order_release);
        }
        return fills;
    }

  private:
    struct entry {
        std::atomic<const void *> address{nullptr};
        std::atomic<bool> fills{false};
    };

    std::array<entry, 16> known_;
    std::atomic<size_t> count_{0};

    static bool is_where_steps_are_filled(const void * address) {
        Dl_info where{};
        return dladdr(address, &where) != 0 && where.dli_sname != nullptr &&
               std::strcmp(where.dli_sname, FILLING) == 0;
    }
};

}  // namespace

extern "C" {

GGML_MESH_API uint32_t mesh_batch_size(const llama_context * context) __asm__(BATCH_SIZE);
GGML_MESH_API void mesh_batch_clear(common_batch * batch) __asm__(BATCH_CLEAR);
GGML_MESH_API void * mesh_step(void * server) __asm__(STEP);

uint32_t mesh_batch_size(const llama_context * context) {
    static places askers;
    const uint32_t most = engine().batch_size(context);
    const bool fills = askers.fill_steps(__builtin_return_address(0));
    return fills ? static_cast<uint32_t>(the_pacemaker().limit(most)) : most;
}

void mesh_batch_clear(common_batch * batch) {
    static places clearers;
    if (clearers.fill_steps(__builtin_return_address(0))) {
        the_pacemaker().fills(batch);
    }
    engine().clear(batch);
}

// Whatever it returns goes on to whoever asked.
void * mesh_step(void * server) {
    the_pacemaker().begin();
    void * result = engine().step(server);
    the_pacemaker().end();
    return result;
}

int ggml_mesh_pace(unsigned int usual, unsigned int fewest, double seconds) {
    if (!mesh::engine_has(mesh::feature::chunked_prefill)) {
        return 1;
    }
    the_pacemaker().keep(usual, fewest, seconds);
    return 0;
}

}  // extern "C"

#else  // not __linux__

extern "C" {

// The engine's functions cannot be replaced here: all its steps are as long as it is told.
int ggml_mesh_pace(unsigned int, unsigned int, double) {
    return 1;
}

}  // extern "C"

#endif
