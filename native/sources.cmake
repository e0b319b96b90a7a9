# What libggml-mesh is made of. In a file of its own: a change of it does not rebuild ggml's backends.
#
#   wire    the protocol between a host and its workers, and what travels in it
#   host    workers as devices of ggml
#   worker  a device of this machine, lent to hosts
#   rules   what a worker demands of a graph before it computes it
#   hooks   functions of the engine that are replaced, and what they decide

set(MESH_SOURCES
    guard.cpp
    wire/delta.cpp wire/graph.cpp wire/inputs.cpp wire/link.cpp wire/trace.cpp
    host/answers.cpp host/client.cpp host/device.cpp host/layers.cpp host/loader_questions.cpp host/registry.cpp
    host/saved_states.cpp host/state_capture.cpp
    worker/command_queue.cpp worker/cpu_runs.cpp worker/deferred_copies.cpp worker/measure.cpp worker/peer_link.cpp
    worker/pushed_activations.cpp worker/selftest.cpp worker/session.cpp worker/store.cpp worker/weights.cpp worker/worker.cpp
    rules/attention.cpp rules/elementwise.cpp rules/hyper_connections.cpp rules/indices.cpp rules/recurrent.cpp rules/rules.cpp rules/supports.cpp
    rules/validate.cpp
    hooks/draft_depth.cpp hooks/draft_policy.cpp hooks/engine_symbols.cpp hooks/file_mapping.cpp hooks/ngram_index.cpp)

# Beside them, what knows more of the engine than ggml.
set(MESH_HOOKS
    hooks/chunked_prefill.cpp hooks/eagle3_head.cpp hooks/graph_order.cpp hooks/layer_devices.cpp hooks/mtp_head.cpp
    hooks/saved_states.cpp hooks/speculative_decoding.cpp)
