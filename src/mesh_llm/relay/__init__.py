"""`mesh-llm relay`: a server for nodes that cannot reach each other directly, in iroh's relay protocol.

server       accepts clients and passes their packets on
protocol     the messages as bytes
client       one endpoint that is connected
connections  how many TCP connections there may be, and for how long they may stay silent
limits       how much one client may use
metrics      the relay's figures
"""
