"""A real Kubernetes for the tests, on one Linux machine as root, without Docker: what the project promises on a
cluster is tried on a real API server, kubelet, container runtime and S3 server.

Each node is a set of Linux namespaces (network, processes, mounts) held open by one process. Ending that process
ends whatever runs on the node and takes its mounts and interfaces along, so that nothing can be left behind.
"""
