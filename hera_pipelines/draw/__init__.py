"""Pictures of a run's lineage, also as a tree in the terminal, of its failure costs, and of simulated queues.

Picture and tree of a lineage show the same `LineageGraph`, collapsed by the same
rule, so that they always agree.
"""
