"""MLflow: one tracking run across attempts, submissions and resumes, and models that are registered once.

MLflow chooses the ids of runs and the numbers of versions itself, and cannot
create anything conditionally. So this package finds what it has created by a
tag, names it in a create-only record of the store, and removes what a second
caller created meanwhile. It runs in the pods of a tenant and at the desk: the
services have neither the tenant's credentials for MLflow nor a way to it.
"""
