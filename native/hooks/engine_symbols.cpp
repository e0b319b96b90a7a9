#include "hooks/engine_symbols.h"

#include "ggml-mesh.h"

#include <algorithm>
#include <dlfcn.h>
#include <iterator>

namespace mesh {

namespace {

struct described {
    const char * name;
    const char * without;
};

// In the order of `feature`.
constexpr described FEATURES[] = {
    {"sparse mapping", "a host reads the layers of its workers from disk, too"},
    {"draft policy", "the engine drafts a fixed number of tokens at a time"},
    {"chunked prefill", "answers under way pause while the engine reads a long prompt"},
    {"saved states", "a split model reads a text again where only its end has changed, or its slot was taken"},
    {"graph order", "workers compute some layers in several pieces"},
    {"MTP head", "a model's own layer for further tokens drafts nothing"},
    {"EAGLE3 head", "a draft head that reads the model's layers drafts nothing"},
};

struct symbol {
    const char * name;
    feature of;
    bool replaced = true;
};

#ifdef __linux__

constexpr symbol SYMBOLS[] = {
    {LLAMA_MMAP, feature::sparse_mapping},
    {SPECULATIVE_DRAFT, feature::draft_policy},
    {SPECULATIVE_ACCEPT, feature::draft_policy},
    {SPECULATIVE_BEGIN, feature::draft_policy},
    {SPECULATIVE_PROCESS, feature::draft_policy},
    {SPECULATIVE_INIT, feature::draft_policy},
    {SPECULATIVE_PARAMS, feature::draft_policy, false},
    {DRAFT_CONTEXT, feature::draft_policy},
    {MEMORY_REMOVE, feature::draft_policy},
    {STATE_RESTORE, feature::draft_policy},
    {SAMPLER_INIT, feature::draft_policy},
    {SET_SAMPLER, feature::draft_policy},
    {BATCH_SIZE, feature::chunked_prefill},
    {BATCH_CLEAR, feature::chunked_prefill},
    {STEP, feature::chunked_prefill},
    {FILLING, feature::chunked_prefill, false},
    {STATE_SIZE, feature::saved_states},
    {STATE_SAVE, feature::saved_states},
    {STATE_RESTORE, feature::saved_states},
    {CHECKPOINT_SAVE, feature::saved_states},
    {CHECKPOINT_LOAD, feature::saved_states},
    {MEMORY_COPY, feature::saved_states},
    {SPLIT_GRAPH, feature::graph_order},
    {SET_NEXTN, feature::mtp_head},
    {NEXTN_STATES, feature::mtp_head, false},
    {NEXTN_STATE, feature::mtp_head, false},
    {LAYER_DEVICE, feature::mtp_head},
    {SET_NEXTN, feature::eagle3_head},
    {NEXTN_STATES, feature::eagle3_head, false},
    {NEXTN_STATE, feature::eagle3_head, false},
    {SET_LAYER_INPUTS, feature::eagle3_head},
    {LAYER_INPUTS, feature::eagle3_head, false},
    {TARGET_LAYERS, feature::eagle3_head, false},
    {TARGET_LAYER_COUNT, feature::eagle3_head, false},
};

#else

// Elsewhere a library cannot stand in for functions of another: every symbol counts as missing.
constexpr symbol SYMBOLS[] = {
    {"", feature::sparse_mapping, false},  {"", feature::draft_policy, false},
    {"", feature::chunked_prefill, false}, {"", feature::saved_states, false},
    {"", feature::graph_order, false},     {"", feature::mtp_head, false},
    {"", feature::eagle3_head, false},
};

#endif

}  // namespace

void * in_engine(const char * name) {
    Dl_info engine{};
    // By name: an address in our own tables would have to be known before the engine is there.
    void * known = dlsym(RTLD_DEFAULT, "ggml_backend_dev_count");
    if (known == nullptr || dladdr(known, &engine) == 0) {
        return nullptr;
    }
    void * library = dlopen(engine.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library != nullptr ? dlsym(library, name) : nullptr;
}

bool engine_has(feature wanted) {
    return std::all_of(std::begin(SYMBOLS), std::end(SYMBOLS), [&](const symbol & one) {
        return one.of != wanted || in_engine(one.name) != nullptr;
    });
}

}  // namespace mesh

int ggml_mesh_engine_symbol(size_t index, ggml_mesh_symbol * symbol) {
    if (index >= std::size(mesh::SYMBOLS)) {
        return 1;
    }
    const auto & known = mesh::SYMBOLS[index];
    const auto & feature = mesh::FEATURES[static_cast<size_t>(known.of)];
    *symbol = {known.name, feature.name, feature.without, known.replaced, mesh::in_engine(known.name) != nullptr};
    return 0;
}
