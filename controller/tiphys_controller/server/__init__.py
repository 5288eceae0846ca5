"""The HTTP API of the controller: access control and routes."""
