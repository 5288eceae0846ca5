"""What the controller answers over HTTP: health and metrics to everybody, all else to those who have the token."""
