"""What `mesh-llm bench` measures; the developers' benches, in `bench/` of the repository, use it, too.

rigs          split engines: ours and stock ggml-rpc, over the same wheel, kernels and delay lines
sides         sides of a comparison: set up, asked in turns, held against the engine alone
rounds        how long something is measured, and in which order
company       other people's work on this machine
facts         what the figures depend on
client        one client for every side
servers       servers that are measured
lifeline      program: become another program that ends with the bench
stock_engine  program: the engine over workers of stock ggml-rpc
stock_worker  program: one such worker
"""
