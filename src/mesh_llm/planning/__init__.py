"""What fits, who hosts, which layers go where, how fast it will be.

Pure: time, memory and the state of the mesh are passed in and answers come out. Nothing here imports
asyncio, socket, time, os or subprocess.

    decide           the plan that should run: keep the current one, or replace it
    proposal         the best plan if nothing ran yet
    snapshot         what one node knows of its mesh at one moment
    plan_inputs      memory, speeds and costs of hops, for all plans over one snapshot
    eligibility      who may take part, and why others may not
    exclusion        the reason for every node without a part
    election         who hosts
    worker_choice    which nodes work for a host
    placement        which of the chosen nodes compute which layers
    lanes            how many engines run one plan
    layer_shares     how many layers each node gets
    cuts             where a model may be cut, and into how many stages
    manual_layers    --tensor-split and --layers
    worker_order     the order of workers
    memory_budget    what a node uses itself, and what it lends
    memory_layout    how layers lie in GPUs and main memory
    fit              how much memory a model needs, and how much context fits
    solo_fit         how a model lies in one machine's GPUs and main memory
    would_fit        whether a model would fit if every node had it
    supposed_machines  machines that are not there, as members of a mesh
    layer_costs      what ranges of layers take and cost
    predict          how fast a plan will be
    experience       what a plan has shown, and what follows for its prediction
    model_speed      what a device can do with the model at hand
    other_models     what other models leave of memory and speed
    making_room      which models have to go or move for another one, and at what price
    giving_way       what becomes of those
    replicas         how often a model runs, and when it has too much to do
    shared_machines  speed of nodes that share a machine
    token_time       where a token's time goes
    alternative      the plan that was not chosen, to compare
    batch_sizes      how many tokens of a prompt the engine takes at once
    speculation      speculative decoding: draft lengths, and what the settings ask for
    backoff          how long a node that failed is left out
"""
