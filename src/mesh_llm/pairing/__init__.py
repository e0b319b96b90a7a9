"""Lets a machine of the same network in by a short code, instead of a token that somebody has to carry.

announcement  tells the local network of an offer, and finds offers (multicast DNS)
exchange      the conversation of the two machines: a key exchange by the code, then the token
offer         the side that lets somebody in: open for ten minutes, one code, few attempts
joiner        the side that wants in
"""
