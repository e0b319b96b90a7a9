"""The HTTP API of a node: everything llama-server answers, on one port, whoever computes it.

The life of a request:

1. `server` takes the connection (`client_connection`) and reads the headers; `access` refuses strangers.
2. `/health`, `/metrics` and the web page (`chat_page`) are answered here, from `upstream.Serving`, `metrics`
   and this node's own files. `routes` lists what else is offered; `headers` lists what passes either way.
3. A request for text (`text_request`, in one of the `dialects`) is sent as a stream; anything else goes
   to the engine as it came (`delivery`, redacted where the engine reports on itself). What makes
   the engine compute waits for a slot first (`slot_queue`), here or, if the engine is elsewhere, there.
   `engine_choice` asks `Serving` where the engine listens, and `replica_choice` which of several;
   `proxy` takes an `engine_connection` to it from the `connection_pool`.
4. The answer's body goes from the engine's socket to the client's within one callback: `http_framing`
   unwraps and checks it, `answer` notes its events, `answer_writer` wraps them for the client. A client
   that does not keep up pauses the reading of the engine's socket; `stall_timer` bounds every wait.
5. A client that leaves cancels its request, and the engine sees its connection close.
6. When the engine dies, `engine_choice` waits for the next one. As long as the client has received
   nothing, the request is sent again; an answer under way is continued there, joined by `resume_join`.
   What cannot continue is explained: an error body where nothing was sent yet, an error event in an
   open event stream, a broken connection otherwise. Never a clean end.

Other nodes' gateways (`guest`) reach the engine here by `guests`: the same parser, bounds, routes and
queue, but without rewriting (3) and resuming (6), which are theirs.

    server             the API port: connections, who answers what, an orderly end
    shared_port        a second port, for the local network
    share_page         the page behind a guest's address, which leads to the chat
    certificate        a certificate that this machine makes itself
    ports              takes a port, or says why not
    limits             the bounds of one gateway
    access             who may use the API, and who may manage
    keys               API keys with names
    key_usage          what was asked with each key, and its limits
    token_limit        what a key with a limit on tokens may not ask
    token_counts       tokens of a prompt and of an answer, as the engine tells them
    routes             what of the engine's API is offered
    headers            which headers pass
    chat_page          the web page at the API's own address
    client_connection  a client's connection
    request_body       the request's body on its way to the engine
    text_request       a request for text, and how the engine is asked for it
    dialects           the APIs in which clients ask for text
    engine_request     a request as the engine gets it
    slot_queue         the fair queue in front of an engine's slots
    engine_choice      which engine to ask, and which one next
    replica_choice     which of a model's engines, where it runs more than once
    warm_prefixes      which engine has read the beginning of a prompt
    lanes              which of a plan's engines answers a request
    upstream           what the gateway asks of the node behind it
    proxy              sends a request to an engine, and to the next one if that dies
    connection_pool    connections to engines
    engine_connection  one connection to an engine
    http_framing       HTTP/1.1 answers as bytes
    delivery           an engine's answer on its way to the client
    answer             one answer, from however many engines it takes
    answer_writer      the client's end of an answer
    sse                server-sent events as bytes
    resume_cut         where to cut an answer so that another engine can continue it
    resume_replay      has the second engine compute what was said as the first one did
    resume_join        joins the second engine's part to the first one's
    keep_alive         comments for a client that waits
    stall_timer        notices that nothing has happened for too long
    engine_series      the engines' own figures
    engine_errors      the engine's errors, in the client's API
    api_errors         our own errors, in the client's API: the only place that writes one
    model_route        which model a request is for
    router_api         llama-server's router API: load, unload, events
    model_list         lists of models, and one of them
    ollama             what Ollama's API tells of models, and its embeddings
    ollama_models      asks engines for that
    guests             requests of other nodes' gateways
    guest              one such gateway, and for whom it asks
    metrics            counts requests, and logs a line for each
"""
