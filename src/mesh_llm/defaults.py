"""Ports, times and limits that several modules need, with their reasons; others live beside their user."""

from __future__ import annotations

# -- the engine ---------------------------------------------------------------------------------

ENGINE_PACKAGE = "xllamacpp"
ENGINE_VERSION = "2026.10.11549"
"""Pinned exactly: native libraries are compiled against this build's private structs."""

# -- model files --------------------------------------------------------------------------------

GGUF_SHARD_LIMIT = 1024
FINGERPRINT_SAMPLE_BYTES = 4096
"""One page of each stride: what the disk reads anyway for a single byte."""
FINGERPRINT_STRIDE_BYTES = 64 << 20
"""A 50 GB model has some 800 strides and 1,000 tensors: 0.2 s of reads on an SSD."""
INSPECT_LINE_BYTES = 16 << 20
"""What its child says of one model: 80 bytes for each tensor, a thousand of them in a large one."""
INSPECT_TIMEOUT_S = 60.0
"""A cold 50 GB model on a spinning disk needs seconds; a minute means it hangs."""
INSPECT_AT_ONCE = 32
"""Files that one child looks into: its start costs as much as some ten headers."""

# -- the gateway --------------------------------------------------------------------------------

API_PORT = 9337
SHARE_PORT = 9338
SHARE_LIFETIME_S = 86400.0
"""Of a guest's key, where nobody says."""
"""Where OpenAI clients find a node; the number that the documents and the agents' settings name."""
API_LISTEN = "127.0.0.1"
"""Loopback: what is open to the network has to be asked for, and needs a key."""
GATEWAY_REDACTED_LIMIT_BYTES = 16 << 20
"""Of what the engine tells of itself, read here before it is passed on; a long chat template is 100 KB."""
GATEWAY_EXPLAIN_S = 3.0
"""For the node to say why the engine broke off; it promises two."""
GATEWAY_STOP_S = 2.0
"""For requests cut short to write their last words before their connections go."""

# -- child processes ----------------------------------------------------------------------------

CHILD_STOP_GRACE_S = 3.0
"""Between asking a child to end and killing it. Ours end at once; a compiler needs a moment."""

# -- files and locks ----------------------------------------------------------------------------

LOCK_POLL_S = 0.2
LOCK_TIMEOUT_S = 45 * 60.0
"""Longer than the slowest build; a GPU's has a limit of its own."""

# -- the engine child ---------------------------------------------------------------------------

ENGINE_LOG_VERBOSITY = 4
"""llama.cpp's level that reports buffer sizes and timings; its debug level would log every token."""
ENGINE_LOG_HELD_BYTES = 64 << 10
ENGINE_BACKOFF_FIRST_S = 0.2
ENGINE_BACKOFF_LAST_S = 30.0
ENGINE_HEALTHY_S = 60.0
"""An engine that lived this long starts anew at the shortest pause."""
ENGINE_SETTLED_S = 5.0
"""One that ends sooner, although it was ready, counts as one that did not start: pauses grow."""
ENGINE_EXPLAIN_S = 2.0
"""Between a connection that breaks and the child's exit status lie milliseconds, a core dump at most."""

# -- models -------------------------------------------------------------------------------------

DEFAULT_MODEL = "smollm2"
"""Small enough for any machine and any line; on the package index, so that it needs no model hub."""
COPY_CHUNK_BYTES = 4 << 20

# -- a node -------------------------------------------------------------------------------------

GUESS_TEXT_MAX = 24
"""Tokens guessed at once by what stood in the text before. Each step has room for their logits; of a longer
guess the last ones are seldom right, and a step over links grows with it."""
MTP_DRAFT_MAX = 3
"""Tokens guessed at once by a model's own layer for further tokens (MTP), which was trained for one. Of some
recurrent models the states of as many tokens are kept, to go back to."""
DRAFT_MAX = 8
"""Tokens guessed at once by a draft model: each takes its time before it is known to be right."""
DEFAULT_SLOTS = 4
"""Requests answered at once: one person, two agents and a spare."""
CONTEXT_LIMIT = 1 << 27
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Of cached keys and values, by llama.cpp's names."""
REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")
"""What becomes of the thoughts in an answer, by llama.cpp's names."""
THREADS_LIMIT = 1024
DRAIN_S = 30.0
"""For answers under way when a node is told to stop; a second Ctrl-C does not wait for them."""
CONTROL_TIMEOUT_S = 10.0
"""For a running node to answer its own command line."""
NODE_LOG_BYTES = 4 << 20
NODE_LOG_COUNT = 2
PROGRESS_LINE_S = 5.0
"""Between two lines about the same thing, where nobody draws a bar."""

# -- the demo -----------------------------------------------------------------------------------

DEMO_QUESTION = "Why is the sky blue?"
DEMO_ANSWER_TOKENS = 200
CLUSTER_READY_S = 45 * 60.0
"""The first time a node downloads and builds; each of those has a bound of its own."""

# -- the worker child ---------------------------------------------------------------------------

WORKER_HAND_OVER_S = 5.0
"""For a worker on this machine to take a descriptor; it does nothing else in that thread."""
ENGINE_STAGES_S = 1
"""Between two reports of what the workers of a split engine have done."""

# -- the node in its mesh -----------------------------------------------------------------------

LEASE_SILENCE_S = 30.0
"""Between two words of a worker that loads: each weight is told of, and one may be a GB on a slow disk."""
LEASE_LOADS_S, LEASE_FETCHES_S = 300.0, 900.0
"""For each hundredth of its layers, and for each thousandth that it has to fetch first."""
PLAN_READY_S = 600.0
"""For an engine to load its own layers, of whatever size, from whatever disk."""
PLAN_DRAIN_POLL_S = 0.2
PLAN_DRAIN_S = 300.0
"""For the answers of a replaced engine, which nobody asked to hurry: a long one, on a slow machine."""
GUESTS_PER_ACCOUNT = 128
GUESTS_LIMIT = 512
"""Connections to an engine from one other node's gateway, and from all: each has two threads of its own."""
REMEMBERED_LIMIT = 64
"""Members whose signed records a home keeps: one of them that answers leads to all others."""
HAND_OVER_S = 15.0
"""For others to take over from a node that was told to go: weights are resident, links open in a second."""

# -- membership ---------------------------------------------------------------------------------

MEMBER_KNOWN_LIMIT = 16_384
"""Members, tombstones and remembered ones together: ten thousand, and those who went within an hour."""
MEMBER_BUCKETS = 64
"""Parts of a comparison: sixteen of a thousand members in each."""

# -- planning -----------------------------------------------------------------------------------

USEFUL_CONTEXT = 4096
"""Tokens per slot that a conversation needs: rather than less, one more node takes part."""
CLEARLY_FASTER = 1.2
"""A running plan is replaced for this much: a restart costs everybody a pause."""
HOP_LOCAL_S = 0.0001
"""Above the delay, for each hop: measured, 3 workers on one machine cost 0.5 ms in 4 hops."""
SPILL_BYTES_PER_S = 40e9
"""At which layers that no GPU holds are read: two channels of memory. The speed of a node is its GPU's."""
ENGINE_STEP_S = 0.25
"""That the engine reads prompts for between two looks at everybody: readers notice a longer stall."""
STATE_LIMIT_BYTES = 8 << 30
"""Of saved states on one worker, when it has twice as much to spare."""
PROMPT_TOKENS = 512
"""Of the prompt that the time to the first token is foretold for."""
PROMPT_MICRO_BATCH = 128
"""Tokens that a split model works on at once: small enough that its stages overlap."""
PLAN_SEARCH_STEPS = 1000
"""Nodes looked at, over all sets tried for a plan: 50 ms on a slow core, and all sets of a small mesh."""

# -- the speed of this machine --------------------------------------------------------------------

MEASURE_TIMEOUT_S = 30.0
"""It takes two seconds, eight where others use the processor, too; loading the engine one more."""
KERNELS_LIMIT = 24
"""That a device measures, and tells, of one model: those that take most of a token come first."""
MEASURE_ATTEMPTS = 3
"""One start after the other. The first may fail for want of memory at that moment, or be disturbed."""

# -- nodes among themselves ---------------------------------------------------------------------

ALPN = b"mesh-llm/1"
PROTOCOL_VERSION = 2
"""What nodes say to each other. Raised when an older node would misunderstand a newer one."""
INVITE_TEXT_LIMIT = 4096
CREDENTIAL_CHAIN_LIMIT = 8
"""Grants from the creator down to a member: people invite people, but not over that many corners."""
CLAIMS_CHECKED = 4096
"""Credentials that need not be checked again: of four times the largest mesh that was simulated."""
FRAME_LIMIT_BYTES = 256 << 10
"""A view of a hundred nodes takes a quarter of it."""
HANDSHAKE_S = 5.0
"""For a stranger to prove itself: three round trips over the slowest line."""
HANDSHAKES_LIMIT = 32
"""Strangers at once: as many as a rack that starts together, and no more memory than they are worth."""
CONNECT_S = 10.0
"""To a known member: direct paths answer in milliseconds, a relay in a second or two."""
JOIN_RETRY_S = 0.5
PEERS_LIMIT = 1024
"""Ten times the mesh that this is meant for."""
STREAM_RESET_S = 2.0
NETWORK_CLOSE_S = 1.0
"""For last words to reach the peers: they leave at once, and one that is dead does not hold up the end."""

# -- data links ---------------------------------------------------------------------------------

LINK_TICKET_BYTES = 32
"""Of a one-time secret that lets one link in."""

# -- models from peers --------------------------------------------------------------------------

FETCH_CHUNK_BYTES = 256 << 10
"""Sent and written at a time: an answer never waits long behind it, and a thread has enough to do."""
FETCH_PIECE_BYTES = 8 << 20
"""Hashed as one: what a cut or a damaged byte costs, and what some layers bring along at each end."""
FETCH_PIECE_LIMIT = 1 << 18
"""Of a model: 2 TB of pieces, and a list of hashes that fits in FETCH_MANIFEST_BYTES."""
FETCH_SMALLEST_PIECE_BYTES = 4 << 10
FETCH_LARGEST_PIECE_BYTES = 1 << 30
FETCH_SIZE_LIMIT_BYTES = FETCH_PIECE_BYTES * FETCH_PIECE_LIMIT
FETCH_MANIFEST_BYTES = 20 << 20
"""All hashes of the largest model in hexadecimal digits, and a thousand file names."""
FETCH_STALL_S = 30.0
"""Without enough bytes for this long the next peer is asked; a lost Wi-Fi comes back sooner."""
FETCH_SPARE_BYTES = 256 << 20
"""Left on the disk by a fetched model: a full disk stops more than this program."""

# -- the relay server ---------------------------------------------------------------------------

RELAY_PACKET_LIMIT_BYTES = 64 << 10
"""Of a message with datagrams, after its kind: an endpoint breaks with a relay that delivers a longer one."""
RELAY_CLIENTS = 512
"""Five meshes of a hundred nodes; a core relays for them what a fast line carries."""
RELAY_CLIENTS_SPARE = 64
"""Connections beyond those of clients: handshakes under way, checks whether the relay is there."""
RELAY_PER_ADDRESS = 64
"""A household or an office behind one address, each node with a connection and another that replaces it."""
RELAY_CLIENT_BYTES_S = 32e6
"""A quarter of a gigabit: no activation waits for it, and one client cannot take a whole core."""
RELAY_STOP_S = 2.0
"""For clients to take the relay's goodbye."""

# -- other programs' model files -----------------------------------------------------------------

STORE_DEPTH = 8
"""Folders inside each other, below a store's own: publisher, repository and quantisation make three."""
HEADERS_KEPT = 2000
"""Headers in the cache: ten times what a collector has, some 3 KB each."""

# -- the console --------------------------------------------------------------------------------

CONSOLE_SAMPLE_S = 2.0
"""Between two points of the curves."""
CONSOLE_SAMPLES = 300
"""Ten minutes of them."""
CONSOLE_BEAT_S = 10.0
"""Between two signs of life in a stream in which nothing happens."""
CONSOLE_BODY_LIMIT_BYTES = 64 << 10
"""Of a management call: a few fields."""

# -- terminal and agents -------------------------------------------------------------------------

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""In the names of a mixture's experts, as llama.cpp's --cpu-moe has it (common.h)."""
