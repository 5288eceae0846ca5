"""The same training and the same faults for several ways to survive them on Argo: facts beside each other."""
