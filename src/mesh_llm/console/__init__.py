"""The web page of a running node, and the control socket that the command line talks to.

server      the page's port: loopback, its own origin only
access      who may call it: the page, with a token of its own
page        the page's files, as they lie in static/
routes      /api/…: status, invites, stop; also on the unix socket in the node's home,
            where the file's permissions are the key
event_feed  /api/events: one look at the node, for all who watch
qr_code     QR codes as pictures
"""
