"""``tiphys-exec -- PROGRAM ARGS…``: checkpoints of a program that only writes files into a folder.

Such a program does not use Tiphys and cannot be changed. So the wrapper restores
the folder before the program starts, watches it while the program runs, and
commits each checkpoint that the program has finished.
"""
