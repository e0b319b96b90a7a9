"""What `mesh-llm bench` measures; the developers' benches, in `bench/` of the repository, use it, too.

mesh_load      a running mesh under load, through its API
mesh_document  what that showed, as a document
grid           node counts by latencies: ours, stock ggml-rpc, the engine alone
grid_document  what that showed, as a document
speculation    with drafts and without, by kind of text
transport      links by kind and message size, here and to a node
transport_far  program: the far end of links on one machine
prompts        prompts that no cache holds
texts          prompts by kind of text
rigs           split engines: ours and stock ggml-rpc, over the same wheel, kernels and delay lines
sides          sides of a comparison: set up, asked in turns, held against the engine alone
rounds         how long something is measured, and in which order
company        other people's work on this machine
facts          what the figures depend on
client         one client for every side
servers        servers that are measured
lifeline       program: become another program that ends with the bench
stock_engine   program: the engine over workers of stock ggml-rpc
stock_worker   program: one such worker
"""
