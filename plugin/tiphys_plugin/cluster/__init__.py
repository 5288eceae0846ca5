"""The cluster as the plugin uses it: an interface, a folder for tests and local runs, and Kubernetes."""
