"""The HTTP front of a node: everything llama-server answers, on one port, whoever computes it.

The life of a request:

1. `server` takes the connection (`client_connection`) and reads the headers; `access` refuses strangers.
2. `/health` and `/metrics` are answered here, from `upstream.Serving` and `metrics`. What else is
   offered is the table in `routes`; `headers` lists what passes either way.
3. A request for text (`text_request`, in one of the `dialects`) is asked for as a stream;
   anything else goes to the engine as it came (`delivery`, and `redaction` where the engine tells of
   itself). What makes the engine compute waits for its
   turn first (`slot_queue`), here or, if the engine is elsewhere, there. `engine_choice` asks `Serving`
   where the engine listens, `proxy` takes an `engine_connection` to it from the `connection_pool`.
4. The answer's body goes from the engine's socket to the client's within one callback:
   `http_framing` unwraps and checks it, `answer` notes its events, `answer_writer` wraps them for the
   client. A client that does not keep up pauses the reading of the engine's socket;
   `stall_timer` bounds every wait.
5. A client that leaves cancels its request, and the engine sees its connection close.
6. When the engine dies, `engine_choice` waits for the next one. As long as the client has heard
   nothing, the request is sent again; an answer under way goes on there, joined by `resume_join`.
   What cannot go on is explained: an error body where nothing was sent yet, an error event
   in an open event stream, a broken connection otherwise. Never a clean end.

Other nodes' gateways (`guest`) ask for the engine here by `guests`: the same reading of requests, the
same bounds, the same routes and the same queue, and no step 3 or 6, which are theirs.

`api_errors` is the only place that writes an error for a client to read.
"""
