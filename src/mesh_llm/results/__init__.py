"""What a measurement found, as one document: tables and curves with what they depend on.

document   the document, and JSON from it and back
"""
