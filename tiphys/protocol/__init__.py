"""What compile, plugin, controller and training pods agree on: annotations, step specs, plugin calls, environment."""
