"""A second implementation of the protocol, from its book (``docs/spec``) alone.

It shares no code with ``coterie``: the standard library, ``cryptography`` for the primitives, integers and lists.
It is slow and keeps secrets carelessly; it is there to find out whether the book says enough, and says it right.
"""
