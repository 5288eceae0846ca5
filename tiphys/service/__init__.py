"""HTTP server and logging of the plugin and the controller. Training images do not need this package."""
