"""The HTTP front of a node: everything llama-server answers, on one port, whoever computes it.

The life of a request:

1. `server` takes the connection (`client`) and reads the headers; `guard` refuses strangers.
2. `/health` and `/metrics` are answered here, from `upstream.Serving` and `metrics`.
3. Anything else goes to the engine as it came: `proxy` asks `Serving` where the engine
   listens, waits for one of its `turns`, takes a `connection` to it from the `pool` and sends
   the request there.
4. The answer's body goes from the engine's socket to the client's within one callback:
   `framing` unwraps and checks it, `outlet` wraps it for the client. A client that does not
   keep up pauses the reading of the engine's socket; `silence` bounds every wait.
5. A client that leaves cancels its request, and the engine sees its connection close.
   An engine that dies is explained: an error body where nothing was sent yet, an error
   event in an open event stream, a broken connection otherwise. Never a clean end.

`failures` is the only place that writes an error for a client to read.
"""
