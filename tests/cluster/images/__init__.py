"""The images without Docker, for the tests: Debian's Python, the locked packages, the sources, as three layers that
are made again only when what they hold has changed.
"""
