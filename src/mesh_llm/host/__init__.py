"""The plans that this node hosts.

hosting        decides when to bring up, replace or retry a model's plan
decisions      what should run, of each of the model's replicas
plan_run       one plan: leases of its workers, links between them, and engines over all of it
worker_leases  layers that its workers hold in memory
introductions  links between its neighbouring workers
lane           one engine of a plan, over links of its own
lane_group     the engines of one plan
ending_runs    plans that were replaced or failed, until their engines have ended
memory_return  what a model that keeps failing leaves to those of a lower priority
declined_ops   ops that a worker does not compute for its own layers, in words
launch         what the engine child is told for a plan
worker_launch  what a worker child is told
"""
