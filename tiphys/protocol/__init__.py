"""The protocol between compiler, plugin, controller and training pods: annotations, calls, environment variables."""
