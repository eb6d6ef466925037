"""Sources of kind hub: a dataset repository at a pinned revision, listed once, its files fetched when they are needed.

client     the hub's client library: imported late, with timeouts; endpoint, token, offline mode and cache are its own
listing    what a repository holds at a revision; nothing in it is trusted
pin        a source's pinned settings and list
http       GET with redirects, deadlines and proxies        patience   timeouts, and how long to wait after a failure
download   one file: resumed, verified, renamed             downloads  a source's files: several at once, a few ahead
"""
