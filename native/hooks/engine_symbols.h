#pragma once

// Every function of the engine that this library knows by its symbol.
//
// Where this library was loaded before the engine, with global symbols, the engine calls our functions of these names;
// they go on to its own. A C++ symbol spells the parameters, so that a function which takes others now is not found.
// A feature is used only where the engine has all of its symbols; ggml_mesh_engine_symbol says which are missing.

// llama_mmap::llama_mmap(llama_file *, size_t prefetch, bool numa, const ranges & lazy)
#define LLAMA_MMAP "_ZN10llama_mmapC1EP10llama_filembRKSt6vectorISt4pairImmESaIS4_EE"

#define SPECULATIVE_DRAFT "_Z24common_speculative_draftP18common_speculative"
#define SPECULATIVE_ACCEPT "_Z25common_speculative_acceptP18common_speculativeit"
#define SPECULATIVE_BEGIN "_Z24common_speculative_beginP18common_speculativeiRKSt6vectorIiSaIiEE"
#define SPECULATIVE_PROCESS "_Z26common_speculative_processP18common_speculativeRK12common_batch"
#define SPECULATIVE_INIT "_Z23common_speculative_initR25common_params_speculativej"
#define SPECULATIVE_PARAMS "_Z35common_speculative_get_draft_paramsP18common_speculativei"
#define DRAFT_CONTEXT "_ZN30common_speculative_init_result7contextEv"
#define MEMORY_REMOVE "llama_memory_seq_rm"
#define STATE_RESTORE "llama_state_seq_set_data_ext"
#define SAMPLER_INIT "_Z19common_sampler_initPK11llama_modelR22common_params_sampling"
#define SET_SAMPLER "llama_set_sampler"

#define BATCH_SIZE "llama_n_batch"
#define BATCH_CLEAR "_ZN12common_batch5clearEv"
#define STEP "_ZN19server_context_impl12update_slotsEv"
#define FILLING "_ZN19server_context_impl10pre_decodeEv"

#define STATE_SIZE "llama_state_seq_get_size_ext"
#define STATE_SAVE "llama_state_seq_get_data_ext"
#define CHECKPOINT_SAVE "_ZN24common_prompt_checkpoint10update_tgtEP13llama_contextij"
#define CHECKPOINT_LOAD "_ZNK24common_prompt_checkpoint8load_tgtEP13llama_contextij"
#define MEMORY_COPY "llama_memory_seq_cp"

#define SPLIT_GRAPH "ggml_backend_sched_split_graph"

#define SET_NEXTN "_Z26llama_set_embeddings_nextnP13llama_contextbb"
#define NEXTN_STATES "_Z26llama_get_embeddings_nextnP13llama_context"
#define NEXTN_STATE "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"
#define SET_LAYER_INPUTS "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
#define LAYER_INPUTS "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
#define TARGET_LAYERS "_Z28llama_model_target_layer_idsPK11llama_model"
#define TARGET_LAYER_COUNT "_Z30llama_model_target_layer_ids_nPK11llama_model"
#define LAYER_DEVICE "_ZNK11llama_model9dev_layerEi"

namespace mesh {

enum class feature {
    sparse_mapping,
    draft_policy,
    chunked_prefill,
    saved_states,
    graph_order,
    mtp_head,
    eagle3_head
};

// Whether the engine that is loaded has every symbol of a feature.
bool engine_has(feature wanted);

// The engine's own function of a name that may also be ours: looked up in the library that ggml is in.
void * in_engine(const char * name);

// The same, as a pointer that can be called.
template <typename function> void find_in_engine(function & pointer, const char * name) {
    pointer = reinterpret_cast<function>(in_engine(name));
}

}  // namespace mesh
