"""What the services of plugin and controller share: the HTTP server and logging. No training image needs it."""
