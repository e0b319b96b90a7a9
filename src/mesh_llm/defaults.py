"""Every port, time and limit of mesh-llm, with its reason. Nothing else lives here."""

from __future__ import annotations

# -- the engine ---------------------------------------------------------------------------------

ENGINE_PACKAGE = "xllamacpp"
ENGINE_VERSION = "2026.10.11549"
"""Pinned exactly: native libraries are compiled against this build's private structs."""
ENGINE_SDIST_SHA256 = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
ENGINE_SDIST_ROOT = f"{ENGINE_PACKAGE}-{ENGINE_VERSION}/thirdparty/llama.cpp/"

# -- model files --------------------------------------------------------------------------------

GGUF_ARRAY_LIMIT = 1024
"""Per-layer arrays have at most 512 entries; longer ones are vocabularies."""
GGUF_SHARD_LIMIT = 1024
FINGERPRINT_SAMPLE_BYTES = 4096
"""One page of each stride: what the disk reads anyway for a single byte."""
FINGERPRINT_STRIDE_BYTES = 64 << 20
"""A 50 GB model has some 800 strides and 1,000 tensors: 0.2 s of reads on an SSD."""
INSPECT_TIMEOUT_S = 60.0
"""A cold 50 GB model on a spinning disk needs seconds; a minute means it hangs."""
INSPECT_AT_ONCE = 32
"""Files that one child looks into: its start costs as much as some ten headers."""
INSPECT_LINE_BYTES = 16 << 20
"""What it says of one model: 80 bytes for each tensor, a thousand of them in a large one."""
INSPECT_MEMORY_BYTES = 8 << 30
"""Address space of the child that parses model files: the engine's module, a large vocabulary, no more."""

# -- the gateway --------------------------------------------------------------------------------

API_PORT = 9337
"""Where OpenAI clients find a node; the number that the documents and the agents' settings name."""
API_LISTEN = "127.0.0.1"
"""Loopback: what is open to the network has to be asked for, and needs a key."""
GATEWAY_BODY_LIMIT_BYTES = 256 << 20
"""Dozens of photographs in base64, or a million tokens many times over; no more than a machine can hold."""
GATEWAY_REPLAY_BYTES = 16 << 20
"""Kept to be sent again: every chat with a few photographs; what is larger goes through, once."""
GATEWAY_KEPT_BYTES = 256 << 20
"""Of all requests together; hundreds of long chats, or a dozen albums."""
GATEWAY_EVENT_LIMIT_BYTES = 32 << 20
"""One event; the last of llama-server's own kind repeats the prompt, at worst twice what is kept of one."""
GATEWAY_DOCUMENT_BYTES = 128 << 20
"""Of the events that an answer in one document is put together from: half a million tokens."""
GATEWAY_TRANSCRIPT_BYTES = 32 << 20
"""Of an answer, kept to go on with it elsewhere: some 100,000 tokens as events."""
GATEWAY_RESUME_S = 120.0
"""For the mesh to serve again: long enough to load a large model from disk, short enough for a person."""
GATEWAY_RESUME_TRIES = 4
"""Engines that die of the same request without a word of an answer: it is the request, then."""
GATEWAY_CUT_BACK = 4
"""Events by which an answer is cut earlier than it broke off, to be cut between its own tokens. Each is a
question to the next engine; two are enough behind a blank line."""
GATEWAY_LOOK_S = 0.02
"""Between two looks for the next engine. Asking costs a microsecond, and depends on all that a node knows."""
GATEWAY_GAP_S = 5.0
"""A request is held where a node that serves has nothing to serve with: a successor is being learned of."""
GATEWAY_SAME_ENGINE_S = 0.5
"""Before an engine that broke off is asked again, as long as the node believes in it."""
GATEWAY_DOUBT_S = 0.5
"""To hear of a lost worker after the engine answered 500: it says that to some wrong questions, too."""
GATEWAY_REFUSAL_BYTES = 64 << 10
"""Of an engine's words against a request, read to be said in another way; they are a sentence or two."""
GATEWAY_QUESTION_S = 20.0
"""For an engine to count or render a prompt, the longest one on the slowest machine."""
GATEWAY_BEAT_S = 5.0
"""Without a byte, before a stream gives a sign of life, or twice that: proxies give up after 30 s or more."""
GATEWAY_PREFER_WAIT_S = 600.0
"""The longest that a client may ask to wait for the model: loading the largest takes minutes."""
GATEWAY_HEADER_LIMIT_BYTES = 16 << 10
"""Of a request line or one header: twice what browsers and proxies send at their worst."""
GATEWAY_ANSWER_HEAD_LIMIT_BYTES = 64 << 10
"""Of the engine's answers, all headers together; llama-server's take less than 1 KB."""
GATEWAY_CHUNK_HEAD_LIMIT_BYTES = 4 << 10
"""A chunk's length and extensions that nobody uses."""
GATEWAY_REDACTED_LIMIT_BYTES = 16 << 20
"""Of what the engine tells of itself, read here before it is passed on; a long chat template is 100 KB."""
GATEWAY_HELD_BYTES = 64 << 10
"""Of an answer's body, while its head is on its way to the client; as much as a transport buffers."""
GATEWAY_CONNECT_S = 5.0
"""To a socket on this machine: far more than a busy machine needs, less than a person waits."""
GATEWAY_SILENCE_S = 600.0
"""A long prompt on a slow mesh takes minutes without a byte; after ten nobody is working on it."""
GATEWAY_ENGINE_IDLE_S = 4.0
"""The engine closes a connection after five idle seconds; leaving it first avoids meeting it half closed."""
GATEWAY_CLIENT_IDLE_S = 75.0
"""For a client to send its next request: what web servers usually grant."""
GATEWAY_EXPLAIN_S = 3.0
"""For the node to say why the engine broke off; it promises two."""
GATEWAY_METRICS_S = 2.0
"""The engine answers between two batches; a scrape must not wait for a long one."""
GATEWAY_LINGER_S = 5.0
"""To read on after a refusal, so that a client which sends its whole body first gets to see the reason."""
GATEWAY_STOP_S = 2.0
"""For requests cut short to write their last words before their connections go."""
GATEWAY_RETRY_AFTER_S = 1
"""Engines come back in seconds: a client that asks once a second costs nothing and loses little."""
GATEWAY_QUEUE_LIMIT = 256
"""Requests that wait for one of the engine's slots: those at the end wait for minutes already."""
GATEWAY_QUEUE_PER_ACCOUNT = 128
"""Of them from one node, or from all who came in by one client's token: nobody fills the queue alone."""
GATEWAY_QUEUE_PER_CLIENT = 64
"""Of them from one client: a swarm of agents fits in, and three others like it find room beside them."""
GATEWAY_TURN_WAIT_S = 300.0
"""For a slot: half of GATEWAY_SILENCE_S, which leaves the other half to the prompt."""
GATEWAY_TURN_GUESS_S = 5.0
"""That a turn takes, before one has ended: a short answer on a slow machine."""
GATEWAY_RETRY_AFTER_LIMIT_S = 60
"""Guesses about a queue reach no further, and clients that read the header wait no longer."""
GATEWAY_HEAD_LIMIT_BYTES = 64 << 10
"""Of a request, all headers together: four headers at their limit, a hundred of the usual ones."""
GATEWAY_HEAD_S = 20.0
"""From the first byte of a request's head to its last: it fits into a few packets, on the slowest line."""
GATEWAY_BODY_BYTES_PER_S = 16 << 10
"""The slowest that a body may arrive while others find no room: an old telephone line is faster."""
GATEWAY_BODY_LATE_S = 2.0
"""Behind that pace, before such a connection makes room: a lost packet or two cost less."""
GATEWAY_UPLOAD_LATE_S = 20.0
"""Behind that pace, for a body too large to be read before its turn: a slot waits for it."""
GATEWAY_CONNECTIONS = 512
"""Of clients: all who wait in the queue and as many again; half of the descriptors that a process has."""
GATEWAY_IDLE_CONNECTIONS = 128
"""Of them between two requests: the one that has been idle for longest makes room, as it may at any time."""
GATEWAY_TURNED_AWAY = 32
"""Connections over the limit that are told so; with more at once there is no time for words."""
GATEWAY_TURNED_AWAY_S = 1.0
"""To read why: closed at once, a connection whose request is still arriving loses the words, too."""

# -- child processes ----------------------------------------------------------------------------

CHILD_STOP_GRACE_S = 3.0
"""Between asking a child to end and killing it. Ours end at once; a compiler needs a moment."""
CHILD_STOP_POLL_S = 0.02
CHILD_WRITE_TIMEOUT_S = 10.0
CHILD_LINE_LIMIT_BYTES = 64 << 10
"""Longer lines of a child's output are cut: nobody reads them, and memory is finite."""
CHILD_KEPT_LINES = 60
"""Lines of a child's last words: an assertion with its backtrace fits."""

# -- files and locks ----------------------------------------------------------------------------

UNIX_SOCKET_PATH_BYTES = 100
"""The kernel takes 107 on Linux and 103 on macOS."""
LOCK_POLL_S = 0.2
LOCK_TIMEOUT_S = 45 * 60.0
"""Longer than the slowest build; a GPU's has a limit of its own."""
PACKAGE_TIMEOUT_S = 30 * 60.0
"""100 MB over a very slow line."""

# -- building native libraries ------------------------------------------------------------------

BUILD_TIMEOUT_S = 40 * 60.0
"""The CPU library takes about a minute on two cores; where others want them, too, many times that."""
BUILD_DISK_BYTES = 600_000_000
"""Sources, objects and libraries of the CPU build take half of it."""
GPU_BUILD_TIMEOUT_S = 3 * 3600.0
"""CUDA's takes 282 s on 16 cores of a server (bench/results/gpu-trials.md): over an hour of one of them."""
GPU_BUILD_DISK_BYTES = 3_000_000_000
"""A guess: objects and library of CUDA's build for one kind of GPU, beside the sources."""
GPU_BUILD_JOB_BYTES = 2_000_000_000
"""A guess: what the compiler takes for the largest of ggml's templates."""
BUILD_SHOWN_LINES = 12
"""Of the compiler's output when it fails: the error and its surroundings, on one screen."""
SCRATCH_TRIES = 10
SCRATCH_PAUSE_S = 0.05
"""To remove the folder of a build whose compiler was killed a moment ago, and may still write a file."""

# -- memory -------------------------------------------------------------------------------------

MEMORY_RESERVE_BYTES = 512 << 20
MEMORY_RESERVE_SHARE = 0.03
"""Left to the system and the node itself when a model is fitted: the larger of the two."""
PROMPT_CACHE_LIMIT_BYTES = 8 << 30
"""What the engine keeps of finished prompts in main memory, when there is as much to spare."""

# -- the engine child ---------------------------------------------------------------------------

ENGINE_LOG_VERBOSITY = 4
"""llama.cpp's level that reports buffer sizes and timings; its debug level would log every token."""
ENGINE_LOG_BYTES = 4 << 20
ENGINE_LOG_COUNT = 2
"""Kept beside the current log: enough for the run that failed and the one before."""
ENGINE_LOG_LATE_S = 0.25
"""Lines are gathered for so long: by then the first tokens of what they tell of are out."""
ENGINE_LOG_HELD_BYTES = 64 << 10
ENGINE_BACKOFF_FIRST_S = 0.2
ENGINE_BACKOFF_LAST_S = 30.0
ENGINE_HEALTHY_S = 60.0
"""An engine that lived this long starts anew at the shortest pause."""
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
DRAFT_MAX = 8
"""Tokens guessed at once by a draft model: each takes its time before it is known to be right."""
DEFAULT_SLOTS = 4
"""Requests answered at once: one person, two agents and a spare."""
SLOTS_LIMIT = 256
"""llama.cpp's own limit on sequences."""
CONTEXT_LIMIT = 1 << 27
THREADS_LIMIT = 1024
DRAIN_S = 30.0
"""For answers under way when a node is told to stop; a second Ctrl-C does not wait for them."""
STATUS_ENGINE_S = 0.5
"""For the engine's own figures; `status` answers without them rather than late."""
STATUS_FRESH_S = 0.5
"""How old the engine's figures may be: however many nodes and pages ask, it is asked twice a second."""
STATUS_WATCH_S = 1.0
"""Between two looks of `status --watch`: what a person can follow."""
CONTROL_TIMEOUT_S = 10.0
"""For a running node to answer its own command line."""
STOP_TIMEOUT_S = DRAIN_S + 30.0
"""For `mesh-llm stop` to see the node gone: others take over, it drains, its children end."""
NODE_LOG_BYTES = 4 << 20
NODE_LOG_COUNT = 2
PROGRESS_LINE_S = 5.0
"""Between two lines about the same thing, where nobody draws a bar."""

# -- the demo -----------------------------------------------------------------------------------

DEMO_QUESTION = "Why is the sky blue?"
DEMO_ANSWER_TOKENS = 200
CLUSTER_READY_S = 45 * 60.0
"""The first time a node downloads and builds; each of those has a bound of its own."""
CLUSTER_STOP_S = 15.0
"""For all nodes of a local cluster to drain and end; those that do not are killed."""
CLUSTER_SETTLE_S = 5.0
"""A plan without some of them that nothing changes for so long is the one there will be."""
CLUSTER_POLL_S = 0.05
"""Between two looks at whether they serve together."""

# -- the worker child ---------------------------------------------------------------------------

WORKER_READY_S = 60.0
"""It loads libraries and maps files; a minute means that it hangs."""
WORKER_HAND_OVER_S = 5.0
"""For a worker on this machine to take a descriptor; it does nothing else in that thread."""
WORKER_BEAT_S = 1.0
WORKER_BEATS = 5
"""Unanswered in a row: one that hangs holds up every answer, one that swaps comes back sooner."""
ENGINE_STAGES_S = 1
"""Between two reports of what the workers of a split engine have done."""

# -- the node in its mesh -----------------------------------------------------------------------

MESH_TICK_S = 0.25
"""Between two looks at the clock by the rules of membership, whose shortest period is a second."""
MESH_CONNECT_S = 10.0
"""For a connection to a member: a handshake over a relay on another continent takes one or two."""
MESH_LINKS_PUBLISH_S = 5.0
"""Between two reports of measured delays: each is gossip to everybody, and a look at the plan."""
MESH_METER_S = 1.0
"""Between two looks at the bytes that crossed each connection."""
MESH_RTT_CHANGE = 0.25
MESH_RTT_LEAST_S = 0.0005
"""Less of a change, by share or by time, is noise to a planner."""
LINK_OPEN_S = 10.0
"""For a link to be opened and taken: a few round trips, and a worker that is busy for a moment."""
LEASE_SILENCE_S = 30.0
"""Between two words of a worker that loads: each weight is told of, and one may be a GB on a slow disk."""
PLAN_READY_S = 600.0
"""For an engine to load its own layers, of whatever size, from whatever disk."""
PLAN_CHECK_S = 60.0
"""For the first token through all stages."""
PLAN_TICK_S = 1.0
"""Between two looks at the plan when nothing was heard: pauses end, and barred nodes come back."""
PLAN_GATHER_S = 0.02
"""After a change, before the look at the plan: changes come in flocks."""
PLAN_RETRY_FIRST_S = 0.2
PLAN_RETRY_LAST_S = 30.0
"""Between two attempts to bring a plan up, where no node is to blame."""
PLAN_DRAIN_POLL_S = 0.2
PLAN_DRAIN_S = 300.0
"""For the answers of a replaced engine, which nobody asked to hurry: a long one, on a slow machine."""
PLAN_DRAIN_LEAST_S = 1.0
"""That a replaced engine still takes requests: others hear of its successor within a few round trips."""
REMOTE_ANSWER_S = 2.0
"""For a host to tell of its engine; `status` answers without it rather than late."""
REMOTE_RETRY_S = 0.5
REMOTE_EXPLAIN_POLL_S = 0.1
REMOTE_REMEMBERED = 4
"""Engines of other nodes that requests may still hang on: the one that serves, and those it replaced."""
GUESTS_PER_ACCOUNT = 128
GUESTS_LIMIT = 512
"""Connections to an engine from one other node's gateway, and from all: each has two threads of its own."""
GUEST_CLIENT_CHARACTERS = 64
"""Of the name under which another node's client waits for its turn; they come as 32."""
CLAIMS_MESSAGE_BYTES = 64 << 10
"""Of settings and revocations in one message; JSON takes some more."""
FORWARD_PROOF_S = 10.0
"""For the opener of a forwarded stream to prove who it is: one round trip through a third node."""
FORWARDS_PER_CLIENT = 32
FORWARDS_PER_NODE = 128
FORWARDS_PER_TARGET = 256
"""Streams that a node forwards at once: for one client's invite, for one node, and to one node, which serves
512 of this node's in all."""
OWNER_HEARS_S = 3.0
"""That an owner's start waits for word of other members: connections to those that run take less than one."""
REMEMBERED_LIMIT = 64
"""Members whose signed records a home keeps: one of them that answers leads to all others."""
GUEST_IDLE_S = 15.0
"""For another node's gateway to send a request: it asks for a connection when it has one, and keeps one
for GATEWAY_ENGINE_IDLE_S."""
GUEST_BODY_SILENCE_S = 30.0
"""For more of its body: that gateway has most of it, or passes it on as it comes."""
GUEST_BODY_S = 300.0
"""For all of it: the longest body over a slow line."""
GUEST_BODY_LIMIT_BYTES = 64 << 20
"""Of one request, kept until its turn has come: a dozen photographs."""
GUEST_TOKENIZE_LIMIT_BYTES = 8 << 20
"""Of one whose tokens are counted: a million of them, with room for an image."""
GUEST_TOKENIZES = 1
"""Of these at once: each takes a processor from whoever computes."""
GUEST_KEPT_BYTES = 256 << 20
GUEST_KEPT_PER_ACCOUNT_BYTES = 128 << 20
"""Of all of them, and of one node's or one token's: half, so that nobody takes all the room."""
GUEST_STUCK_S = 120.0
"""Without reading, before its slot is somebody else's: its gateway takes thousands of tokens ahead."""
HAND_OVER_S = 15.0
"""For others to take over from a node that was told to go: weights are resident, links open in a second."""
INVITE_DEFAULT_S = 7 * 86400.0
"""A week: long enough to walk over to the other machine, not for ever."""
# -- membership ---------------------------------------------------------------------------------

MEMBER_PING_S = 1.0
"""Two hundred bytes each way and peer: noticed within seconds, and nobody's data plan."""
MEMBER_HURRY_S = 0.3
"""Without an answer to a ping (twice the usual delay, where that is more): ask again with every tick."""
MEMBER_STALE_S = 1.5
"""Of silence: no longer told to others as heard, before we stop relying on it ourselves."""
MEMBER_SUSPECT_S = 1.9
"""Of silence on a connection: two pings and three hurried ones went unanswered."""
MEMBER_DEAD_S = 2.6
"""Of silence: a tick later it is still less than three seconds after the last word."""
MEMBER_GRACE_S = 0.6
"""From suspicion to death at least, and all of it after a connection was closed: time to refute it."""
MEMBER_VOUCH_S = 0.25
"""After a connection closed: others need a moment to notice the same before their word counts."""
MEMBER_PATIENCE_S = 5.0
"""For a member that is only known by hearsay to be connected, or heard by a neighbour."""
MEMBER_PATIENCE_LIMIT_S = 120.0
"""Patience doubles whenever it answers by gossip: it lives, just not within reach."""
MEMBER_HEARSAY_GRACE_S = 5.0
"""For the answer of such a member to come back through a thousand nodes."""
MEMBER_JUMP_S = 1.5
"""Between two looks at the clock: ticks come every 0.25 s, so we slept, not the others."""
MEMBER_LATE_S = 0.5
"""Between two looks: a tick was late, as others use this machine. What is beyond it is nobody's silence."""
MEMBER_CALM_S = 10.0
"""After a jump: connections may be gone on the other side; time to dial anew before judging anybody."""
MEMBER_SMALL = 16
"""Up to so many members all keep connections to all; beyond it, to ring neighbours and chords."""
MEMBER_NEIGHBOURS = 2
"""On either side of the ring: it stays whole when any one of them dies."""
MEMBER_CHORDS = 2
"""Connections across the ring, per node: a thousand nodes are six hops wide instead of 250."""
MEMBER_SURPLUS_S = 30.0
"""That a connection wanted by neither side is kept, as a changing ring may want it back."""
MEMBER_DIAL_SECOND_S = 1.0
"""The lower id dials first; the other one after this, if nothing came: a NAT may be in the way."""
MEMBER_DIAL_FIRST_S = 2.0
"""Between the first two attempts; doubles from there."""
MEMBER_DIAL_LIMIT_S = 30.0
"""Between attempts at a lost member: how long a mended network may stay unnoticed at the worst."""
MEMBER_DIALS_PER_TICK = 4
"""Sixteen a second: a remembered mesh is tried quickly, and without a storm."""
MEMBER_TOMBSTONE_S = 3600.0
"""Old news about a dead member goes round for seconds; an hour also outlasts a nap."""
MEMBER_REMEMBER_S = 7 * 86400.0
"""Afterwards its address is still tried now and then: networks stay broken over a holiday."""
MEMBER_KNOWN_LIMIT = 4096
"""Members, tombstones and remembered ones together: four times the largest mesh that was simulated."""
MEMBER_MESSAGE_BYTES = 64 << 10
"""Of one message as JSON."""
MEMBER_FACTS_BYTES = 40 << 10
"""Of one node's facts as JSON: a plan over a hundred nodes fits, and the rest of a message, too."""
MEMBER_SYNC_S = 2.0
"""Between two comparisons of everything with the same peer: changes are on their way for a while."""
MEMBER_BUCKETS = 64
"""Parts of a comparison: sixteen of a thousand members in each."""
MEMBER_FLUSH_S = 0.05
"""News leave at once, and those that follow within this leave together."""
MEMBER_RTT_SAMPLES = 9
"""Whose median counts: up to four outliers do no harm, and a change shows within five seconds."""
MEMBER_RTT_LEAST = 3
"""Before that nothing is said: the first samples of a connection are its handshake's."""
MEMBER_REFUTE_S = 0.5
"""Between two answers to those who call this node dead, in the long run."""
MEMBER_REFUTATIONS = 32
"""At once: after a restart each of 28 neighbours may doubt it for itself."""
MEMBER_VISITOR_S = 30.0
"""Of silence after which a lite client's connection is closed; a closed lid may open again."""
MEMBER_CLAIMS = 3
"""Foreign claims to our id before we believe in a copy; a restart with a clock set back causes one."""
MEMBER_CLAIMS_SENIOR = 6
"""The same for the one that was there first, so that the copy ends and not the original."""
MEMBER_CLAIMS_S = 60.0
"""Within which they have to come."""
# -- planning -----------------------------------------------------------------------------------

USEFUL_CONTEXT = 4096
"""Tokens per slot that a conversation needs: rather than less, one more node takes part."""
CLEARLY_FASTER = 1.2
"""A running plan is replaced for this much: a restart costs everybody a pause."""
DELAY_LESS = 0.5
DELAY_MORE = 1.5
"""How far delays stray while nothing changes: a running plan is judged by less, its challenger by more."""
HOP_LOCAL_S = 0.0001
"""Above the delay, for each hop: measured, 3 workers on one machine cost 0.5 ms in 4 hops."""
HOP_TCP_S = 0.0002
"""The same, and the network's interrupts."""
HOP_QUIC_S = 0.0008
"""What the splice between a QUIC stream and a worker may add."""
HOP_RELAY_S = 0.0015
"""One more process on the way, that waits for its turn."""
LOCAL_BYTES_PER_S = 2e9
QUIC_BYTES_PER_S = 1e8
TCP_BYTES_PER_S = 1.1e8
RELAY_BYTES_PER_S = 5e6
"""That a link is taken to carry, by its kind: a unix socket, Gigabit Ethernet, a line at home."""
UNKNOWN_RTT_S = 0.03
"""Of links that nobody has measured: between a network at home and a far one, so that known near ones win."""
SLOW_LINK_RTT_S = 0.01
"""Where a link rather than a device is to blame for a slow plan: networks at home stay below it."""
SPILL_BYTES_PER_S = 40e9
"""At which layers that no GPU holds are read: two channels of memory. The speed of a node is its GPU's."""
ENGINE_STEP_S = 0.25
"""That the engine reads prompts for between two looks at everybody: readers notice a longer stall."""
PROMPT_TOKENS = 512
"""Of the prompt that the time to the first token is foretold for."""
LONG_PROMPT_TOKENS = 4096
"""Of the prompt that the engine's steps are made for: what an agent sends, or some pages of text."""
PROMPT_MICRO_BATCH = 128
"""Tokens that a split model works on at once: small enough that its stages overlap."""
PLAN_SEARCH_STEPS = 1000
"""Nodes looked at, over all sets tried for a plan: 50 ms on a slow core, and all sets of a small mesh."""
PLAN_HOSTS_TRIED = 3
"""For each engine version: who is elected nearly always can; a tiny one that its owner prefers may not."""
RETRY_FIRST_S = 2.0
RETRY_LAST_S = 60.0
"""That a node which failed has no part in plans, doubled each time; never more than a person waits."""
RETRY_FORGET_S = 300.0
"""A node that was well for so long starts anew at the shortest pause."""
# -- the speed of this machine --------------------------------------------------------------------

MEASURE_TIMEOUT_S = 30.0
"""It takes two seconds, eight where others use the processor, too; loading the engine one more."""
MEASURE_WAIT_S = 120.0
"""For other nodes on this machine, which measure one at a time; a plan can do without a speed for so long."""
MEASURE_ATTEMPTS = 3
"""One start after the other. The first may fail for want of memory at that moment, or be disturbed."""
MEASURE_MEMORY_SHARE = 0.25
"""Of the main memory that is free: others may be about to load a model."""
# -- nodes among themselves ---------------------------------------------------------------------

IROH_VERSION = "1.2.0"
"""Pinned exactly: a piece of its generated code is replaced."""
PROTOCOL_VERSION = 2
"""What nodes say to each other. Raised when an older node would misunderstand a newer one."""
PROTOCOL_OLDEST = 2
"""That is still understood: neighbouring versions work together."""
ALPN = b"mesh-llm/1"
INVITE_LIFETIME_S = 7 * 24 * 3600
"""An invite that nobody used within a week was forgotten, not delayed."""
INVITES_LIMIT = 1000
"""Given out by one node; more means that something makes them in a loop."""
INVITE_NODES = 64
"""Ids that are kept of those who came in by an invite."""
CLIENTS_PER_INVITE = 16
"""Connected at once to one node: a token for a family's devices, not for a thousand invented ids."""
INVITE_ADDRESSES = 4
"""In a token: an interface or two, for both kinds of IP; each costs ten to twenty-six characters."""
INVITE_TEXT_LIMIT = 4096
CREDENTIAL_CHAIN_LIMIT = 8
"""Grants from the creator down to a member: people invite people, but not over that many corners."""
REVOKED_PER_NODE = 256
"""Invites that others keep as revoked on one node's word: a fourth of those that it can have open."""
REVOKED_PER_BRANCH = 512
"""And on the word of all together who came in by one of the creator's own invites."""
REVOKED_PER_OWNER = 512
"""And on an owner's that did not create the mesh."""
REVOKED_IN_ALL = 1536
"""Of a kilobyte and a half at the most: all of them are told to each node that connects, in one go."""
SETTINGS_BYTES = 32 << 10
"""Of an owner's settings, as they are signed: layers by name for hundreds of nodes."""
SETTINGS_TOLD = 8
"""Owners whose settings are told: those in force, and the next in line should these be revoked."""
OWNERS_LIMIT = 64
"""Whose settings are kept."""
CLAIMS_CHECKED = 4096
"""Credentials that need not be checked again: of four times the largest mesh that was simulated."""
FRAME_LIMIT_BYTES = 256 << 10
"""A view of a hundred nodes takes a quarter of it."""
EXPELLED_READ_S = 2.0
"""For one who was expelled to read why, before its connection is closed."""
WELCOME_BYTES = 128 << 10
"""Of the records that one who joins is told: others follow by gossip."""
HANDSHAKE_FRAME_LIMIT_BYTES = 16 << 10
"""Before admission: a full chain of grants takes 3 KB."""
STREAM_HEADER_LIMIT_BYTES = 64 << 10
"""What a stream says about itself first: a request's headers at their worst."""
HANDSHAKE_S = 5.0
"""For a stranger to prove itself: three round trips over the slowest line."""
HANDSHAKES_LIMIT = 32
"""Strangers at once: as many as a rack that starts together, and no more memory than they are worth."""
HANDSHAKE_EVICT_S = 0.5
"""A handshake this old makes room for a new one when all places are taken."""
CONNECT_S = 10.0
"""To a known member: direct paths answer in milliseconds, a relay in a second or two."""
JOIN_S = 20.0
"""Long enough for a relay and for a busy inviter, short enough for a person who waits."""
JOIN_ATTEMPT_S = 6.0
"""QUIC asks an inviter that does not answer after 1, 2, 4 … seconds; starting afresh asks more often."""
JOIN_RETRY_S = 0.5
PEERS_LIMIT = 1024
"""Ten times the mesh that this is meant for."""
PEER_QUEUE_FRAMES = 1024
PEER_QUEUE_BYTES = 4 << 20
"""Control messages that wait to be sent. A peer that far behind is not reading any more."""
PEER_STREAMS_LIMIT = 512
"""Opened by one peer at once: all its requests and links."""
STREAM_HEADER_S = 10.0
"""For a stream that was opened to say what it is for."""
STREAM_RESET_S = 2.0
NETWORK_CLOSE_S = 1.0
"""For last words to reach the peers: they leave at once, and one that is dead does not hold up the end."""
NETWORK_TASKS_S = 5.0
"""For whoever serves a stream to let go of it; far more than it takes."""
ADDRESS_POLL_S = 1.0
"""Between two looks at this node's own addresses, which change with its networks."""
FAILED_PER_NODE = 5.0
FAILED_PER_NODE_REFILL_S = 10.0
"""A person mistypes five times, then once in ten seconds."""
FAILED_OVERALL = 100.0
FAILED_OVERALL_REFILL_S = 0.02
"""Wrong tokens from ever new ids: fifty a second take a sixth of a core, and leave the rest to members."""

# -- data links ---------------------------------------------------------------------------------

SPLICE_CHUNK_BYTES = 256 << 10
"""The most that is copied at once: about what a unix socket holds. Each direction buffers no more."""
SPLICE_FIRST_READ_BYTES = 16 << 10
"""Of a stream: iroh clears what it is asked for, whatever arrives. Reads that came back full ask for more."""
SPLICE_ABANDON_S = 1.0
"""To tell the other side that a stream was given up; it is told by the end of the connection otherwise."""
LINK_TICKET_BYTES = 32
"""Of a one-time secret that lets one link in."""
LINK_KNOCK_S = 5.0
"""For a knock to prove itself: two round trips, on a slow line and a busy machine."""
LINK_EXPECT_S = 30.0
"""For a link that was agreed on to arrive: the other side has to be told, and may have to try again."""
LINK_EXPECTED_LIMIT = 256
"""Links waited for at once: a plan over a hundred nodes has two for each."""
LINK_ADDRESSES_LIMIT = 8
"""Of one machine, at which plain TCP links arrive: its interfaces, and those that changed meanwhile."""
LINK_KNOCKS_LIMIT = 32
"""Unproven connections at a door, by kind; one more, and the oldest goes. Honest ones take milliseconds."""
# -- models from servers ------------------------------------------------------------------------

DOWNLOAD_PARALLEL = 4
"""Files at once: servers grant a connection only so much, and more than these only take from each other."""
DOWNLOAD_BATCH_BYTES = 1 << 20
"""Hashed and written at a time: fewer turns between threads than packets."""
DOWNLOAD_BATCHES = 4
"""Of a file that wait for the disk; beyond them the server waits, too, and memory stays flat."""
DOWNLOAD_CONNECT_S = 10.0
"""For a connection: a server that is there takes a second."""
DOWNLOAD_STALL_S = 30.0
"""Without a byte for this long a connection is given up (HF_HUB_DOWNLOAD_TIMEOUT changes it)."""
DOWNLOAD_LEAST_BYTES_S = 1 << 10
"""Over the same time, in a second: slower, even a small model would take days."""
DOWNLOAD_TRIES = 5
"""After a failure, before it is said: with their pauses half a minute, in which a server restarts."""
DOWNLOAD_PAUSE_S = 1.0
"""Before the first of them (MESH_LLM_DOWNLOAD_PAUSE_S changes it); each further one waits twice as long."""
DOWNLOAD_PAUSE_LIMIT_S = 16.0
DOWNLOAD_WAIT_LIMIT_S = 60.0
"""That a server may ask for (Retry-After): who is to wait longer is better told."""
DOWNLOAD_GAIN_BYTES = 1 << 20
"""After so many the tries begin anew: a line that breaks every minute gets there, one byte each time not."""
DOWNLOAD_RANGE_BYTES = 16 << 30
"""Asked for at once: the hub's storage does not give out more than 50 GB in one answer."""
DOWNLOAD_TURNS = 3
"""A file may change on the server while it is fetched, but not for ever."""
HUB_ANSWER_S = 15.0
"""For a list of files: the largest repositories have thousands."""

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
FETCH_MANIFEST_S = 60 * 60.0
"""A source hashes its files the first time it is asked: 700 GB from an SSD in three quarters of an hour."""
FETCH_BEATS = 2000
"""Signs of life of a source that hashes: more than twice as many as it sends in FETCH_MANIFEST_S."""
FETCH_STALL_S = 30.0
"""Without enough bytes for this long the next peer is asked; a lost Wi-Fi comes back sooner."""
FETCH_LEAST_BYTES = 512 << 10
"""That have to come in FETCH_STALL_S: at half that pace a small model would take days."""
FETCH_TRIES = 3
"""Of one source, without a byte more than before: after that its node is asked no more."""
FETCH_FAILURES = 100
"""Of all sources together: a fetch that only ever breaks off ends, and keeps what it has."""
FETCH_PAUSE_S = 1.0
"""Before a source is tried again: a peer that restarts needs about as long."""
FETCH_SPARE_BYTES = 256 << 20
"""Left on the disk by a fetched model: a full disk stops more than this program."""
FETCH_KEEP_S = 14 * 24 * 3600.0
"""What a broken-off fetch has is kept for a fortnight: long enough for a holiday, not for ever."""
FETCH_NAME_LIMIT = 120
"""Of a fetched file's name, in characters, without numbering: file systems take 255 bytes."""
OFFER_STREAMS = 4
"""Files sent at once: further peers are told to come again, or ask another one."""
OFFER_BUSY_BYTES_PER_S = 8e6
"""To all peers while answers are under way: a fifteenth of a gigabit line, less than fast Wi-Fi carries."""
OFFER_BEAT_S = 5.0
"""Between two signs of life of a source that is still hashing."""
FAILED_PER_SOURCE = 20.0
FAILED_PER_SOURCE_REFILL_S = 1.0
"""From one IP address, which may be a whole office's, while wrong tokens pour in."""
FAILED_KEYS_LIMIT = 1024
"""Nodes and sources that are remembered for it."""
# -- the relay server ---------------------------------------------------------------------------

RELAY_LISTEN = "127.0.0.1:3340"
"""Loopback, as for the API: what is open to the network has to be asked for. The port is nobody else's."""
RELAY_FRAME_LIMIT_BYTES = 1 << 20
"""Of a WebSocket message: the protocol's own limit."""
RELAY_PACKET_LIMIT_BYTES = 64 << 10
"""Of a message with datagrams, after its kind: an endpoint breaks with a relay that delivers a longer one."""
RELAY_CLIENTS = 512
"""Five meshes of a hundred nodes; a core relays for them what a fast line carries."""
RELAY_CLIENTS_SPARE = 64
"""Connections beyond those of clients: handshakes under way, checks whether the relay is there."""
RELAY_PER_ADDRESS = 64
"""A household or an office behind one address, each node with a connection and another that replaces it."""
RELAY_ARRIVALS_S = 4
"""New connections from an address in a second, for each that it may have: a signature takes 0.2 ms."""
RELAY_SOURCES = 4096
"""Addresses whose arrivals are remembered."""
RELAY_CLIENT_BYTES_S = 32e6
"""A quarter of a gigabit: no activation waits for it, and one client cannot take a whole core."""
RELAY_MESSAGE_COST_BYTES = 1 << 10
"""What a message costs its sender at least: passing on a small one is as much work as a large one."""
RELAY_QUEUE_BYTES = 512 << 10
"""A fast line's worth for the time of a round trip; 512 clients that do not read take 256 MB at the worst."""
RELAY_HANDSHAKE_S = 10.0
"""To be let in after connecting: three round trips, and a slow line."""
RELAY_PING_S = 15.0
"""Of silence, before the relay asks: more often than a NAT forgets."""
RELAY_DEAD_S = 40.0
"""Of silence, or without reading anything: two questions were not answered."""
RELAY_CONTACTS = 1024
"""Ids that a client has written to, who are told when it goes; ten times a mesh."""
RELAY_SAME_ID = 4
"""Connections with one id: a node that came back before its old ones were missed, a cloned home or two."""
RELAY_STOP_S = 2.0
"""For clients to take the relay's goodbye."""
RELAY_TOKEN_CHARACTERS = 255
"""It travels in invites, after one byte that holds its length."""

# -- following the mesh's settings --------------------------------------------------------------

FOLLOW_RETRY_S = 10.0
"""After a model that the mesh changed to could not be fetched: whoever has it may be on its way back."""
SOURCE_KNOWN_S = 10.0
"""For one who has just come in to hear of a member that has the model: gossip takes a second or two."""

# -- other programs' model files -----------------------------------------------------------------

STORE_ENTRIES = 100_000
"""Files and folders looked at in one store: a hundred times what a collector has, and half a second."""
STORE_DEPTH = 8
"""Folders inside each other, below a store's own: publisher, repository and quantisation make three."""
STORE_SKIPPED = 1000
"""Reasons kept of one store: nobody reads more, and a folder may be full of damaged files."""
OLLAMA_MANIFEST_BYTES = 1 << 20
"""Real ones have about one kilobyte."""
OLLAMA_LAYERS = 4096
"""Of one manifest: five in practice, some hundreds where each tensor is one."""
HEADERS_KEPT = 2000
"""Headers in the cache: ten times what a collector has, some 3 KB each."""
HEADERS_BYTES = 64 << 20
"""Of that cache; what is larger was not written by us."""
# -- the console --------------------------------------------------------------------------------

CONSOLE_PORT = 3131
"""The number that the documents name."""
CONSOLE_TICK_S = 1.0
"""Between two looks at the node while somebody watches: what a person can follow."""
CONSOLE_SAMPLE_S = 2.0
"""Between two points of the curves."""
CONSOLE_SAMPLES = 300
"""Ten minutes of them."""
CONSOLE_EVENTS = 100
"""Kept to be shown: what happened in a busy hour. A hundred lines take 20 KB."""
CONSOLE_PROGRESS = 16
"""Kept to be shown, by what it is about; more does not happen at once."""
CONSOLE_WATCHERS = 64
"""Pages and programs that follow one node: a screen in every room."""
CONSOLE_CONNECTIONS = 256
"""Of all of them, idle ones included: some for each, and a quarter of the descriptors that a process has."""
CONSOLE_BEHIND_BYTES = 2 << 20
"""That wait for one who follows: half a minute of a large mesh. Who is further behind starts afresh."""
CONSOLE_BEHIND_S = 30.0
"""For one who follows to take what was written; a sleeping laptop does not."""
CONSOLE_BEAT_S = 10.0
"""Between two signs of life in a stream in which nothing happens."""
CONSOLE_BODY_LIMIT_BYTES = 64 << 10
"""Of a management call: a few fields."""
CONSOLE_STOP_S = 1.0
"""For connections to end with the node."""
CONSOLE_CHATS = 32
"""Answers under way for all pages together; the API's own queue is shorter."""
CONSOLE_CONNECT_S = 5.0
"""To the node's own API, in the same process."""
HISTORY_LIMIT_BYTES = 1 << 20
"""Of what a host tells of its engine and of the last minutes, over a hundred nodes."""
REMARK_AGAIN_S = 10.0
"""Before the same is noted again: a client that is refused comes back many times a second."""
# -- terminal and agents -------------------------------------------------------------------------

AGENT_CONFIG_BYTES = 4 << 20
"""An agent's config file is a few kilobytes; what is larger was written by something else."""
LIVE_REDRAW_S = 1.0
"""Between two looks of the live view at its node: what a person can follow, and next to no work."""
LIVE_PROGRESS_S = 0.25
"""Between two pictures of a bar that moves."""
LIVE_WATCH_EVENTS = 5
"""Last events below the picture of `status --watch`; a node's own terminal has them all above it."""
FEED_FRAME_BYTES = 8 << 20
"""One frame of a node's events; the first holds a hundred nodes and an hour of samples, some 100 KB."""
TERMINAL_PENDING_BYTES = 256 << 10
"""Kept for a terminal that does not take it (a frozen window, a lost ssh session): thousands of lines."""
TERMINAL_LAST_S = 0.5
"""For a terminal to take the last lines at the end: it does at once, or it is stuck."""
