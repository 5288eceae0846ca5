"""``tiphys-exec -- PROGRAM ARGS…``: checkpoints of a program that only writes files into a folder.

Such a program knows nothing of commits, and cannot be changed. So the wrapper
fills the folder before the program starts, watches it while it runs, and
commits what the program has finished writing.
"""
